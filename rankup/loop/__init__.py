"""What keeps a user's own loop exact: batches, seeds, live state, the commit. `rankup.job` puts them together."""
