"""Imports of hundreds of modules, such as torch's, without the garbage collections that they would trigger. No torch
here."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around slow imports: no garbage is collected in the block, nor ever in what it imported.

    torch and what belongs to it are 350,000 objects. Importing them triggers collections, each of which walks all that
    is there so far: a fifth of the time, as measured, to find 8 MB. Each full collection later would walk them again,
    0.15 s in the middle of a step, and in a forked process it would copy the pages that it marks. Frozen, they are
    left alone; they live as long as the process anyway.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
