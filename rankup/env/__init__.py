"""Who this process is, read from the environment variables of its launcher. This package does not import torch."""
