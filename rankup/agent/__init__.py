"""One agent per node: it meets the others, starts and restarts ranks, and uses no device. No torch here."""
