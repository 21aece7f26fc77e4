"""Python imports this file when it starts a script for `rankup launch`. From then on SIGRTMAX writes all stacks.

At the end of the script this file gives gloo's threads a moment. They release the tensors of the last collective, for
which they need the GIL. If Python is already shutting down, it ends such a thread in the middle of C++ code, and the
process aborts although its work is done (`terminate called without an active exception`, pytorch 179291). It also tells
the agent whether this rank has met another one.

This file imports nothing of this project and leaves no trace: processes that the script starts do not import it, and it
imports the `sitecustomize` of the user or the system, if there is one.
"""

import atexit
import faulthandler
import os
import signal
import sys
import time

END_S = 0.2


def _look_back() -> None:
    """Wait for gloo's threads, and look back. Python calls this function last, because it was registered first."""
    if "torch.distributed" in sys.modules:
        time.sleep(END_S)
    with open(os.path.join(os.path.dirname(_here), "alone.py"), encoding="utf-8") as file:
        exec(file.read() + f"\nnote({_record!r})", {})


_record = os.environ.pop("RANKUP_RECORD", "")
if _record:  # Python may import this file for another reason
    atexit.register(_look_back)
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [part for part in sys.path if part != _here]
_others = [part for part in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if part != _here]
if _others:
    os.environ["PYTHONPATH"] = os.pathsep.join(_others)
try:
    # A bare descriptor: only the handler writes to it, and no file object can close it
    _path = os.environ.pop("RANKUP_STACKS")
    os.makedirs(os.path.dirname(_path), exist_ok=True)
    _file = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    faulthandler.register(signal.SIGRTMAX, _file, all_threads=True)
except (KeyError, OSError, ValueError):
    pass  # without the variable, or on a full disk, the script runs without stacks
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next one on the path
except ImportError:
    sys.modules["sitecustomize"] = _this
