"""The settings whose choices are a table in another folder. `config` may not import those, so it is given these."""

from train.data.sources import SOURCES
from train.parallel import METHODS
from train.run.trackers.table import TRACKERS

CHOICES = {"dataset": tuple(SOURCES), "parallel": ("auto", *METHODS), "tracker": ("none", *TRACKERS)}
