"""The group of ranks: device, backend, process group as a context manager, and the few collectives the loop needs.

The process group is always left in an orderly way: a rank that fails says so to the others and exits at once (torch's
own teardown may wait for the dead); after success rank 0, which hosts the store, leaves last.
"""

import contextlib
import hashlib
import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch exports these under a condition that mypy does not follow
from torch.distributed import HashStore  # type: ignore[attr-defined]

from train.config import Config
from train.errors import PEER_LOST, JoinError, LaunchError, PeerLost, Stopped, UserError, exit_code, reason
from train.group.connectivity import HINT, check_connectivity
from train.group.failure_detector import describe, root_exit_code
from train.group.rendezvous import Meeting, meet
from train.group.watchdog import Watchdog
from train.process.env import Launch
from train.process.log import Log
from train.process.status import (
    UNDECIDED,
    End,
    new_attempt,
    read_json,
    state_of,
    tell_torchrun,
    write_end,
    write_summary,
)
from train.process.stop import StopRequest

# gloo's and nccl's own timeouts lie behind ours, which know the phase and name the rank.
BEHIND_OURS_S = 120.0
# How long ranks that reach each other may take to connect, more where there are many.
FORM_S = 20.0
LINGER_S = 3.0  # rank 0 hosts the store, in which the others look for the cause: it leaves after them, bounded
# What a collective says when the other side is gone. torch raises these as plain RuntimeError, without a class.
LOST = re.compile(
    r"gloo/transport/|closed by peer|reset by peer|Broken pipe|connectFullMesh|Timed out waiting \d+ms|Socket closed|"
    r"recvValue|sendBytes|Connection was likely closed|NCCL (error|communicator)|Application timeout|"
    r"Horovod has been shut down",
    re.IGNORECASE,
)


class Group:
    """This rank's place among all, and the collectives over host memory that keep the ranks in step."""

    def __init__(
        self, launch: Launch, device: torch.device, log: Log, watch: Watchdog, stop: StopRequest, *, attempt: str,
        run_dir: Path,
    ) -> None:
        self.launch, self.device, self.log, self.watch, self.stop = launch, device, log, watch, stop
        self.rank, self.world_size = launch.rank, launch.world_size
        self.attempt, self.run_dir = attempt, run_dir
        self.hosts: list[str] = [log.host] * launch.world_size
        self.restarted = launch.restart_count > 0
        self.meeting: Meeting | None = None
        self.step = 0
        self._owns_run: Callable[[], bool] | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.max(0)

    def min(self, value: int) -> int:
        """The smallest `value` of all ranks, an int32."""
        return -self.max(-value)

    def max(self, value: int) -> int:
        """The largest `value` of all ranks, an int32. Waits on the host, never on the device."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int32)
        self._collective(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
        return int(tensor.item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a host tensor over all ranks, in place."""
        if self.world_size > 1:
            self._collective(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._collective(lambda: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on all ranks; bytes of any size included."""
        if self.world_size == 1:
            return value
        holder = [value]
        self._collective(lambda: dist.broadcast_object_list(holder, src=0, device=torch.device("cpu")))
        return holder[0]

    def must_match(self, what: str, value: str, *, remedy: str) -> None:
        """Raises UserError on every rank where `value` differs between ranks, naming the first that differs."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"{what} must be the same on all ranks, got {values[0]} on rank 0 ({self.hosts[0]}) and {other} on "
                    f"rank {rank} ({self.hosts[rank]}). {remedy}",
                    printed_elsewhere=not self.is_rank0,
                )

    def _collective(self, call: Any) -> None:
        self.watch.wait_for_others(True)
        call()
        self.watch.wait_for_others(False)

    # Ends -----------------------------------------------------------------------------------------------------

    def tell(
        self, code: int, why: str, suspect: int | None = None, *, linger_s: float = 0.0, alone: bool = False
    ) -> None:
        """Record how this rank ends: in the store, where the others look for the cause, and in `status/`.

        Rank 0 hosts the store: it stays until all others have told their end, or `linger_s` at most. `alone`: it stops
        without the others, who have to be told as if it had failed.
        """
        end = End(self.rank, self.log.host, state_of(code), code, why, self.step, suspect)
        if self.meeting is not None:
            with contextlib.suppress(RuntimeError):
                self.meeting.store.set(f"end/{self.rank}", end.to_json())
                if end.state == "failed" or alone:
                    self.meeting.store.set("failed", str(self.rank))
        with contextlib.suppress(OSError):  # a full disk must not hide the reason that is being told
            write_end(self.run_dir, self.attempt, end)
        self.summarise(end.state, self._ends(end) if self.is_rank0 else [])
        # After a failure under torchrun, whose agent keeps the store, nobody needs this rank
        needed = self.meeting is not None and (self.meeting.hosts_store or end.state != "failed")
        if self.is_rank0 and needed:
            until_s = time.monotonic() + linger_s
            while not self._all_told(end) and time.monotonic() < until_s:
                time.sleep(0.02)
            self.summarise(end.state, self._ends(end))

    def claim_status_file(self, still: Callable[[], bool]) -> None:
        """The run directory is this attempt's as long as `still` says so, and with it `status.json`. Rank 0 only."""
        self._owns_run = still
        self.summarise("running", [])

    def summarise(self, state: str, ends: list[End]) -> None:
        """Write `status.json`, on rank 0. An attempt that owns the run no more must not; one that does not own it yet only
        replaces what is over, so that a second attempt leaves no trace in the first one's."""
        if not self.is_rank0:
            return
        earlier = read_json(self.run_dir / "status.json") or {}
        over = earlier.get("state") != "running" or earlier.get("attempt") == self.attempt
        if self._owns_run() if self._owns_run is not None else over:
            with contextlib.suppress(OSError):
                write_summary(self.run_dir, self.attempt, state=state, world_size=self.world_size, ends=ends)

    def _ends(self, own: End) -> list[End]:
        ends = [own]
        if self.meeting is not None:
            store = self.meeting.store
            with contextlib.suppress(RuntimeError):
                others = [f"end/{rank}" for rank in range(self.world_size) if rank != self.rank]
                ends += [End.from_json(store.get(key)) for key in others if store.check([key])]
        return ends

    def _all_told(self, own: End) -> bool:
        told = {end.rank for end in self._ends(own) if end.state != UNDECIDED}
        return len(told | ({own.suspect} - {None})) == self.world_size  # who was lost tells nothing


def pick_device(wanted: str, local_rank: int, *, distributed: bool) -> torch.device:
    """The device of this rank: "auto" takes the accelerator if there is one, else the CPU.

    CUDA numbers devices in the order of CUDA_VISIBLE_DEVICES. Raises LaunchError where there is none to take.
    """
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        # Apple's mps has no backend that reduces over ranks.
        wanted = "cpu" if found is None or (found.type == "mps" and distributed) else found.type
    kind, _, index = wanted.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind, None)
    count = int(module.device_count()) if module is not None and hasattr(module, "device_count") else 0
    if count == 0:
        raise LaunchError(f'device must be one this machine has, got "{wanted}". Use --device auto or cpu.')
    number = int(index) if index else local_rank
    if number >= count:
        # Slurm's --gpus-per-task=1 shows each task one device, numbered 0. Two ranks on one device are found later.
        if count > 1 or index:
            raise LaunchError(
                f"local rank {local_rank} must have a device of its own, got {count} visible {kind} devices. Start at most "
                f"{count} processes on this node, or look at CUDA_VISIBLE_DEVICES."
            )
        number = 0
    device = torch.device(kind, number)
    torch.accelerator.set_device_index(number)
    return device


