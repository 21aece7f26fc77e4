"""A process of a program that has a command line of its own: its signals, its place among the ranks, its log, its end.

`rankup.init` is for a script, and does all of this at once. A program reads its settings in between:

    program = rankup.Program().begin()                       # before anything slow is imported
    program.read_rank()
    try:
        config, run_dir = ...                                # its own settings
        program.start(run_dir)
        with (
            program.join(run_dir, settings={"lr": "0.1"}) as group,
            rankup.open_job(group, rankup.Settings(seed=0)) as job,
        ):
            ...                                              # as after `rankup.init`
    except BaseException as error:
        program.exit(program.end(error))
    program.exit(0)

No torch here: `join` imports it.
"""

import getpass
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rankup.agent.processes import die_with_parent, finish
from rankup.group.stop import StopRequest

if TYPE_CHECKING:
    from rankup.env.rank_env import RankEnv
    from rankup.errors import UserError
    from rankup.group.group import Group


class Program:
    """This process. Its methods are called in the order in which they stand here, in the main thread.

    `stop`: whether it was asked to stop. `log`: takes all lines. `found`: which rank this is, or why the environment
    describes none.
    """

    found: "RankEnv | UserError"

    def __init__(self) -> None:
        self.stop, self.log = StopRequest(), logging.getLogger("rankup")
        self._run_dir = Path()

    def begin(self) -> "Program":
        """Take over SIGTERM, SIGINT and SIGUSR1: until a job has steps to save they end the process with code 143 and
        one line. Set what torch reads while it is imported, and let modules in the current folder be found."""
        if not self.stop.installed:
            self.stop.install()
        # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not {os.getcwd(), ""} & set(sys.path):
            # `python -m` puts the current directory on the path, `rankup` and a file do not
            sys.path.append(os.getcwd())
        try:
            getpass.getuser()
        except (KeyError, OSError):
            # torch before 2.13 asks for the user's name while it is imported, and a container's arbitrary user has none
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        return self

    def read_rank(
        self, *, init_method: str = "", rank: int | None = None, world_size: int | None = None, alone: bool = False
    ) -> None:
        """Find out which rank this is. Raises nothing: a mistake in the environment is raised by `rank_env`.

        `init_method`, `rank`, `world_size`: given in place of MASTER_ADDR and MASTER_PORT, RANK, and WORLD_SIZE in the
        environment. `alone`: it shall be no rank, whoever has started it.
        """
        from rankup.agent.logs import setup_logging
        from rankup.env.rank_env import read_rank_env, with_options
        from rankup.errors import UserError

        try:
            given = with_options(os.environ, init_method=init_method, rank=rank, world_size=world_size)
            self.found = launch = read_rank_env({} if alone else given)
        except UserError as error:
            self.found = error
            setup_logging()
        else:
            setup_logging(rank=launch.rank, world_size=launch.world_size)

    @property
    def rank_env(self) -> "RankEnv":
        """Which rank this is. Raises LaunchError where the environment describes none."""
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def runs_folder(self, run_dir: str) -> Path:
        """The folder of all runs on this machine for what a user named: a folder, or an address (s3://bucket/runs)."""
        from rankup.places.files import runs_folder

        return runs_folder(run_dir)

    def start(
        self, run_dir: Path | None = None, *, guarded: Iterable[str] = ("stdout", "stderr"), stacks: bool = False,
        simulated_nodes: bool = False,
    ) -> None:
        """Be a rank from now on: end with the launcher, and write all lines to `logs/` in the folder of the run too.

        `run_dir`: None for a process without a folder. `guarded`: streams whose reader may go, or stop reading, without
        an effect on this process. `stacks`: the run is this process's, so that `rankup stacks` asks it.
        `simulated_nodes`: several nodes may be this machine. Raises LaunchError for nodes that would never meet, and
        UserError where nothing can be written.
        """
        from rankup.agent.logs import guard, open_log, setup_logging
        from rankup.env.rank_env import check_loopback, describe
        from rankup.group.stop import open_stacks

        guard(*guarded)
        if not isinstance(self.found, Exception) and self.found.parent_pid:
            die_with_parent(self.found.parent_pid)
        if run_dir is None:
            return
        launch, self._run_dir = self.rank_env, run_dir
        check_loopback(launch, simulated_nodes)
        file = open_log(run_dir / "logs" / f"rank-{launch.rank}.log")
        setup_logging(rank=launch.rank, world_size=launch.world_size, file=file)
        for warning in launch.warnings:
            self.log.warning(warning)
        if launch.distributed:
            self.log.info(describe(launch))
        if stacks:
            open_stacks(run_dir, rank=launch.rank, world_size=launch.world_size)

    def join(
        self, run_dir: Path, *, settings: Mapping[str, str], timeout_s: float = 300.0, longest_phase_s: float = 1800.0,
        device: str | None = None, backend: str | None = None, needs_process_group: bool = True, trains: bool = True,
    ) -> "Group":
        """Meet the other ranks. See `rankup.group.joining.join` for the arguments, errors and the group as a context.

        `trains`: this job is about to own the run in `run_dir`; else it only writes the status of its end there.
        """
        from rankup.agent.ends import StatusFile
        from rankup.group.joining import join

        return join(
            self.rank_env, settings=settings, timeout_s=timeout_s, device=device, backend=backend,
            longest_phase_s=longest_phase_s, status=StatusFile(run_dir, self.rank_env, shared=trains), stop=self.stop,
            log=self.log, needs_process_group=needs_process_group,
        )

    def doctor(self, run_dir: Path, *, as_json: bool = False, simulated_nodes: bool = False, **plan: Any) -> int:
        """Check whether the machines are fit for a training, in place of one. Returns the exit code: 0, 10 with
        warnings, 20 not fit, 30 could not be completed. `plan`: see `rankup.doctor.stages.Plan`. Raises Stopped."""
        from rankup.doctor.stages import Plan, doctor
        from rankup.env.rank_env import check_loopback
        from rankup.errors import UserError

        try:
            check_loopback(self.rank_env, simulated_nodes)
        except UserError as error:
            self.found = error
        return doctor(self.found, run_dir, Plan(**plan), stop=self.stop, log=self.log, as_json=as_json)

    def end(self, error: BaseException) -> int:
        """Print an end that is no success, as its kind deserves, tell it to the launcher, and return the exit code."""
        from rankup.agent.ends import tell_end

        return tell_end(error, log=self.log, advice=self._advice)

    def _advice(self, text: str) -> str:
        from rankup.agent.ends import what_next
        from rankup.explain import advice  # it compiles the patterns of all known faults, a twentieth of a second

        more = what_next(self._run_dir) if self._run_dir != Path() else ""
        return "\n".join(filter(None, [advice(text), more]))

    def exit(self, code: int) -> NoReturn:
        """End this process. Python's own end may wait for threads in torch, and these for a rank that is dead."""
        finish(code)
