"""Before and around the imports that take seconds, torch's above all. No torch here."""

import contextlib
import gc
import getpass
import os
import sys
import tempfile
from collections.abc import Iterator


def prepare_imports() -> None:
    """Set what torch reads while it is imported, and let the user's own module be found.

    A rank that is forked after the import must see what a fresh one sees, so both call this first.
    """
    # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    kept = os.environ.get("RANKUP_CODE")
    if kept and kept not in sys.path:
        sys.path.append(kept)  # a Slurm job's own copy of the current folder's code
    if not {os.getcwd(), ""} & set(sys.path):
        # For the user's own module, which a checkpoint may name: `python -m` puts the current directory on the path,
        # `rankup` and a file do not
        sys.path.append(os.getcwd())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        # torch before 2.13 asks for the user's name while it is imported, and a container's arbitrary user has none
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


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
