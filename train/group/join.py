"""Joining the group in three steps, being one of it for the length of a block, and leaving it.

The group is always left in an orderly way: a rank that fails reports it to the others and exits at once (torch's own
teardown may wait for the dead); after success rank 0, whose process holds the store, leaves last.
"""

import contextlib
import dis
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rankup.agent.ends import LOST_PEER
from rankup.agent.meeting import HINT, describe_differences
from rankup.agent.protocol import Member
from rankup.agent.record import RecordWriter
from rankup.agent.status import StatusFile, tell_torchrun
from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, PEER_LOST, JoinError, LaunchError, PeerLost, Stopped, UserError, exit_code, reason
from rankup.group.stacks import record_collectives
from rankup.group.stop import StopRequest
from train.config import Config
from train.group import meeting
from train.group.device import pick_backend, pick_device
from train.group.ends import EndReporter
from train.group.group import BEHIND_OURS_S, Group
from train.group.host_link import open_link
from train.group.losses import Losses, Suspect, describe, root_exit_code
from train.group.watchdog import Watchdog

# Each step of joining has its own deadline, whose message says more; the watchdog's comes this much later.
WATCHDOG_LATER_S = 10.0
# How long ranks that reach each other may take to connect; more where there are many.
FORM_S = 20.0


@contextlib.contextmanager
def join(
    config: Config, launch: RankEnv, *, log: logging.Logger, stop: StopRequest, status: StatusFile,
    needs_process_group: bool = False,
) -> Iterator[Group]:
    """Be one of the group for the length of the block. `needs_process_group`: even a rank alone gets torch's group.

    Raises JoinError (170) if it does not come together, PeerLost (171) if it falls apart, UserError (2) where ranks
    differ, and whatever the block raises; each is reported to the other ranks first.
    """
    with starting(config, launch, stop=stop, ends=EndReporter(status, log), log=log) as group:
        if launch.world_size > 1:
            meet(config, group)
            form(config, group)
            check_settings(config, group)
            check_devices(group)
        elif needs_process_group:  # with a store in memory, which reaches nobody and needs no port
            backend = pick_backend(config.backend, group.device)
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        yield group


@contextlib.contextmanager
def starting(
    config: Config, launch: RankEnv, *, stop: StopRequest, ends: EndReporter, log: logging.Logger
) -> Iterator[Group]:
    """A group of which only this rank is known yet; the block takes the steps `meet` and `form` itself.

    However the block ends, that end is explained, reported to the ranks that have been met by then, and bounded.
    """
    record = RecordWriter(launch.agent["record"] if launch.agent else None, rank=launch.rank)
    watch = Watchdog(ends, stop, record=record, log=log)
    # DataParallel wants the module on the first of its devices
    wanted = f"cuda:{config.device_ids.split(',')[0]}" if config.device_ids else config.device
    device = pick_device(wanted, launch.local_rank, distributed=launch.world_size > 1)
    group = Group(launch, device, watch=watch, stop=stop, ends=ends, log=log)
    ends.status.write_summary([])
    try:
        yield group
        _part(group)
    except BaseException as error:
        watch.wait_if_leaving()
        watch.exit_within(PEER_LOST)  # the phase that failed is over, its deadline must not cut this short
        failure = _explain(group, error)
        watch.exit_within(exit_code(failure))
        tell_torchrun(failure)
        # Report before leaving: the others look here for the cause when their collectives break
        stopped = isinstance(error, Stopped)  # all ranks come to the same step
        ends.report(exit_code(failure), reason(failure), getattr(failure, "suspect", None), together=stopped)
        watch.end()
        if failure is error:
            raise
        raise failure from error


# Three steps ---------------------------------------------------------------------------------------------------------


def meet(config: Config, group: Group) -> None:
    """First step: find the others in a store, by name, and begin to watch each other.

    Raises JoinError naming who is missing or what is in the way, UserError where ranks differ in code or settings, and
    LaunchError where the port cannot be used.
    """
    launch = group.launch
    group.watch.enter("join", config.join_timeout_s + WATCHDOG_LATER_S)
    same = fingerprint(config, pick_backend(config.backend, group.device))
    met = meeting.meet(
        launch, settings=same, attempt=group.attempt, timeout_s=config.join_timeout_s, log=group.log,
        record=group.record,
    )
    group.meeting, group.status.attempt = met, met.attempt
    group.hosts, group.restarted = met.hosts, met.restarted
    losses = Losses(met.line, group.rank, ask=group.stop.ask)
    group.stop.tell_others(lambda name: met.line.say("stop", signal=name))
    group.ends.connect(met.line, met.hosts, losses)
    group.watch.watch(losses, group.hosts)


