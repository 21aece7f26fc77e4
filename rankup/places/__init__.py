"""Where the bytes of a run are stored, and who owns the run. Nothing here imports torch."""
