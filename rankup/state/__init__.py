"""What survives the end of a process: copies of the tracked state."""
