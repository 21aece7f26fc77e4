"""The settings whose choices are a table in another folder. `config` may not import those, so it is given these."""

from rankup.observe.tracker import TRACKERS

from ..data.sources import SOURCES
from ..parallel import METHODS

CHOICES = {"dataset": tuple(SOURCES), "parallel": ("auto", *METHODS), "tracker": ("none", *TRACKERS)}
