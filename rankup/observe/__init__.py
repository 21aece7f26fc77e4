"""What watches a run: logs, status, metrics, goodput, stacks, slow ranks and trackers."""
