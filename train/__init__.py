"""A training program written with rankup. Start reading in `loop`."""
