"""Python imports this when it starts a script for `rankup launch`. From then on SIGRTMAX writes all stacks.

At the end it gives gloo's threads a moment. After the last collective they still release its tensors, for which they
need the interpreter's lock. If Python is already shutting down, it ends such a thread in the middle of C++,
and the process aborts with its work done (`terminate called without an active exception`, PyTorch's issue 179291).

It imports nothing of this project, and leaves no trace: processes that the script starts do not come here, and a
`sitecustomize` of the user or the system follows.
"""

import atexit
import faulthandler
import os
import signal
import sys
import time

END_S = 0.2


def _settle() -> None:
    """The first function that is registered is the last that Python calls before it shuts down."""
    if "torch.distributed" in sys.modules:
        time.sleep(END_S)


atexit.register(_settle)
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [part for part in sys.path if part != _here]
_others = [part for part in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if part != _here]
if _others:
    os.environ["PYTHONPATH"] = os.pathsep.join(_others)
try:
    # Unbuffered and without an object that could be closed: only the handler writes to it
    _file = os.open(os.environ.pop("RANKUP_STACKS"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    faulthandler.register(signal.SIGRTMAX, _file, all_threads=True)
except (KeyError, OSError, ValueError):
    pass  # no variable, or a full disk: the script runs all the same, without stacks
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next one on the path
except ImportError:
    sys.modules["sitecustomize"] = _this