def pick_backend(wanted: str, device: torch.device) -> str:
    """gloo for host memory always, beside the device's own: flags and checkpoints travel without the device."""
    if device.type == "cpu":
        return "gloo"
    own = wanted if wanted != "auto" else dist.get_default_backend_for_device(device)
    return "gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


@contextlib.contextmanager
def join(
    config: Config, launch: Launch, *, log: Log, stop: StopRequest, run_dir: Path, attempt: str,
    reached: Callable[[str, Group], None] = lambda stage, group: None, needs_process_group: bool = False,
) -> Iterator[Group]:
    """Be one of the group for the length of the block. `reached` hears of each stage as it is passed: members, ways, group.
    `needs_process_group`: one rank alone gets torch's process group too.

    Raises JoinError (170) if it does not come together, PeerLost (171) if it falls apart, and whatever the block raises;
    each is told to the other ranks first.
    """
    watch = Watchdog(log, rank=launch.rank, world_size=launch.world_size)
    # DataParallel wants the module on the first of its devices
    wanted = f"cuda:{config.device_ids.split(',')[0]}" if config.device_ids else config.device
    device = pick_device(wanted, launch.local_rank, distributed=launch.world_size > 1)
    group = Group(launch, device, log, watch, stop, attempt=attempt or new_attempt(), run_dir=run_dir)
    watch.before_exit = lambda code, why, suspect: group.tell(code, why, suspect, linger_s=LINGER_S)
    stop.before_leaving = lambda why: group.tell(Stopped.code, why, linger_s=2.0, alone=True)
    group.summarise("running", [])
    try:
        if launch.world_size > 1:
            _come_together(config, group, reached)
        elif needs_process_group:
            dist.init_process_group(pick_backend(config.backend, device), store=HashStore(), rank=0, world_size=1)
        yield group
        _part(group)
    except BaseException as error:
        watch.exit_within(PEER_LOST)  # the phase that failed is over, its deadline must not cut this short
        failure = explain(group, error)
        watch.exit_within(exit_code(failure))
        tell_torchrun(failure)
        # Tell before leaving: the others look here for the cause when their collectives break.
        group.tell(exit_code(failure), reason(failure), getattr(failure, "suspect", None), linger_s=LINGER_S)
        watch.end()
        if failure is error:
            raise
        raise failure from error


