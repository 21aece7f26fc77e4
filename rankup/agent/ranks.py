"""Starts this node's ranks with the variables that torchrun sets, watches them, and ends them. Imports no torch."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from rankup import timing
from rankup.agent.ends import End, Verdict
from rankup.agent.environment import HASH_SEED, environment_of
from rankup.agent.fork_server import ForkServer
from rankup.agent.links import Links
from rankup.agent.logs import OutputReader, announce_stacks, host_name, last_exception, script_environment
from rankup.agent.network import in_thread
from rankup.agent.processes import cpu_quota, explain_sigkill, has_handler, in_background, oom_kills, state_of
from rankup.agent.protocol import KILLED
from rankup.agent.record import Record
from rankup.agent.script import Script
from rankup.agent.status_files import write_end
from rankup.env.node_env import NodeEnv
from rankup.errors import FAULT, FINISHED, PEER_LOST

log = logging.getLogger("rankup")

ALONE = (
    "%s: no rank met another one: each of the %d ranks did the whole work alone, unless it took its part by RANK. To "
    "train together the script must call rankup.init or torch.distributed.init_process_group, or use a library that "
    "does; a script of MPI needs mpirun -np %d python %s"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `rankup launch`, which its help explains. `advice` is passed in, because a higher layer has it."""

    node: NodeEnv  # which agent this is
    script: Script
    run_dir: Path
    # For `rankup.init`: the `place` of the run, and whether the user has `chosen` it
    run: Mapping[str, Any] = field(default_factory=dict)
    advice: Callable[[str], str] = lambda tail: ""  # gives advice for the last lines of a script
    join_timeout_s: float = 300.0
    shared_dir: str = ""  # a folder or an address that all nodes can write to
    max_restarts: int = 3
    max_failures: int | None = None  # leave a node out after its ranks have failed this often
    restart_on: frozenset[int] = frozenset()
    restart_args: tuple[str, ...] = ()
    stop_grace_s: float = 110.0
    work_dir: str = ""
    fork: bool = True  # fork the ranks of a script that imports rankup
    stop_after: int | None = None  # the last step of this part of a replay
    health_check: str = ""  # a shell command that ends with 0 on a node that is fit
    spot: bool = False  # ask the cloud whether it takes this machine away
    jobs: dict[str, None] = field(default_factory=dict)  # the ids of the job so far: each new node 0 gives it another


class Asked(IntEnum):
    """What this node's ranks were asked to do. A greater request replaces a smaller one. A notice, SIGUSR1 to a script
    that handles it, asks for nothing: the job goes on."""

    NOTHING = 0
    CHANGE = 1  # to stop for another membership, which then starts ranks again
    STOP = 2  # to stop, because the job ends


@dataclass(eq=False)
class Rank:
    """One rank of this node in one membership. `local_rank`: its index among this agent's ranks; LOCAL_RANK also counts
    other agents' ranks on this machine. `told`: the rank was told to leave, so its exit code explains nothing."""

    local_rank: int
    number: int
    record: Record
    running: bool = True
    told: bool = False
    notice_due: bool = False  # it gets SIGUSR1 once it has a handler
    stopped_s: float = 0.0  # how long it has been stopped (SIGSTOP)
    alone: bool = False  # it ended with 0 and had met no other rank
    said: End | None = None  # the end that the rank itself reported
    reader: OutputReader | None = None  # None only before its start


