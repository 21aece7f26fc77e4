"""The settings whose choices are a table in another folder. `config` may not import those, so it is given these."""

from rankup.observe.tracker import TRACKERS
from train.data.sources import SOURCES
from train.parallel import METHODS

CHOICES = {"dataset": tuple(SOURCES), "parallel": ("auto", *METHODS), "tracker": ("none", *TRACKERS)}
