"""The ranks of one membership, connected: how a rank meets the others, and learns that one is lost."""
