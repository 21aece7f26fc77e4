"""`Program`, the process of a program with its own command line: it handles signals, rank, log and end.

A script calls `rankup.init`, which does all of this at once. A program reads its settings in between, see `program.md`.
This file does not import torch before `join`.
"""

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rankup import timing
from rankup.agent.logs import RankLog, copy_prints, guard, host_name, open_streams, print_to, setup_logging
from rankup.agent.processes import before_end, die_with_parent, finish
from rankup.agent.record import LONGEST, Record
from rankup.env.rank_env import RankEnv, describe, read_rank_env, with_options
from rankup.errors import USER_MISTAKE, ExpectedError, Stopped, UserError, exit_code, reason
from rankup.group.stop import StopRequest, open_stacks

if TYPE_CHECKING:
    from rankup.group.group import Group
    from rankup.group.watchdog import Watchdog


class Program:
    """This process. Call its methods in the main thread, in the order of this class.

    `stop`: tells whether this process was asked to stop. `log`: the logger for all lines. `found`: which rank this is,
    or the error if the environment does not describe a rank.
    """

    def __init__(self) -> None:
        open_streams()  # before this process opens any other file
        self.stop, self.log = StopRequest(), logging.getLogger("rankup")
        self.found: RankEnv | UserError = RankEnv()
        self._run_dir, self._cause = Path(), ""
        self._watch: Watchdog | None = None  # reports an end itself after the ranks have met

    def begin(self) -> "Program":
        """Take over SIGTERM, SIGHUP, SIGINT and SIGUSR1: until a job has steps to save, they end the process with code
        143 and one line. Set the variables that torch reads when it is imported, and make modules in the current folder
        importable."""
        if not self.stop.installed:
            self.stop.install()
        # torch reports a lost connection in 20 lines of C++ frames; rankup says in one line which peer it was
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not {os.getcwd(), ""} & set(sys.path):
            # `python -m` puts the current directory on sys.path; `rankup` and `python FILE` do not
            sys.path.append(os.getcwd())
        return self

    def read_rank(self, *, alone: bool = False, **options: Any) -> None:
        """Find out which rank this is. `rank_env` raises the error of a wrong environment. `options`: init_method, rank
        and world_size, in place of variables. `alone`: act as a single process, even if a launcher started it."""
        try:
            given = with_options(os.environ, **options)
            self.found = rank_env = read_rank_env({} if alone else given)
        except UserError as error:
            self.found, rank_env = error, RankEnv()
        setup_logging(rank=rank_env.rank, world_size=rank_env.world_size)

    @property
    def rank_env(self) -> RankEnv:
        """Which rank this is. Raises UserError if the environment describes none."""
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def start(
        self, run_dir: Path | None = None, *, guarded: bool = True, stacks: bool = False, on_end: str = "",
    ) -> None:
        """Act as a rank from now on: end with the launcher, and also write all lines to `logs/` in the run's folder.

        `run_dir`: None for a process without a folder. `guarded`: continue if the reader of the output ends or stops
        reading, as the ranks of an agent always do; False for a script, or if the output is the result. `stacks`: let
        `rankup stacks` ask this process for its stacks. `on_end`: the command to run when the job ends, see
        `rankup.init`. Raises UserError if the folder can't be written, or if the command is too long.
        """
        agent: Mapping[str, Any] = getattr(self.found, "agent", None) or {}
        print_to(agent.get("terminal", ()))
        if guarded or agent:  # the rank's file has each line, so a terminal that nobody reads may lose some
            guard()
        if isinstance(self.found, RankEnv) and self.found.launcher in ("torchrun", "mpirun"):
            die_with_parent(os.getppid())  # these launchers leave their processes running if they are killed
        if run_dir is None:
            return
        if (size := len(os.fsencode(on_end))) >= LONGEST:
            raise UserError(f"on_end must be shorter than {LONGEST} bytes, got {size}. Put the command into a script.")
        rank_env, self._run_dir = self.rank_env, run_dir
        file = RankLog(run_dir, rank_env.rank)
        if agent:
            Record.of_rank(agent).name_run(run_dir, on_end)  # the agent sees the end of the job, and runs the command
        elif on_end and rank_env.rank == 0:
            before_end(partial(self._tell_end, on_end, time.monotonic()))
        setup_logging(rank=rank_env.rank, world_size=rank_env.world_size, file=file)
        if not guarded:  # a script prints to its own stdout
            copy_prints(file)
        if rank_env.distributed:
            self.log.info(describe(rank_env))
        if stacks:
            open_stacks(run_dir, rank=rank_env.rank, world_size=rank_env.world_size)

    def join(
        self, run_dir: Path, *, settings: Mapping[str, str], timeout_s: float = 300.0, device: str | None = None,
    ) -> "Group":
        """Meet the other ranks and form torch's process group: gloo for host memory, and the device's own backend.

        Returns a context manager. A block that ends well leaves the group together with all other ranks. A block that
        ends with an error first reports the error to them. If another rank caused the error, the context manager raises
        that cause instead. Without a block, call `Group.close()` or `Group.fail(error)`.

        `settings`: texts by name that must be the same on all ranks; rankup adds the versions of torch and rankup, and
        the backend. `device`: "cpu", "cuda" or "cuda:1"; None takes this rank's accelerator, or the CPU if it has none.

        Raises JoinError (code 170) if the ranks do not come together within `timeout_s`, PeerLost (171) if one is lost
        meanwhile, and UserError (2) if the settings differ or the device does not exist.
        """
        from rankup.group import joining

        group = joining.start(self.rank_env, run_dir, settings=settings, device=device, stop=self.stop)
        self._watch = group.watch
        with contextlib.ExitStack() as unless_joined:
            unless_joined.push(group)
            joining.join(group, timeout_s=timeout_s)
            unless_joined.pop_all()
        return group

    def doctor(self, run_dir: Path, *, as_json: bool = False, **plan: Any) -> int:
        """Check whether the machines are fit for training, instead of training. Returns the exit code: 0 fit, 10 with
        warnings, 20 not fit, 30 could not be completed. `plan`: see `rankup.doctor.stages.doctor`. Raises Stopped."""
        from rankup.doctor.stages import doctor

        return doctor(self.found, run_dir, stop=self.stop, log=self.log, as_json=as_json, **plan)

    def end(self, error: BaseException) -> int:
        """Print why this process ends, tell torchrun or our agent, and return the exit code."""
        from rankup.agent.ends import End
        from rankup.agent.links import tell_agent
        from rankup.agent.status_files import tell_torchrun, what_next

        tell_torchrun(error)
        code, agent = exit_code(error), getattr(self.found, "agent", None)
        self._cause = reason(error) if code else ""
        if agent and not isinstance(error, Stopped) and not (self._watch and self._watch.connected):
            tell_agent(agent, End(self.rank_env.rank, host_name(), code, reason(error)).entry())
        if isinstance(error, Stopped):
            self.log.info(str(error))
        elif getattr(error, "printed_elsewhere", False):
            self.log.debug(str(error))
        elif isinstance(error, ExpectedError):
            self.log.warning(f"error: {error}" if code == USER_MISTAKE else f"{error} (exit code {code})")
        else:
            from rankup.explain import advice  # not at the top: its patterns take 50 ms to compile

            self.log.warning(text := "".join(traceback.format_exception(error)).rstrip())
            for more in (advice(text), what_next(self._run_dir) if self._run_dir != Path() else ""):
                if more:
                    self.log.warning(more)
        return code

    def _tell_end(self, command: str, began_s: float, code: int) -> None:
        from rankup.agent.operators import tell_end

        tell_end(command, self._run_dir, code=code, cause=self._cause, began_s=began_s, limit_s=timing.ON_REQUEUE_S)

    def exit(self, code: int) -> NoReturn:
        """End this process without Python's own shutdown, which may wait for threads in torch that wait for a dead
        rank."""
        finish(code)
