"""NCCL's flight recorder: torch notes the last collectives of each rank, and this has them kept in the run's folder.

A hang in a collective has its cause on the rank that did not come, or came with something else. The recorder knows
which collective each rank has begun last; the stacks show only where the program waits for it. No torch here.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from train.process.stacks import FOLDER

# How many collectives are kept, torch's own default of late. torch has two names for each setting, and a user may have
# set either; of the two the first one counts.
ENTRIES = "2000"
SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # of the file's name; torch appends the rank
ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)  # torch's own, which a script of the user's runs into
COMPARE = "python -m torch.distributed.flight_recorder.fr_trace"


def environment(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that switch it on, without those that the user has set."""
    wanted = {SIZE: ENTRIES, PREFIX: str((run_dir / FOLDER / "nccl" / "rank-").resolve()), ON_TIMEOUT: "1"}
    return {names[0]: value for names, value in wanted.items() if not any(name in environ for name in names)}


def switch_on(run_dir: Path) -> None:
    """Before nccl's process group is made, which reads the variables. A disk that can't be written to costs only it."""
    os.environ.update(environment(run_dir, os.environ))
    if prefix := _prefix():
        with contextlib.suppress(OSError):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)


def lines(rank: int) -> list[str]:
    """What to say of the file that `dump` is going to write; nothing where it will write none."""
    if not _recording():
        return []
    file = Path(f"{_prefix()}{rank}")
    return [f"The last collectives of NCCL are in {file}; `{COMPARE} {file.parent}` compares those of all ranks"]


def dump(rank: int) -> None:
    """Write what was recorded, where torch would write it at its own, later timeout.

    For a process that is about to end, as its last word: nobody promises that torch answers while NCCL hangs.
    """
    if not _recording():
        return
    from torch._C import _distributed_c10d

    with contextlib.suppress(OSError, RuntimeError):
        Path(f"{_prefix()}{rank}").write_bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def _prefix() -> str:
    return next((os.environ[name] for name in PREFIX if os.environ.get(name)), "")


def _recording() -> bool:
    """Whether this process has a group of nccl's, and the recorder is on."""
    on = next((os.environ[name] for name in SIZE if name in os.environ), "0")
    if not _prefix() or on == "0" or "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized() and "nccl" in str(dist.get_backend_config())
