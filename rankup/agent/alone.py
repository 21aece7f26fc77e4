"""Has this process met another rank? `script_site` runs this file in scripts that do not import rankup, so it imports
only the standard library."""

import contextlib
import os
import sys

# A child of one of these start methods may be the process that meets the others, as in PyTorch's ImageNet example
SPAWNS = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


def is_alone() -> bool:
    """Return whether nothing shows that this process, or a child of it, has met another rank. Call it at the end."""
    modules = sys.modules
    if os.environ.get("HOROVOD_SIZE", "1") != "1" or any(name in modules for name in SPAWNS):
        return False
    with contextlib.suppress(Exception):
        if modules["mpi4py.MPI"].COMM_WORLD.size > 1:
            return False
    with contextlib.suppress(Exception):
        if modules["jax._src.distributed"].global_state.client is not None:
            return False
    with contextlib.suppress(Exception):
        dist = modules["torch.distributed"]
        if dist.is_initialized():
            return bool(dist.get_world_size() == 1)
        # Only this hook is left of a group that was destroyed
        return sys.excepthook.__name__ != "_distributed_excepthook"
    return True


def note(place: str) -> None:
    """Write to the record of this rank whether it has met no other rank. `place`: see `Record.place`."""
    path, _, offset = place.rpartition(":")
    with contextlib.suppress(OSError, ValueError):  # the agent is gone
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(file, bytes([is_alone()]), int(offset))
