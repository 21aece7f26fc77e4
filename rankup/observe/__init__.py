"""What watches a run: its logs, how it stands, its metrics, slow ranks, trackers."""