def form(config: Config, group: Group) -> None:
    """Third step: torch's process group, with gloo for host memory always. Raises JoinError."""
    backend = pick_backend(config.backend, group.device)
    assert group.meeting is not None, "the ranks have to meet first"
    # All reached each other a moment ago: what is left takes seconds, unless a rank has just died, which gloo waits for
    form_s = min(config.join_timeout_s, FORM_S + group.world_size / 10)
    group.watch.enter("join", form_s + WATCHDOG_LATER_S)
    longest_s = max(config.setup_timeout_s, config.step_timeout_s, config.eval_timeout_s, config.save_timeout_s)
    timeout = timedelta(seconds=longest_s + BEHIND_OURS_S)
    # So far it was what was left of the time to join; nccl waits with it for the id that it exchanges at the first step
    group.meeting.store.set_timeout(timeout)
    if "nccl" in backend:
        record_collectives(group.run_dir)
    try:
        dist.init_process_group(
            backend, store=group.meeting.store, rank=group.rank, world_size=group.world_size, timeout=timeout
        )
        # It uses each connection of gloo's that a step uses. gloo takes whoever sends the right number for the
        # peer that it waits for; a peer whose place is taken waits in vain, and that has to be here, not in a step
        dist.barrier() if backend == "gloo" else group.barrier()
        group.link = open_link(group.rank, group.world_size, gather=group.gather)
        group.meeting.until_formed.close()
    except (RuntimeError, ValueError) as error:
        group.log.debug(f"{type(error).__name__}: {error}")
        suspects = group.watch.suspects()
        if suspects and not suspects[0].alive:
            raise _peer_lost(group, suspects) from None
        raise JoinError(
            f"all ranks reached each other, but could not form a group: {str(error).splitlines()[0][:300]}; "
            f"{describe(suspects, group.hosts)}. {HINT}"
        ) from None


def check_settings(config: Config, group: Group) -> None:
    """Raises UserError where ranks differ in code or settings. Without an agent their meeting has seen to that."""
    if group.launch.agent is None:
        return
    same = fingerprint(config, pick_backend(config.backend, group.device))
    digests = group.gather(meeting.digest(same))
    if len(set(digests)) > 1:
        members = [
            Member("", rank, 1, group.world_size, host, 0, digest, 0.0)
            for rank, (host, digest) in enumerate(zip(group.hosts, digests, strict=True))
        ]
        settings = dict(zip(digests, group.gather(same), strict=True))
        raise UserError(describe_differences(members, settings), printed_elsewhere=not group.is_rank0)


def check_devices(group: Group) -> None:
    """Raises LaunchError where two ranks use one GPU: nccl would report "Duplicate GPU detected" much later, and gloo
    would just be slow."""
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
    own = {"data_dir", "labels_file", "run_dir", "tensorboard", "tracker", "progress", "report_every_s",
           "num_workers", "prefetch_factor"}
    settings = {f"setting {k}": json.dumps(v) for k, v in config.model_dump().items() if k not in own}
    spec = None
    if ":" in config.workload:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(config.workload.partition(":")[0])
    code = _code(Path(spec.origin)) if spec and spec.origin else _code()
    return {"torch version": torch.__version__, "program code": code, "backend": backend, **settings}


def _digest(files: Iterable[Path]) -> bytes:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


# Of all files of rankup/ and train/ as they are imported, not as they are when ranks meet: a rank may be forked from a
# process that has imported them days ago
IMPORTED = _digest(
    path for name in ("rankup", "train") for path in sorted((Path(__file__).parents[2] / name).rglob("*.py"))
)


def _code(*users: Path) -> str:
    """A digest of the program, and of the user's own files, which are imported by the rank itself."""
    return hashlib.sha256(IMPORTED + _digest(users)).hexdigest()[:12]


# The end -------------------------------------------------------------------------------------------------------------


def _part(group: Group) -> None:
    """Leave after success: all ranks arrive here, destroy their process group, and rank 0, with the store, goes last.

    torch reports a connection that ends before its user as an error, in many lines, on a run that went well.
    """
    if not group.all_done:
        group.barrier()
    group.watch.all_done()
    if dist.is_initialized():
        dist.destroy_process_group()
    group.ends.report(FINISHED, "finished", together=True)
    group.record.finish()
    group.watch.end()


def _explain(group: Group, error: BaseException) -> BaseException:
    """The failure behind an error."""
    if group.meeting is None or not broke_collective(error):
        return error
    suspects = group.watch.suspects()
    group.log.debug(f"{type(error).__name__}: {error}")
    if suspects and suspects[0].code == Stopped.code:
        # It did not wait to save; somebody asked it to stop, which is no reason to start again
        return Stopped(f"rank {suspects[0].rank} on {group.hosts[suspects[0].rank]} left: {suspects[0].why}")
    return _peer_lost(group, suspects)


def broke_collective(error: BaseException) -> bool:
    """Whether a collective raised `error` because a peer is gone. It does not say which, nor why."""
    if isinstance(error, JoinError | PeerLost):
        # Who raised it knows more: of a DataLoader's worker that died, for one, whose connection is reset as well
        return False
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if _raised_by_python(error) and not type(error).__module__.startswith("horovod."):
        return False  # the user's own code may say "Connection reset by peer", in a DataLoader's worker too
    # A failed check inside gloo (of sizes that differ, say) is a fault, although it carries the path of the connection
    return bool(LOST_PEER.search(str(error))) and "enforce fail" not in str(error)


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` raised `error`, and not a function in C++, as all collectives are."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is None or dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"


def _peer_lost(group: Group, suspects: list[Suspect]) -> PeerLost:
    return PeerLost(
        f"lost a peer{group.watch.at_step}: {describe(suspects, group.hosts)}",
        code=root_exit_code(suspects, PEER_LOST),
        suspect=suspects[0].rank if suspects else None,
        nobody_died=all(suspect.alive for suspect in suspects),
    )
