"""Data: their sources, samples in memory and in files, order and batches."""


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
