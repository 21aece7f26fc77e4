"""What was asked for: settings, the rules that combine them, YAML, and the command line. No torch here."""

from train.config.load import changed_settings, check_world_size, load_config, to_yaml
from train.config.settings import Config

__all__ = ["Config", "changed_settings", "check_world_size", "load_config", "to_yaml"]
