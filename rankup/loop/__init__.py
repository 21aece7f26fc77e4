"""What keeps a loop exact: batches, seeds, live state, the commit. `rankup.loop.job` combines them."""
