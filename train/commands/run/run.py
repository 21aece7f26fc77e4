"""`run`: anybody's script as one rank of a job. See train/commands/run/README.md.

This process joins the others, starts the script as a process of its own, and then does what a launcher's agent would:
it watches the other ranks, passes signals on, writes down what the script prints, and says how and why it ended.
"""

import contextlib
import functools
import os
import re
import select
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.env.addresses import free_port
from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, STOPPED, ScriptFailed, Stopped, UserError, disk_error
from train.commands.explain.explain import advice
from train.commands.run.program import Program
from train.config.options import RunOptions
from train.group import keys
from train.group.group import Group, on_rank0
from train.group.join import LOST, join
from train.group.store import second_connection, wait_for
from train.group.watchdog import SCRIPT
from train.process import flight_recorder, stack_requests, stacks
from train.process.context import Context
from train.process.exit import within
from train.process.limits import explain_sigkill, oom_kills
from train.process.script import DRAIN_S, END_S, Script
from train.process.script_env import Place, places, script_environment
from train.process.status import job_of, read_json
from train.process.status_file import StatusFile
from train.run.lease import Lease
from train.run.reporter import Reporter

KILLED = 128 + signal.SIGKILL
LOOK_S = 0.05  # between two looks at the script
SAY_S = 10.0  # between two lines that say where a script is that does not stop
STORE_S = 2.0  # how long a store may take to answer: that of a stopped process never does
STARTED = "started"  # rank 0's file in the attempt's folder of `status`
# A script that lost its peer ends at once, the peer may still be writing its last words: so long the cause has to show
CAUSE_S = 10.0
# The last line of a traceback, or what argparse says of a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


def run(context: Context, options: RunOptions) -> None:
    """Be this rank of the script's job, to the script's end.

    Raises UserError (2), JoinError (170), PeerLost (171, or the code of the lost rank's script), Stopped (143), and
    ScriptFailed with the script's own code.
    """
    program = Program.find(context.request.script)
    # The ranks of this group exchange a few words over host memory: their device is the script's
    config = context.config.model_copy(update={"device": "cpu", "backend": "auto"})
    status = StatusFile(context.run_dir, context.launch)
    same = program.must_match()
    with (
        join(config, context.launch, log=context.log, stop=context.stop, status=status, script=same) as group,
        _owned(context, group),
        Reporter(group, run=job_of(group.attempt)),  # of the ranks alone: the script's steps are its own
    ):
        program.check(os.environ, world_size=group.world_size)  # the same on all nodes, or they would have differed
        place, again = _place(group)
        if dist.is_initialized():
            # For hours nothing would go over its connections, and a firewall may end such. The store's carry the beats
            group.barrier()
            dist.destroy_process_group()
        env = _environment(context, group, place)
        kills = oom_kills()
        more = shlex.split(options.restart_args) if again else []
        script = _start(context, options, group, program, env, more)
        _hear_stops(group)
        code = _wait(script, group, grace_s=options.stop_grace_s)
        asked = context.stop.signal_name
        if asked or code in (FINISHED, STOPPED):
            script.show_held()
        if asked or code == STOPPED:
            what = f"{asked}: {program.name} ended with {code}" if asked else f"somebody sent SIGTERM to {program.name}"
            raise Stopped(f"{what}. What it saved is its own. The same command starts it again.", alone=True)
        if code != FINISHED:
            raise _failure(program, script, code, group, Path(env["TORCHELASTIC_ERROR_FILE"]), kills)
        _wait_for_the_rest(group)


@contextlib.contextmanager
def _owned(context: Context, group: Group) -> Iterator[None]:
    """Own the run directory for the length of the block. Raises UserError on all ranks where another run does."""
    group.watch.enter("setup", context.config.setup_timeout_s)
    lease = Lease(context.run_dir, group.attempt)
    with contextlib.ExitStack() as stack:

        def take() -> None:
            try:
                stack.enter_context(lease)  # here, not around the block: a refusal has to reach all ranks
            except OSError as error:
                raise disk_error("run_dir", context.run_dir, error) from None
            group.status.claim(lease)

        on_rank0(group, take)
        yield


