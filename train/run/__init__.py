"""A run of this program."""
