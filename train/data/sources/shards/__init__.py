"""Samples in shards: tar files as the package webdataset writes them, in a folder or at a URL."""
