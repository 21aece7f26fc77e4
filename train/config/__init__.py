"""What was asked for: settings, the rules that combine them, and YAML. No torch here."""

from .load import changed_settings, check_run, foreign, load_config, to_yaml
from .settings import Config

__all__ = ["Config", "changed_settings", "check_run", "foreign", "load_config", "to_yaml"]