def _come_together(config: Config, group: Group, reached: Callable[[str, Group], None]) -> None:
    launch, watch, log = group.launch, group.watch, group.log
    watch.enter("join", config.join_timeout_s + 10.0)
    backend = pick_backend(config.backend, group.device)
    meeting = meet(
        launch, fingerprint=fingerprint(config, backend), attempt=group.attempt, timeout_s=config.join_timeout_s, log=log
    )
    group.meeting, group.attempt = meeting, meeting.attempt
    group.hosts = [member.host for member in meeting.members]
    group.restarted = any(member.restarts for member in meeting.members)
    watch.connect(meeting.beat_store, group.hosts, agent_store=launch.agent_store)
    reached("members", group)
    check_connectivity(meeting, launch.rank, log=log)
    reached("ways", group)
    # All reached each other a moment ago: what is left takes seconds, unless a rank has just died, which gloo waits for
    watch.enter("join", min(config.join_timeout_s, FORM_S + launch.world_size / 10) + 10.0)
    longest_s = max(config.setup_timeout_s, config.step_timeout_s, config.eval_timeout_s, config.save_timeout_s)
    timeout = timedelta(seconds=longest_s + BEHIND_OURS_S)
    meeting.store.set_timeout(timeout)  # so far it was what was left of the time to join; nccl waits for its id with it
    try:
        dist.init_process_group(
            backend, store=meeting.store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
        dist.barrier() if backend == "gloo" else group.barrier()
    except (RuntimeError, ValueError) as error:
        log.debug(f"{type(error).__name__}: {error}")
        suspects = watch.suspects()
        raise JoinError(
            f"all ranks reached each other, but could not form a group: {str(error).splitlines()[0][:300]}; "
            f"{describe(suspects, group.hosts)}. {HINT}"
        ) from None
    reached("group", group)
    _check_devices(group)


def _check_devices(group: Group) -> None:
    """One device for each rank: nccl would report "Duplicate GPU detected" much later, and gloo would just be slow."""
    if group.device.type != "cuda":
        return
    uuid = str(torch.cuda.get_device_properties(group.device).uuid)
    owners: dict[str, int] = {}
    for rank, other in enumerate(group.gather(uuid)):
        if other in owners:
            raise LaunchError(
                f"ranks {owners[other]} and {rank} must each have a device of their own, got the same GPU on "
                f"{group.hosts[rank]}. Start as many processes as there are GPUs, or set LOCAL_RANK."
            )
        owners[other] = rank


def fingerprint(config: Config, backend: str) -> dict[str, str]:
    """What has to be the same on all ranks, by name. Paths may differ from node to node, and so may what is shown."""
    own = {"data_dir", "labels_file", "run_dir", "tensorboard", "progress", "report_every_s", "num_workers", "prefetch_factor"}
    settings = {f"setting {k}": json.dumps(v) for k, v in config.model_dump().items() if k not in own}
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    if ":" in config.workload:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(config.workload.partition(":")[0])
            if spec and spec.origin:
                digest.update(Path(spec.origin).read_bytes())
    code = digest.hexdigest()[:12]
    return {"torch version": torch.__version__, "program code": code, "backend": backend, **settings}


def _part(group: Group) -> None:
    """Leave after success: all arrive here, let go of each other, and only then rank 0, whose process holds the store, goes.

    A connection that ends before its user is an error to torch, which says so in many lines on a run that went well.
    """
    group.barrier()
    group.watch.end_beats()
    if dist.is_initialized():
        dist.destroy_process_group()
    group.tell(0, "finished", linger_s=10.0)
    group.watch.end()


def explain(group: Group, error: BaseException) -> BaseException:
    """The failure behind an error: what a collective raises when a peer is gone says nothing of who and why."""
    # A failed check inside gloo (of sizes that differ, say) is a fault, although it carries the path of the connection
    lost = isinstance(error, RuntimeError) and LOST.search(str(error)) and "enforce fail" not in str(error)
    if isinstance(error, JoinError | PeerLost) or group.meeting is None or not (lost or isinstance(error, dist.DistError)):
        return error
    suspects = group.watch.suspects()
    group.log.debug(f"{type(error).__name__}: {error}")
    end = suspects[0].end if suspects else None
    if end is not None and end.code == Stopped.code:
        # It did not wait to save, and to stop is what was asked for: no reason to start again
        return Stopped(f"rank {end.rank} on {end.host} left: {end.why}")
    return PeerLost(
        f"lost a peer at step {group.step}: {describe(suspects, group.hosts)}",
        code=root_exit_code(suspects, PEER_LOST) if suspects else PEER_LOST,
        suspect=suspects[0].rank if suspects else None,
        nobody_died=all(suspect.alive for suspect in suspects),
    )