def _environment(context: Context, group: Group, place: Place) -> dict[str, str]:
    error_file = context.run_dir / "status" / group.attempt / f"error-rank-{group.rank}.json"
    error_file.parent.mkdir(parents=True, exist_ok=True)
    env = script_environment(
        os.environ, context.launch, place, run_id=job_of(group.attempt), error_file=error_file
    )
    env |= flight_recorder.environment(context.run_dir, env)
    return env | stacks.script_environment(context.run_dir, group.rank, env)


def _start(
    context: Context, options: RunOptions, group: Group, program: Program, env: Mapping[str, str], more: Sequence[str]
) -> Script:
    words = [*program.command(local_rank=context.launch.local_rank, option=options.pass_local_rank), *more]
    folder = _folder(options.work_dir)
    group.status.begun = True
    if group.is_rank0:
        with contextlib.suppress(OSError):
            (context.run_dir / "status" / group.attempt / STARTED).touch()
    group.log.info(f"starting {program.name} as rank {group.rank} of {group.world_size}")
    group.log.debug(f"command: python {' '.join(words)}")
    # Our supervisor starts a rank in a session of its own
    own_session = not context.launch.numbers_attempts
    script = Script(words, env=env, folder=folder, own_session=own_session, log=group.log)
    stacks.announce_script(context.run_dir, context.launch, script.pid)
    group.watch.protect(script, timeout_s=END_S + 2 * DRAIN_S)
    group.watch.enter(SCRIPT, 0)  # nobody but the script knows how long it takes
    group.watch.wait_for_others(True)  # a peer's end is ours: this rank does nothing that would notice it
    context.stop.finish_step_first()
    return script


