"""What has to be set before torch is imported, in a rank as in the process that forks ranks. No torch here."""

import getpass
import os
import sys
import tempfile


def prepare_imports() -> None:
    """Set what torch reads while it is imported, and let the user's own module be found.

    A rank that is forked after the import must see what a fresh one sees, so both call this first.
    """
    # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not {os.getcwd(), ""} & set(sys.path):
        # For the user's own module, which a checkpoint may name: `python -m` puts the current directory on the path,
        # `rankup` and a file do not
        sys.path.append(os.getcwd())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        # torch before 2.13 asks for the user's name while it is imported, and a container's arbitrary user has none
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
