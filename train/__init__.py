"""rankup: one PyTorch training job, written once, started anywhere."""
