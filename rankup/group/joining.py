"""Joining the group: choose this rank's device and torch's backend, and connect all ranks into one process group.

Agents meet before they start their ranks. Each rank of another launcher starts an agent of its own, see `own_agent`.
"""

import contextlib
import faulthandler
import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rankup
from rankup.agent.links import AgentLine
from rankup.agent.processes import allow_open_files, no_name_lookups
from rankup.agent.protocol import HINT
from rankup.agent.record import Record
from rankup.agent.status_files import StatusFile
from rankup.env.rank_env import RankEnv
from rankup.errors import JoinError, UserError
from rankup.group.group import Group
from rankup.group.stop import StopRequest
from rankup.group.watchdog import Watchdog, describe
from rankup.timing import FORM_S, TORCH_S, WATCHDOG_LATER_S

# A digest of the library's files. It is taken at import, not when ranks meet: a rank may be forked from a process that
# imported the files days ago, and they may have changed on disk since then
VERSION = hashlib.sha256(b"".join(
    file.read_bytes() for folder in rankup.__path__ for file in sorted(Path(folder).rglob("*.py"))
)).hexdigest()[:12]


def start(
    rank_env: RankEnv, run_dir: Path, *, settings: Mapping[str, str], device: str | None, stop: StopRequest
) -> Group:
    """Return a group that is not connected yet. `Program.join` describes the arguments."""
    if not faulthandler.is_enabled():  # after a crash in C++, the log will show the Python line that led to it
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may have no file
            faulthandler.enable()
    # Each of gloo's two groups opens a connection to each rank
    allow_open_files(2 * rank_env.world_size + 256, what=f"a job of {rank_env.world_size} ranks")
    record = Record.of_rank(rank_env.agent) if rank_env.agent else Record.new(rank_env.rank)
    status = StatusFile(run_dir, rank_env)
    watch = Watchdog(status, stop, record=record, log=logging.getLogger("rankup"))
    group = Group(rank_env, pick_device(device, rank_env.local_rank), watch)
    group.backend = pick_backend(group.device)
    group.settings = {"torch version": torch.__version__, "rankup code": VERSION, "backend": group.backend, **settings}
    status.write_summary([])
    return group


def pick_device(wanted: str | None, local_rank: int) -> torch.device:
    """Select this rank's device: `wanted`, or the accelerator if there is one, else the CPU. Raises UserError."""
    found = None if wanted == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    kind, _, index = (wanted or (found.type if found else "cpu")).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or kind != found.type:
        raise UserError(f'device must be one this machine has, got "{wanted}". Use auto or cpu.')
    count = torch.accelerator.device_count()
    number = int(index) if index else local_rank
    if number >= count:
        # Slurm's --gpus-per-task=1 shows each task one device, number 0. `check_devices` finds ranks that share one.
        if count > 1 or index:
            raise UserError(
                f"local rank {local_rank} must have a device of its own, got {count} visible {kind} devices. Start at "
                f"most {count} processes on this node, or look at CUDA_VISIBLE_DEVICES."
            )
        number = 0
    torch.accelerator.set_device_index(number)
    return torch.device(kind, number)


def pick_backend(device: torch.device) -> str:
    """Return gloo, for host memory, plus the device's own backend. Flags and checkpoints travel without the device."""
    own = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


# The steps -----------------------------------------------------------------------------------------------------------


def join(group: Group, *, timeout_s: float) -> None:
    """Connect this rank with all others. `Program.join` describes the arguments and what this raises."""
    if group.world_size == 1:  # a store in memory needs no port
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(group.backend, store=store, rank=0, world_size=1)
        return
    commit, listener = meet(group, timeout_s=timeout_s)
    form(group, commit, listener, timeout_s=timeout_s)
    check_settings(group)
    check_devices(group)


