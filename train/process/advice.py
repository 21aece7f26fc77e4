"""What is likely to be slow or to fail later, said at the start of a training, one line for each. No torch here."""

import math
from collections.abc import Callable

from train.config import Config
from train.process.placement import Launch

LEAST_CPU = 0.75  # of a CPU for each thread: a thread of ours waits now and then, so a little less is no loss


def on_cpus(config: Config, launch: Launch, cpus: float | None) -> list[str]:
    """Whether this node's ranks have more threads than CPUs. `cpus`: those that this process may use, None: unknown."""
    ranks = launch.local_world_size or 1
    wanted = ranks * config.num_threads
    if cpus is None or (wanted <= math.ceil(cpus) and wanted * LEAST_CPU <= cpus):
        return []
    if wanted == 1:
        return [
            f"1 process of 1 thread, but only {cpus:g} CPUs to use (the container's limit): it will often stand still. "
            "Allow more CPUs."
        ]
    share = max(1, math.floor(cpus) // ranks)
    way_out = f"Set --num-threads {share}" if share < config.num_threads else "Start fewer processes here"
    return [
        f"{_processes(ranks)} x {config.num_threads} threads on this node, but only {cpus:g} CPUs to use (affinity, or "
        f"the container's limit): they will wait for each other. {way_out}, or allow more CPUs."
    ]


def on_devices(launch: Launch, num_devices: int) -> list[str]:
    """Accelerators that no rank will use: so it looks when somebody gave the number of nodes for that of ranks."""
    ranks = launch.local_world_size
    if ranks is None or num_devices <= ranks:
        return []
    return [
        f"{num_devices} devices on this node, but only {_processes(ranks)}: {num_devices - ranks} will stay idle. "
        f"Start {num_devices} (launch --nproc {num_devices}, torchrun --nproc-per-node {num_devices}), or show fewer "
        "in CUDA_VISIBLE_DEVICES."
    ]


def on_shared_memory(config: Config, launch: Launch, *, batch_bytes: int, free_bytes: int, way_out: str) -> list[str]:
    """Whether /dev/shm has room for the batches that the workers of all ranks of this node prepare ahead.

    `batch_bytes`: of one training batch and one evaluation batch together, as the training workers keep theirs while an
    evaluation runs. `way_out`: how to enlarge /dev/shm.
    """
    ranks = launch.local_world_size or 1
    ahead = ranks * config.num_workers * config.prefetch_factor
    if ahead * batch_bytes <= free_bytes:
        return []
    return [
        f"/dev/shm has {_mib(free_bytes)} free, but {_processes(ranks)} x {config.num_workers} workers x "
        f"{config.prefetch_factor} batches may need {_mib(ahead * batch_bytes)}: they would end with a bus error. "
        f"{way_out}, or set fewer --num-workers."
    ]


def say(lines: list[str], launch: Launch, warn: Callable[[str], None]) -> None:
    """Each line once for a node, not once for a rank."""
    if launch.local_rank == 0:
        for line in lines:
            warn(line)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
