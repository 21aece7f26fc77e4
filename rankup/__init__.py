"""Starts PyTorch jobs anywhere and keeps them alive. It knows nothing about models or data.

`job = rankup.init("runs/mine", seed=0)` is the library's way in, see `loop.md`. It imports torch.
"""

from typing import TYPE_CHECKING, Any

from rankup.errors import JoinError as JoinError
from rankup.errors import PeerLost as PeerLost
from rankup.errors import Stopped as Stopped
from rankup.errors import UserError as UserError

if TYPE_CHECKING:
    from rankup.job import Job as Job
    from rankup.job import init as init

__all__ = ["Job", "JoinError", "PeerLost", "Stopped", "UserError", "init"]


def __getattr__(name: str) -> Any:
    if name not in ("Job", "init"):
        raise AttributeError(f"module 'rankup' has no attribute {name!r}")
    from rankup import job

    return getattr(job, name)