class Ranks:
    """The ranks that this node runs in its newest membership, and the fork server that starts them. `node`: this node's
    numbers in that membership. `all_ended` is set while no rank runs."""

    def __init__(
        self, options: Options, *, send: Callable[..., bool], on_stop: Callable[[str], None],
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], finish: Callable[[Verdict], None],
    ) -> None:
        """`send` sends a message to the leader. `on_stop` receives the name of a signal that a rank got. `begin` starts
        a task. `finish` ends this agent with a verdict."""
        self.options, self.node, self.script, self.run_dir = options, options.node, options.script, options.run_dir
        self.imports_rankup, self.host = self.script.imports_rankup, host_name()
        self._imports = self.script.safe_imports(), *self.script.own_imports()
        self._num_threads = max(1, int(cpu_quota() // self.node.local_world_size))
        local_ranks = range(self.node.local_rank, self.node.local_rank + self.node.nproc)
        self._words = [self.script.command(local_rank=local_rank) for local_rank in local_ranks]
        self.send, self.on_stop, self.begin, self.finish = send, on_stop, begin, finish
        self.ranks: list[Rank] = []
        self.links = Links[Rank](self._on_rank_message)
        self.server = ForkServer(
            on_start=self._announce, on_end=lambda local, code: begin(self._on_rank_end(self.ranks[local], code)),
            on_warning=log.warning, on_gone=self._forget_server,
        )
        self.interface: dict[str, str] = {}  # variables that name the network interface
        self.on_end = ""  # the command of the script for the end of the job
        self.named: Path | None = None  # the folder of the run, which the script has named
        self.all_ended = asyncio.Event()
        self.all_ended.set()
        self._commit: dict[str, Any] = {}
        self._leaving: asyncio.Task[None] | None = None
        self._asked, self._passed_on = Asked.NOTHING, ""  # `_passed_on`: the newest signal that asked the ranks to stop
        self._noticed = False  # the script got a notice, which also holds for the ranks that start later
        self._notifying: asyncio.Task[None] | None = None
        self._oom_kills, limits = oom_kills(), self.node.limits
        self._silent_s = timing.SILENT_S if limits is None else limits.silent_s
        self._writing = list["concurrent.futures.Future[object]"]()  # what threads still write about ends of ranks

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_server()

    def close(self) -> None:
        self.server.close()
        self.links.close()
        concurrent.futures.wait(self._writing, timing.REPORT_END_S)
        until_s = time.monotonic() + timing.LAST_MESSAGE_S
        for reader in [rank.reader for rank in self.ranks if rank.reader is not None]:
            reader.thread.join(max(0.0, until_s - time.monotonic()))  # it may still have lines to write

    @property
    def stopping(self) -> bool:  # True if the job ends, not only this membership
        return self._asked is Asked.STOP

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.running]

    def running_records(self) -> Mapping[int, Record]:
        """The records of the running ranks, by rank."""
        return {rank.number: rank.record for rank in self.running}

    def _start_server(self) -> None:
        """Start the fork server early, so that it imports torch while the agents meet."""
        modules, preload, folder = self._imports
        # torch reads the number of threads when it is imported, so the forked ranks have the server's
        env = {**HASH_SEED, "OMP_NUM_THREADS": str(self._num_threads), **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        fork = self.imports_rankup and self.options.fork
        self.server.start(modules, env=env, preload=preload, folder=folder, fork=fork)

    def _forget_server(self) -> None:
        if self.server.ready.is_set():
            log.warning("the process that forks the ranks was killed: another one is started")
            self._start_server()
        else:  # the server was killed while it imported torch, which would happen to the next one too
            why = f"starting the ranks: SIGKILL: {explain_sigkill(self._oom_kills)}"
            self.send("cannot", code=KILLED, text=why)  # the others would wait for this node in vain
            self.finish(Verdict(KILLED, why))

    # The start of a membership --------------------------------------------------------------------------------------

    def start(self, commit: dict[str, Any], *, token: str) -> bool:
        """Start this node's ranks of a new membership. Returns False if this node has none, because it is a spare.
        `commit`: the leader's message. `token`: this member's id."""
        for text in (commit.get("why"), commit.get("change")):
            if text:
                log.warning("%s", text)
        if self._asked is Asked.CHANGE:
            self._asked, self._passed_on = Asked.NOTHING, ""
        if self.node.limits is not None:
            used = commit["basis"]["used"]
            if token not in used:  # ranks of an earlier membership may still run; their ends do not matter now
                return False
            self.node = replace(self.node, node_rank=used.index(token), num_nodes=len(used), master_addr=commit["ip"])
        self._commit, self._oom_kills = commit, oom_kills()
        self.options.jobs[commit["job"]] = None
        self.links.begin()
        self.all_ended.clear()
        first = self.node.first_rank
        local_ranks = range(self.node.nproc)
        self.ranks = [Rank(local, first + local, Record.new(first + local, commit)) for local in local_ranks]
        for rank in self.ranks:
            self._start(rank)
        if self._passed_on:  # the signal came before these ranks started
            self._signal(self._passed_on, told=not self.imports_rankup)
        elif self._noticed:
            self.notice()
        return True

    def _start(self, rank: Rank) -> None:
        if self.options.stop_after is not None:
            rank.record.ask_to_stop(self.options.stop_after)
            rank.record.confirmed = self.options.stop_after
        words = [*self._words[rank.local_rank], *(self.options.restart_args if self._commit.get("again") else ())]
        env = environment_of(
            rank.number, rank.local_rank, node=self.node, commit=self._commit, num_threads=self._num_threads,
            max_restarts=self.options.max_restarts, errors=self.run_dir / "logs", interface=self.interface,
            run=self.options.run if self.imports_rankup else None, jobs=self.options.jobs,
        )
        # A rank that imports rankup says later which run it is in, and where its log is
        rank.reader = OutputReader(
            rank.number, self.node.world_size, fail=self._fail_from_thread,
            run_dir=lambda: rank.record.run_dir if self.imports_rankup else self.run_dir,
        )
        if not self.imports_rankup:
            rank.record.enter("script")
            env |= script_environment(self.run_dir, rank.number, env, record=rank.record.place)
            log.info("starting %s as rank %d of %d", self.script.name, rank.number, self.node.world_size)
        with contextlib.ExitStack() as opened:
            line = list[int]()
            if self.imports_rankup:
                line = [opened.enter_context(self.links.open(rank)).fileno(), rank.record.file]
            self.server.start_rank(
                rank.local_rank, words, env=env, name=f"rank {rank.number}", cwd=self.options.work_dir,
                outputs=rank.reader.outputs, line=line,
            )
        for output in rank.reader.outputs:
            os.close(output)

    def _announce(self, local_rank: int, pid: int) -> None:
        if not self.imports_rankup:  # without this line `rankup stacks` cannot ask the rank
            rank, size = self.ranks[local_rank].number, self.node.world_size
            self._write(lambda: announce_stacks(self.run_dir, rank, size, pid))

    def _write(self, work: Callable[[], object]) -> None:
        """Write to the run's disk, which may hang, in a thread. `close` waits for it a moment. Errors are ignored."""
        self._writing = [*(each for each in self._writing if not each.done()), in_background(work)]

    def _fail_from_thread(self, error: Exception) -> None:
        async def fail() -> None:
            raise error

        self._loop.call_soon_threadsafe(lambda: self.begin(fail()))

    # What the ranks report ------------------------------------------------------------------------------------------

    def _on_rank_message(self, rank: Rank, message: Mapping[str, Any]) -> None:
        """Handle a message of a rank whose script imports rankup."""
        if message["is"] == "end" and rank.running:
            # Tell the leader now: the process may take a while to end, and the other ranks wait for it
            rank.said = End.read(message)
            if rank.said.code != FINISHED:
                self.send("ending", n=self._commit["n"], **rank.said.entry())
        elif message["is"] == "ask":
            self.send("ask")
        elif message["is"] == "stop" and not (self._passed_on or rank.told):
            self.on_stop(message["signal"])  # otherwise the rank only reports the SIGTERM that this agent sent

    async def _on_rank_end(self, rank: Rank, code: int) -> None:
        await self.links.catch_up()
        if (reader := rank.reader) is not None:
            # A process that the rank left behind may keep the pipes open, and an unread terminal costs PRINT_S. Do not
            # wait longer than for a script's last words: a rank that has a log writes its own reason there itself
            has_log = rank.record.run_dir is not None
            most_s = timing.PAUSE_S if has_log else timing.PRINT_S + timing.LAST_MESSAGE_S
            await in_thread(lambda: reader.thread.join(most_s))
        self._ended(rank, code)

    def _ended(self, rank: Rank, code: int) -> None:
        if not rank.running:
            return
        rank.running, record, reader = False, rank.record.read(), rank.reader
        self.on_end = record.on_end or self.on_end  # a rank that fails at its start names none
        self.named = rank.record.run_dir or self.named
        cause, suspect = (rank.said.why, rank.said.suspect) if rank.said is not None else ("", None)
        if code == FINISHED and self.imports_rankup and record.phase != "start" and not record.finished:
            log.warning("rank %d ended with 0 before it had finished: this counts as code 1", rank.number)
            code, cause = FAULT, "it ended with 0 before it had finished"
        elif code == FINISHED and not rank.told:
            rank.alone = bool(record.alone) and record.phase in ("start", "script")  # rankup.init enters other phases
        elif code == KILLED and rank.stopped_s >= self._silent_s:
            cause = f"sent no heartbeat for {rank.stopped_s:.0f} s: it was stopped (SIGSTOP)"
        elif code == KILLED and not rank.told:
            cause = f"SIGKILL: {explain_sigkill(self._oom_kills)}"
        elif reader is not None and code != FINISHED and not self.imports_rankup:
            cause = last_exception(reader.tail)
            if not cause and code == FAULT and reader.last_error:  # perhaps from `sys.exit("text")`
                cause = f"stderr: {reader.last_error}"
        end = End(rank.number, self.host, code, cause, record.step, rank.told, suspect)
        if not self.imports_rankup:
            attempt = f"{self._commit['job']}-{self._commit['restarts']}"
            self._write(lambda: write_end(self.run_dir, attempt, end))
        if reader is not None and rank.said is None and end.explains and code != FINISHED:
            self._write(partial(self._keep_last_lines, reader))
        self.send("end", n=self._commit["n"], **end.entry())
        if not self.running:
            if self.node.world_size > 1 and all(each.alone for each in self.ranks):
                log.warning(ALONE, self.script.name, self.node.world_size, self.node.world_size, self.script.name)
            self.all_ended.set()

    def kill_stopped(self) -> None:
        """Kill a rank that has been stopped (SIGSTOP) for as long as a node may be silent, because all others wait for
        it. Call this every ALIVE_S: no time passes while this process is stopped too, as when a job is suspended. An
        unchanged script has no heartbeats and no deadlines."""
        for rank in self.running if self.imports_rankup else ():
            stopped = state_of(self.server.pids.get(rank.local_rank, 0)) == "T"
            rank.stopped_s = rank.stopped_s + timing.ALIVE_S if stopped else 0.0
            if rank.stopped_s >= self._silent_s:
                self.server.signal(rank.local_rank, signal.SIGKILL)

    def _keep_last_lines(self, reader: OutputReader) -> None:
        if advice := self.options.advice(reader.tail):
            log.warning("%s", advice)
        reader.keep_in(self.run_dir)  # perhaps the rank had not named its run yet

    # Leaving --------------------------------------------------------------------------------------------------------

    def leave_soon(self, *, node_lost: bool = False) -> None:
        """Begin to end this node's ranks. `node_lost`: the cause is a lost node, so no rank's end has to show it, and a
        script that does not import rankup gets SIGTERM at once."""
        if self._leaving is None or self._leaving.done():
            notice_s = 0.0 if node_lost and not self.imports_rankup else timing.UNNOTICED_S
            self._leaving = self.begin(self._leave(notice_s))

    async def left(self) -> None:
        """Wait until the ranks that were told to leave have ended."""
        if self._leaving is not None:
            await self._leaving

    async def _leave(self, notice_s: float) -> None:
        """Give the ranks `notice_s` to notice the loss by themselves, then send SIGTERM, then SIGKILL."""
        patience_s = timing.LEAVE_S if self.imports_rankup else timing.SCRIPT_LEAVE_S
        if self._passed_on in ("SIGTERM", "SIGINT"):
            patience_s += self.options.stop_grace_s
        elif not await self.ended_within(notice_s):
            self._signal("SIGTERM", told=True)
        await self._kill_after(patience_s, "the others")

    async def _kill_after(self, patience_s: float, event: str) -> None:
        """Kill the ranks that still run after `patience_s` seconds. While one of them writes its state, which may take
        minutes, they get another LEAVE_S."""
        said, before = False, self._written()
        while not await self.ended_within(patience_s):
            now = self._written()
            busy = [number for number, written in now.items() if written > before[number]]
            if not busy:
                for rank in self.running:
                    log.warning("rank %d did not end within %g s after %s: killed", rank.number, patience_s, event)
                await self.end()
                return
            if not said:
                size_mb = (now[busy[0]] - before[busy[0]]) / 1e6
                log.info("rank %d still writes its state, %.0f MB in %g s: no rank is killed while it makes progress",
                         busy[0], size_mb, patience_s)
            said, before, patience_s, event = True, now, timing.LEAVE_S, "the last progress"

    def _written(self) -> dict[int, int]:
        """Return how many bytes of its state each running rank has written, by rank."""
        return {number: int(record.written) for number, record in self.running_records().items()}

    async def end(self) -> None:
        """Kill the ranks that still run, and return when all have ended."""
        for rank in self.running:
            rank.told = True
            self.server.signal(rank.local_rank, signal.SIGKILL)
        if not await self.ended_within(timing.KILL_S):
            for rank in self.running:  # its process waits for a dead disk, and will end when the disk answers
                self._ended(rank, PEER_LOST)

    async def ended_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` would let other tasks run before it returns
                await self.all_ended.wait()
                return True
        return self.all_ended.is_set()

    def pass_on(self, name: str, *, change: bool = False) -> None:
        """Pass on the signal `name`, which asks the ranks to stop. `change`: they stop only for another membership."""
        self._asked = max(self._asked, Asked.CHANGE if change else Asked.STOP)
        if self._passed_on in (name, "SIGTERM", "SIGINT"):
            return
        self._passed_on, running = name, len(self.running)
        if running or not change:  # a spare has no ranks, and prints nothing
            why = "nodes change: " if change else ""
            log.info("%s%s: passed on to %d rank%s", why, name, running, "" if running == 1 else "s")
        self._signal(name, told=not self.imports_rankup)
        if not self.imports_rankup and name != "SIGUSR1":
            self.begin(self._kill_after(self.options.stop_grace_s, f"{name} (--stop-grace-s)"))

    def _signal(self, name: str, *, told: bool) -> None:
        """Send a signal to every running rank at once. `told`: from now on the ranks' exit codes explain nothing. A
        script that imports rankup is not `told` when it is asked to stop: its exit code says how the stop went."""
        for rank in self.running:
            if told and rank.said is not None and rank.said.code != FINISHED:
                continue  # it is about to end by itself, and its code says why
            rank.told = rank.told or told
            # Always SIGTERM for a script with rankup: Python that has just started ends on it without a traceback. The
            # same for a script that does not handle SIGUSR1
            as_term = self.imports_rankup or name == "SIGUSR1"
            self.server.signal(rank.local_rank, signal.SIGTERM if as_term else getattr(signal, name))

    # Notices --------------------------------------------------------------------------------------------------------

    @property
    def takes_notice(self) -> bool:
        """Whether SIGUSR1 is only a notice: a rank of this node handles it, or the script has got one before."""
        if self.imports_rankup:
            return False
        pids = [self.server.pids.get(rank.local_rank, 0) for rank in self.running]
        return self._noticed or any(has_handler(pid, signal.SIGUSR1) for pid in pids if pid)

    def notice(self) -> None:
        """Pass on SIGUSR1 as a notice, to each rank once it has a handler. Until then the rank ignores the signal."""
        self._noticed = True
        for rank in self.running:
            rank.notice_due = True
        log.info("SIGUSR1: a notice for %d rank%s", len(self.running), "" if len(self.running) == 1 else "s")
        if self._notifying is None or self._notifying.done():
            self._notifying = self.begin(self._notify())

    async def _notify(self) -> None:
        while due := [rank for rank in self.running if rank.notice_due]:
            for rank in due:
                if (pid := self.server.pids.get(rank.local_rank)) and has_handler(pid, signal.SIGUSR1):
                    rank.notice_due = False
                    self.server.signal(rank.local_rank, signal.SIGUSR1)
            await asyncio.sleep(timing.PAUSE_S)