def meet(group: Group, *, timeout_s: float) -> tuple[Mapping[str, Any], socket.socket | None]:
    """First step: find the other ranks, and begin to watch them. Returns the leader's commit, see `protocol`, and the
    listener of torch's store on the rank that serves the store. Raises JoinError, which names the missing ranks or the
    obstacle, and UserError if settings differ or the port can't be used."""
    group.watch.enter("join", timeout_s + WATCHDOG_LATER_S)
    line: Any
    listener: socket.socket | None = None
    if (agent := group.rank_env.agent) is not None:
        commit = group.record.commit
        line = AgentLine.of(agent, group.watch.on_message)
    else:
        from rankup.group.own_agent import OwnAgent  # imported late: other ranks do not need it

        line = OwnAgent(group, timeout_s=timeout_s)
        commit = line.join()
        listener, group.status.attempt = line.listener, commit["job"]
    group.stop.add_reader(line.fileno, line.receive)
    group.hosts = [host for host, count in commit["hosts"] for _ in range(count)]
    group.restarted = commit["restarts"] > 0
    group.watch.connect(line, group.hosts)
    return commit, listener


def form(group: Group, commit: Mapping[str, Any], listener: socket.socket | None, *, timeout_s: float) -> None:
    """Second step: create torch's store and process group. `commit` and `listener` come from `meet`. Raises JoinError
    if that fails, and PeerLost if a rank is lost meanwhile."""
    timeout = timedelta(seconds=TORCH_S)
    try:
        with contextlib.ExitStack() as lookups:
            lookups.enter_context(no_name_lookups())
            group.store = open_store(commit, listener, timeout_s=timeout_s)
            if listener is None:  # the rank that serves the store looks up no names until all clients are connected
                lookups.close()
            # The rest takes seconds, unless a rank has just died, which gloo waits for
            form_s = min(timeout_s, FORM_S + group.world_size / 10)
            group.watch.enter("join", form_s + WATCHDOG_LATER_S)
            # Otherwise torch would end this process after an nccl error, before it has saved the last finished step
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            group.store.set_timeout(timeout)  # also how long nccl waits for its id in the first step
            dist.init_process_group(
                group.backend, store=group.store, rank=group.rank, world_size=group.world_size, timeout=timeout
            )
            # The barrier uses every gloo connection that a step uses. gloo accepts any process that sends the number of
            # the peer it expects. If a stranger has taken a peer's place that way, fail here and not in a step
            if group.backend == "gloo":
                dist.barrier()
                # If a rank leaves its loop while others exchange gradients, gloo would mix their collectives, or abort
                group.own = dist.new_group(backend="gloo")
            group.barrier()
            group.watch.begun = group.begun
    except (RuntimeError, ValueError) as error:
        group.log.debug(f"{type(error).__name__}: {error}")
        suspects = group.watch.suspects()
        if suspects and not suspects[0].alive:
            raise group.watch.loss(suspects) from None
        raise JoinError(
            f"all ranks reached each other, but could not form a group: {str(error).splitlines()[0][:300]}; "
            f"{describe(suspects, group.hosts)}. {HINT}"
        ) from None


def open_store(commit: Mapping[str, Any], listener: socket.socket | None, *, timeout_s: float) -> TCPStore:
    """Open torch's store at the commit's address. Raises RuntimeError if something other than a store answers there."""
    return TCPStore(
        commit["ip"], commit["port"], timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        is_master=listener is not None, master_listen_fd=listener.detach() if listener is not None else None,
    )


def check_settings(group: Group) -> None:
    """Raise UserError if ranks differ in code or settings. Ranks without an agent compared them when they met. Ranks of
    agents also learn the ids of the job that the agents of the other nodes know."""
    found = group.gather([dict(group.settings), sorted(group.jobs)]) if group.rank_env.agent is not None else []
    group.jobs.update(job for _, jobs in found for job in jobs)
    if any(settings != group.settings for settings, _ in found):
        for name in dict.fromkeys(name for settings, _ in found for name in settings):
            value = group.settings.get(name, "nothing")
            group.must_match(name, value, remedy="Start all ranks with the same program and settings.")


def check_devices(group: Group) -> None:
    """Raise UserError if two ranks use the same GPU. Otherwise nccl would report "Duplicate GPU detected" much later,
    and with gloo the ranks would only be slow."""
    if group.device.type != "cuda":
        return
    owners: dict[str, int] = {}
    for rank, uuid in enumerate(group.gather(str(torch.cuda.get_device_properties(group.device).uuid))):
        if owners.setdefault(uuid, rank) != rank:
            raise UserError(
                f"ranks {owners[uuid]} and {rank} must each have a device of their own, got the same GPU on "
                f"{group.hosts[rank]}. Start as many processes as there are GPUs, or set LOCAL_RANK."
            )
