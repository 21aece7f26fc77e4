"""What watches a run: logs, status, metrics, slow ranks, trackers."""
