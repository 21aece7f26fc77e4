"""The settings whose choices are a table in another room. `config` may not import those rooms, so it is given these."""

from train.data.sources import SOURCES
from train.parallel import METHODS

CHOICES = {"dataset": tuple(SOURCES), "parallel": ("auto", *METHODS)}
