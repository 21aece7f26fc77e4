"""The settings of a run, how they are read from YAML and flags, and how they are checked. No torch here."""

from .load import changed_settings, check_run, foreign, load_config, to_yaml
from .settings import Config

__all__ = ["Config", "changed_settings", "check_run", "foreign", "load_config", "to_yaml"]
