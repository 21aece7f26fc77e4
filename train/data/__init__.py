"""Samples, their order, and batches of them; `sources/` says where data sets come from."""

from train.data.samples import MapSamples, Samples, TensorSamples

__all__ = ["MapSamples", "Samples", "TensorSamples"]
