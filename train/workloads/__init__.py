"""Workloads: a model, its samples, and the functions that compute loss and metrics of a batch.

Users add a workload as a function `build(config) -> Workload`, and name it by its path: `--workload mypkg.job:build`.
"""

from .workload import Sums, TensorSamples, Workload, load

__all__ = ["Sums", "TensorSamples", "Workload", "load"]
