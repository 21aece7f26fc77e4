"""rankup starts one PyTorch training job anywhere and keeps it alive."""
