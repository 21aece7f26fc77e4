"""Samples, their order, and batches of them; `sources/` says where data sets come from."""
