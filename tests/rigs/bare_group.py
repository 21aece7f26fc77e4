"""A group over an existing process group, for its collectives alone: the ranks do not join as in a job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rankup.agent.record import Record
from rankup.group.group import Group


def group_of(rank: int, world_size: int) -> Group:
    launch = SimpleNamespace(rank=rank, world_size=world_size, restart_count=0, agent=None)
    watch: Any = SimpleNamespace(record=Record.new(), status=SimpleNamespace(run_dir=Path()),
                                 hosts=["here"] * world_size, stop=None, log=SimpleNamespace(host="here"))
    return Group(launch, torch.device("cpu"), watch)  # type: ignore[arg-type]
