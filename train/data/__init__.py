"""Data: where they come from, samples in memory and in files, their order, and batches."""


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
