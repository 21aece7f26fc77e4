"""A run of this program. No torch here: the settings whose choices are a table in another folder, which `config` may
not import, so that it is given these."""

from ..data.sources import SOURCES
from ..parallel import METHODS

CHOICES = {"dataset": tuple(SOURCES), "parallel": ("auto", *METHODS), "tracker": ("none", "mlflow", "wandb")}
