"""`Program`, the process of a program with its own command line: its signals, its rank, its log, its end.

A script calls `rankup.init`, which does all of this at once. A program reads its settings in between, see `program.md`.
No torch here: `join` imports it.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rankup.agent.logs import RankLog, copy_prints, guard, host_name, setup_logging
from rankup.agent.processes import die_with_parent, finish
from rankup.env.rank_env import RankEnv, describe, read_rank_env, with_options
from rankup.errors import USER_MISTAKE, ExpectedError, Stopped, UserError, exit_code, reason
from rankup.group.stop import StopRequest, open_stacks

if TYPE_CHECKING:
    from rankup.group.group import Group
    from rankup.group.watchdog import Watchdog


class Program:
    """This process. Call its methods in the order in which they stand here, in the main thread.

    `stop`: whether somebody asked it to stop. `log`: takes all lines. `found`: which rank this is, or why the
    environment describes none.
    """

    def __init__(self) -> None:
        self.stop, self.log = StopRequest(), logging.getLogger("rankup")
        self.found: RankEnv | UserError = RankEnv()
        self._run_dir = Path()
        self._watch: Watchdog | None = None  # which reports an end itself, once the ranks have met

    def begin(self) -> "Program":
        """Take over SIGTERM, SIGHUP, SIGINT and SIGUSR1: until a job has steps to save, they end the process with code
        143 and one line. Set the variables that torch reads when it is imported, and make modules in the current folder
        importable."""
        if not self.stop.installed:
            self.stop.install()
        # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not {os.getcwd(), ""} & set(sys.path):
            # `python -m` puts the current directory on the path, `rankup` and a file do not
            sys.path.append(os.getcwd())
        return self

    def read_rank(self, *, alone: bool = False, **options: Any) -> None:
        """Find out which rank this is. `rank_env` raises any mistake in the environment. `options`: init_method, rank
        and world_size, in place of variables. `alone`: it is no rank, even if a launcher started it."""
        try:
            given = with_options(os.environ, **options)
            self.found = launch = read_rank_env({} if alone else given)
        except UserError as error:
            self.found, launch = error, RankEnv()
        setup_logging(rank=launch.rank, world_size=launch.world_size)

    @property
    def rank_env(self) -> RankEnv:
        """Which rank this is. Raises UserError if the environment describes none."""
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def start(self, run_dir: Path | None = None, *, guarded: bool = True, stacks: bool = False) -> None:
        """Be a rank from now on: end with the launcher, and write all lines also to `logs/` in the folder of the run.

        `run_dir`: None for a process without a folder. `guarded`: this process goes on if the reader of its output ends
        or stops reading; not for a script, or if the output is the result. `stacks`: `rankup stacks` may ask this
        process for its stacks. Raises UserError if nothing can be written.
        """
        if guarded:
            guard()
        if isinstance(self.found, RankEnv) and self.found.launcher in ("torchrun", "mpirun"):
            die_with_parent(os.getppid())  # where these are killed, they leave their processes running
        if run_dir is None:
            return
        launch, self._run_dir = self.rank_env, run_dir
        file = RankLog(run_dir, launch.rank)
        setup_logging(rank=launch.rank, world_size=launch.world_size, file=file)
        if not guarded:  # a script's own
            copy_prints(file)
        if launch.distributed:
            self.log.info(describe(launch))
        if stacks:
            open_stacks(run_dir, rank=launch.rank, world_size=launch.world_size)

    def join(
        self, run_dir: Path, *, settings: Mapping[str, str], timeout_s: float = 300.0, device: str | None = None,
    ) -> "Group":
        """Meet the other ranks and form torch's process group with them: gloo for host memory, beside the device's own.

        Returns a context manager. A block that ends well leaves the group together with all other ranks; one that ends
        with an error reports it to them first. If another rank caused the error, the context manager raises that cause
        instead. Without a block, call `Group.close()` or `Group.fail(error)`.

        `settings`: texts by name that must be the same on all ranks; rankup adds the versions of torch and rankup, and
        the backend. `device`: "cpu", "cuda" or "cuda:1"; None takes the accelerator of this rank, else the CPU.

        Raises JoinError (code 170) if the ranks do not come together within `timeout_s`, PeerLost (171) if one is lost
        meanwhile, and UserError (2) if they differ or a device is not there.
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
        """Check whether the machines are fit for training, instead of training. Returns the exit code: 0, 10 with
        warnings, 20 not fit, 30 could not be completed. `plan`: see `rankup.doctor.stages.doctor`. Raises Stopped."""
        from rankup.doctor.stages import doctor

        return doctor(self.found, run_dir, stop=self.stop, log=self.log, as_json=as_json, **plan)

    def end(self, error: BaseException) -> int:
        """Print why this process ends, tell it to torchrun or our agent, and return the exit code."""
        from rankup.agent.ends import End, tell_torchrun, what_next
        from rankup.agent.protocol import tell_agent

        tell_torchrun(error)
        code, agent = exit_code(error), getattr(self.found, "agent", None)
        if agent and not isinstance(error, Stopped) and not (self._watch and self._watch.connected):
            tell_agent(agent, End(self.rank_env.rank, host_name(), code, reason(error)).message())
        if isinstance(error, Stopped):
            self.log.info(str(error))
        elif getattr(error, "printed_elsewhere", False):
            self.log.debug(str(error))
        elif isinstance(error, ExpectedError):
            self.log.warning(f"error: {error}" if code == USER_MISTAKE else f"{error} (exit code {code})")
        else:
            from rankup.explain import advice  # only here: its patterns take a twentieth of a second to compile

            self.log.warning(text := "".join(traceback.format_exception(error)).rstrip())
            for more in (advice(text), what_next(self._run_dir) if self._run_dir != Path() else ""):
                if more:
                    self.log.warning(more)
        return code

    def exit(self, code: int) -> NoReturn:
        """End this process at once. Python's own end may wait for threads in torch, and these for a rank that is
        dead."""
        finish(code)
