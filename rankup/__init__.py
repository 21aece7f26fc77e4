"""Starts PyTorch jobs anywhere and keeps them alive. This library knows nothing about models or data.

Begin with `job = rankup.init("runs/mine", seed=0)`, which imports torch; see `loop.md`. A program may rely on the names
below, and on no others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup import cli as cli
    from rankup import seeds as seeds
    from rankup import urls as urls
    from rankup.env.rank_env import RankEnv as RankEnv
    from rankup.errors import JoinError as JoinError
    from rankup.errors import PeerLost as PeerLost
    from rankup.errors import Stopped as Stopped
    from rankup.errors import UserError as UserError
    from rankup.group.group import Group as Group
    from rankup.job import init as init
    from rankup.job import open_checkpoint as open_checkpoint
    from rankup.job import open_job as open_job
    from rankup.loop.job import Job as Job
    from rankup.loop.settings import Settings as Settings
    from rankup.loop.workers import Workers as Workers
    from rankup.notebook import spawn as spawn
    from rankup.places.files import cache_roots as cache_roots
    from rankup.process import Program as Program
    from rankup.state.reading import Copy as Copy
    from rankup.state.second_place import fetched as fetched

# Name -> the module that defines it. The module is imported at first use, so that the command line needs no torch
_HOMES = {
    # For a training loop of your own
    "init": "job", "Job": "loop.job", "spawn": "notebook",
    "JoinError": "errors", "PeerLost": "errors", "Stopped": "errors", "UserError": "errors",
    # For a program of your own, with settings and a command line
    "Program": "process", "RankEnv": "env.rank_env", "Group": "group.group",
    "Settings": "loop.settings", "open_job": "job", "open_checkpoint": "job", "Copy": "state.reading",
    "fetched": "state.second_place", "cache_roots": "places.files", "Workers": "loop.workers",
    # Modules
    "cli": "cli", "seeds": "seeds", "urls": "urls",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rankup' has no attribute {name!r}")
    module = import_module(f"rankup.{_HOMES[name]}")
    return module if name == _HOMES[name] else getattr(module, name)
