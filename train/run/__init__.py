"""The outputs of a run: its directory, evaluation, weights and result."""