def _folder(work_dir: str) -> str:
    """Raises UserError where it can't be made."""
    if work_dir:
        try:
            Path(work_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            got = f"{work_dir}: {error.strerror}"
            raise UserError(f"--work-dir must be a folder that can be made, got {got}.") from None
    return work_dir


def _place(group: Group) -> tuple[Place, bool]:
    """This rank's place among the nodes, and whether this is a restart after a start of the script. Rank 0 works it
    out, since it alone knows all members and its disk may be its own."""
    launch, meeting = group.launch, group.meeting
    # Not where the ranks have only failed to meet
    again = group.is_rank0 and any(group.run_dir.glob(f"status/*/{STARTED}"))
    if meeting is None:
        place = Place(0, 1, 1, launch.restart_count, _port(launch, first=launch.restart_count == 0))
        return place, again and launch.restart_count > 0
    found: list[Place] = []
    if group.is_rank0:
        members = list(meeting.members)
        found = places(
            [member.host for member in members], [member.local_rank for member in members],
            restarts=max(member.restarts for member in members), port=_port(launch, first=meeting.generation == 1),
        )
    given, again = group.broadcast(([astuple(place) for place in found], again))
    place = Place(*given[group.rank])
    return place, again and place.restarts > 0


def _port(launch: RankEnv, *, first: bool) -> int:
    """The master's port for the script: what the launcher says. Not where torchrun starts the ranks again: its store,
    which it keeps, has the addresses of the last start's ranks, and gloo would connect to those."""
    stale = launch.agent_store and not first
    return free_port() if stale or not launch.master_port else launch.master_port


def _wait(script: Script, group: Group, *, grace_s: float) -> int:
    """Wait for the script's end. Returns its code."""
    while (code := script.wait(0)) is None or script.ending:
        if script.ending:
            time.sleep(LOOK_S)  # a peer is lost: the watchdog has ended the script and is about to end this process
        elif select.select([group.stop], [], [], LOOK_S)[0]:
            return _stop(script, group, grace_s=grace_s)
    return code


def _stop(script: Script, group: Group, *, grace_s: float) -> int:
    """Pass the stop request on to the script and to the other ranks, and kill a script that does not end. Returns its
    code.

    All ranks get it within milliseconds: a script that exchanges something when it stops would wait for a rank that
    goes on. SIGUSR1 for a script with a handler is a notice, often minutes before the end: it has no deadline.
    A SIGTERM that follows is passed on too, and follows by itself where a peer is gone.
    """
    name = group.stop.signal_name
    # The others get it too, and end when they have saved: that is no loss which would have to end this script
    group.watch.end_beats()
    sent = signal.Signals(script.send(getattr(signal, name))).name
    began_s = said_s = time.monotonic()
    _pass_on(group, name)
    how = "" if sent == name else f" as {sent}: it has no handler for the other"
    group.log.info(f"{name}: passed on to the script{how}")
    deadline_s = began_s + (grace_s if sent != "SIGUSR1" else float("inf"))
    while (code := script.wait(LOOK_S)) is None or script.ending:
        now_s = time.monotonic()
        if script.ending:
            time.sleep(LOOK_S)
        elif sent == "SIGUSR1" and (group.watch.peer_gone or group.stop.signal_name != name):
            group.stop.ask("SIGTERM")
            return _stop(script, group, grace_s=grace_s)
        elif now_s > deadline_s:
            script.kill()
            text = f"the script did not end within {grace_s:g} s of {sent}: killed (--stop-grace-s)"
            within(STORE_S, functools.partial(group.log.warning, text))  # the disk of the run may hang
            deadline_s = float("inf")
        elif now_s - said_s > SAY_S:
            said_s = now_s
            text = f"{now_s - began_s:.0f} s after {sent} the script still runs"
            within(SAY_S, functools.partial(_warn_where, group, text))
    return code


def _pass_on(group: Group, name: str) -> None:
    """Have all other ranks stop too, also those of other nodes."""
    meeting = group.meeting

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            if meeting is not None and name == "SIGUSR1":
                meeting.store.compare_set(keys.STOP, "", name)  # another rank may have got more than a notice since
            elif meeting is not None:
                meeting.store.set(keys.STOP, name)

    within(STORE_S, tell)


def _hear_stops(group: Group) -> None:
    """From now on stop this rank when another one is asked to stop."""
    if group.meeting is None:
        return
    store = second_connection(group.meeting.store)  # who waits holds a connection

    def listen() -> None:
        with contextlib.suppress(RuntimeError):
            while not wait_for(store, [keys.STOP], 3600.0):
                pass
            while (name := store.get(keys.STOP).decode()) == "SIGUSR1":
                group.stop.ask(name)
                time.sleep(1.0)
            group.stop.ask(name)

    threading.Thread(target=listen, name="stops", daemon=True).start()


def _warn_where(group: Group, text: str) -> None:
    """Print `text`, and in which line the script is, as far as it answers."""
    where = ""
    with contextlib.suppress(OSError):
        for answer in stack_requests.ask(group.run_dir, ranks=[group.rank]):
            if answer.writer.rank == group.rank:
                where = f": {answer.place}"
    group.log.warning(text + where)


def _failure(
    program: Program, script: Script, code: int, group: Group, error_file: Path, kills: int | None
) -> ScriptFailed:
    """The error that says how the script failed, with its reason. What is known about that is printed at once."""
    tail = re.sub(r"^\[rank\d+\]: ", "", script.tail, flags=re.MULTILINE)  # torch's own, before each line
    why = _last_exception(tail) or _recorded(read_json(error_file))
    if code == KILLED:
        why = f"SIGKILL: {explain_sigkill(kills)}"
    elif code > 128:
        with contextlib.suppress(ValueError):  # a code of its own
            why = f"{signal.Signals(code - 128).name} {why}".rstrip()
    if (meeting := group.meeting) is not None and LOST.search(why):
        # It only lost another rank's script. Our own reports say which, once that one has come to its end
        if not wait_for(meeting.store, [keys.CAUSES], CAUSE_S):
            script.show_held()
    else:
        script.show_held()
        if known := advice(tail):
            group.log.warning(known)
    return ScriptFailed(f"{program.name} failed{f': {why}' if why else ''}", code=code)


def _last_exception(tail: str) -> str:
    found = [line for line in tail.splitlines() if EXCEPTION.match(line)]
    return found[-1][:500] if found else ""


def _recorded(content: object) -> str:
    """What torch's @record has written, for a script whose main function has it."""
    message = content.get("message") if isinstance(content, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    return str(text or "").partition("\n")[0][:500]


def _wait_for_the_rest(group: Group) -> None:
    """Wait until the scripts of all ranks have ended with 0. Raises Stopped where this rank is asked to stop."""
    if group.meeting is None:
        return
    store: Store = group.meeting.store
    if store.add(keys.DONE, 1) == group.world_size:
        store.set(keys.ALL_DONE, "")
    group.log.debug("the script has ended with 0; waiting for the other ranks")
    while not wait_for(store, [keys.ALL_DONE], 1.0):
        if group.stop.requested:
            raise Stopped(f"{group.stop.signal_name}: other ranks had not finished.", alone=True)
    group.all_done = True
