"""`job = rankup.init(...)`: what a user's own loop needs to start anywhere and to lose nothing. See `loop.md`.

Where the run stands is its position: the number of finished steps, the epoch, and how many batches each loader gave.
`job.step` commits: what its block changed and the new position become the state, in one instant. A copy holds the state
and the position of the last commit, whenever it is made.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from rankup.agent.logs import open_log, setup_logging
from rankup.agent.processes import die_with_parent
from rankup.agent.status import StatusFile
from rankup.env.rank_env import read_rank_env
from rankup.errors import UserError
from rankup.group.group import Group
from rankup.group.joining import join
from rankup.group.stop import StopRequest
from rankup.loop.ends import Ends
from rankup.loop.job import Job, Settings
from rankup.loop.record import check_random_scheme, check_record
from rankup.seeds import derive_seed, seed_everything
from rankup.state.options import Options
from rankup.state.run import open_run

log = logging.getLogger("rankup")


def init(
    run: str | PathLike[str] = "", *, seed: int = 0, device: str = "auto", fresh: bool = False,
    save_every_steps: int | None = None, keep: int = 2, log_every_steps: int = 10,
    compare_every_steps: int | None = None, tensorboard: bool = True, join_timeout_s: float = 300.0,
    setup_timeout_s: float = 1800.0, step_timeout_s: float = 600.0, save_timeout_s: float = 600.0,
    memory_every_steps: int | None = None,
) -> "Job":
    """Meet the other ranks, and own the run: process group, device, seeds, signals. Once a process, before the model.

    `run`: the folder of the run, by default `runs/` and the name of the script or module; the same call goes on from
    what it finds there. `seed`: of orders and random numbers; models are built equal on all ranks. `device`: "auto"
    takes the accelerator of this local rank, else the CPU.
    `fresh`: put aside what is in the folder, and begin anew. `save_every_steps`: None saves at each end of an epoch, or
    each 1,000 steps without `job.epochs`; 0 leaves it to `job.save`. `keep`: so many copies stay. `log_every_steps`: so
    often the values of `job.step` are written. `compare_every_steps`: so often ranks compare digests of their weights
    and optimizer states, which shows a machine that computes wrongly; None takes half a percent of the time, 0 is for
    ranks that differ on purpose, between two exchanges of weights. `memory_every_steps`: so often each rank keeps its
    part of split state (FSDP2) in its node's memory; None for as often as it costs half a percent, 0 for never. The
    deadlines are in seconds; past one the stacks are written, and the process ends.

    Raises LaunchError where the environment describes no rank, JoinError where the ranks do not meet, and UserError
    where the run can't be gone on with.
    """
    given = {name: value for name, value in locals().items() if name not in ("run", "device")}
    run = Path(run or Path("runs", script_name()))
    settings = Settings(**{name: value for name, value in given.items() if name != "memory_every_steps"})
    ends = Ends(run)
    stop = StopRequest().install()
    stop.print_through(log)
    launch = read_rank_env(os.environ)
    file = open_log(run / "logs" / f"rank-{launch.rank}.log")
    setup_logging(rank=launch.rank, world_size=launch.world_size, file=file)
    if launch.parent_pid:
        die_with_parent(launch.parent_pid)
    group = ends.stack.enter_context(join(
        launch, settings={f"setting {name}": str(value) for name, value in given.items()}, timeout_s=join_timeout_s,
        status=StatusFile(run, launch), stop=stop, log=log, device=None if device == "auto" else device,
        longest_phase_s=max(setup_timeout_s, step_timeout_s, save_timeout_s),
        needs_process_group=True,  # DistributedDataParallel needs one, even of one rank
    ))
    ends.take_errors()
    options = Options(
        sharded=True, fresh=fresh, keep=keep, memory_every=memory_every_steps, setup_s=setup_timeout_s,
        save_s=save_timeout_s, start=launch.start, check=check_record,
        fits=lambda path, record: _check_seed(path, record, seed),
        wanted=lambda other: group.restarted,
    )
    job = ends.stack.enter_context(open_job(group, settings, options, owned=group.status.claim))
    job._ends = ends
    ends.finish, ends.behind = job.finish, lambda: job.live.behind
    seed_everything(derive_seed(seed), group.device)
    group.watch.enter("setup", setup_timeout_s)
    return job


def script_name() -> str:
    """Of the script or the module that Python runs; "default" where there is none, as in a notebook."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name).removesuffix(".__main__")
    return Path(getattr(main, "__file__", None) or "default").stem


def _check_seed(path: Path, record: dict[str, Any], seed: int) -> None:
    """Raises UserError where a run with this seed can't go on from the copy `path`."""
    check_random_scheme(path, record)
    if record["seed"] != seed:
        raise UserError(
            f"{path.parents[1]} was begun with other settings: seed was {record['seed']}, is {seed}. "
            "Set it back to go on, or fresh=True to begin anew, or another run."
        )


@contextlib.contextmanager
def open_job(
    group: Group, settings: Settings, options: Options, *, owned: Callable[[Any], None] = lambda owner: None
) -> Iterator[Job]:
    """The job of a group of ranks that has met, for the length of the block. See `rankup.state.run.open_run`."""
    with open_run(group.run_dir, group, options, owned=owned) as run:
        group.status.begun = not run.finished
        job = Job(group, run, settings)
        try:
            yield job
        except BaseException as error:
            with contextlib.suppress(UserError):  # the reason for leaving is the other error
                job.close(type(error))
            raise
        job.close(None)
