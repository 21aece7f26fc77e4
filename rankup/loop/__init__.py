"""The parts that make a loop exact: batches, tracked state, commits, saves. `rankup.loop.job` combines them."""
