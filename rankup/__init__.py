"""Starts PyTorch jobs anywhere and keeps them alive. It knows nothing about models or data.

`job = rankup.init("runs/mine", seed=0)` is the library's way in, see `loop.md`. It imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup.errors import JoinError as JoinError
    from rankup.errors import PeerLost as PeerLost
    from rankup.errors import Stopped as Stopped
    from rankup.errors import UserError as UserError
    from rankup.job import init as init
    from rankup.loop.job import Job as Job

__all__ = ["Job", "JoinError", "PeerLost", "Stopped", "UserError", "init"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rankup' has no attribute {name!r}")
    # Not before: `python -m rankup.errors`, which shell files run, must find it not imported yet
    module = {"init": "rankup.job", "Job": "rankup.loop.job"}.get(name, "rankup.errors")
    return getattr(import_module(module), name)
