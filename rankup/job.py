"""`job = rankup.init(...)` starts your own loop under any launcher, and keeps finished steps when a rank is lost.

`job.step` commits: when its block ends, the tracked objects and the position of the run become the state, in one
instant. Every copy holds the state of the last commit, whenever it is written. A program with settings of its own first
joins the ranks with `rankup.Program`, and then calls `open_job`. See `loop.md`.
"""

import atexit
import builtins
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from rankup.agent.processes import act_before_end
from rankup.env.rank_env import array_task
from rankup.errors import FINISHED, ExpectedError, Finished, Stopped, UserError, exit_code, need
from rankup.group.group import Group
from rankup.loop.arguments import seconds, switch, whole_number
from rankup.loop.changes import as_yaml, differing, settings_of
from rankup.loop.job import Job
from rankup.loop.settings import Settings, check_record
from rankup.observe import tracker as trackers
from rankup.places.files import read_json, runs_folder
from rankup.places.lease import KEPT
from rankup.process import Program
from rankup.seeds import derive_seed, seed_everything
from rankup.state.copies import Check, list_copies, no_check
from rankup.state.place import Candidate
from rankup.state.reading import Copy, load, newest_whole, read
from rankup.state.run import open_run
from rankup.state.second_place import fetched, kept_step
from rankup.urls import is_url, must_hold_no_secrets, secrets_in

log = logging.getLogger("rankup")
# The whole numbers among the arguments of `init`, with the least value of each
LEAST = {"log_every_steps": 1, "keep": 1, "save_every_steps": 0, "compare_every_steps": 0, "memory_every_steps": 0}
OWN = ("run", "device", "task", "settings", "on_end")  # names in `init` that may differ between ranks
DEVICE = re.compile(r"(?!cpu:)[a-z]+(:\d+)?")
PID = os.getpid()  # a rank that is forked later is not interactive
HASHES = (
    "PYTHONHASHSEED is not set: a set of strings has another order on each rank and after each start. If numbers "
    "depend on that order, such as class numbers, sort the set, or start with PYTHONHASHSEED=0, as rankup launch does"
)


def init(
    run: str | PathLike[str] = "", *, seed: int | None = None, device: str = "auto", fresh: bool = False,
    save_every_steps: int | None = None, keep: int = 2, log_every_steps: int = 50,
    compare_every_steps: int | None = None, tensorboard: bool = True, join_timeout_s: float = 300.0,
    setup_timeout_s: float = 1800.0, step_timeout_s: float = 600.0, save_timeout_s: float = 600.0,
    memory_every_steps: int | None = None, settings: Any = None, may_change: Collection[str] = (), store: str = "",
    mirror: str = "", tracker: str = "none", save: str = "auto", again: bool = False, on_end: str = "",
) -> "Job":
    """Meet the other ranks, take ownership of the run, and return the job. Call it once, before you build the model.

    It starts torch.distributed and seeds all random numbers, so that all ranks build equal models. Until the first step
    SIGTERM, SIGHUP, SIGINT and SIGUSR1 end the process at once. From then on they make the job save and stop.

    `run`: the run's folder, or its address in an object store, `s3://bucket/runs/mine`. By default it is the run of
    `rankup launch`, else `runs/` and the name of the script or module. The same call resumes the run.
    `seed`: determines the order of samples and the random numbers. The default is 0, or in an array of Slurm jobs the
    number of this task.
    `device`: "auto" (the accelerator of this local rank, else the CPU), "cpu", "cuda" or "cuda:1".
    `fresh`: move the earlier run's files aside and start from the beginning. Restarts of the same launch still resume.
    `again`: if the run has finished, run the code after the loop once more. By default the job ends where the loop
    would begin, with one line and code 0. With more epochs or steps than before, it trains these.
    `save_every_steps`: None saves at the end of each epoch, or every 1,000 steps without `job.epochs`. 0 saves only in
    `job.save`, at a stop and at the end.
    `settings`: what must not change by accident, such as `vars(args)`: a dict, or an object with attributes. The
    run keeps it, and trackers and `rankup status` show it. A resume with other settings is refused, unless `may_change`
    has the names of those that differ. Then optimizers and schedulers that the script builds with other options than at
    the start of the run get these too; so does an option that `may_change` names itself, such as "lr".
    `store`: an address below which the run is kept too. `mirror`: a folder or an address that gets copies and may fail.
    `tracker`: "mlflow", "wandb" or "none". `save`: "sync" waits until a copy is written; "auto" writes in the
    background if enough memory is free.
    `on_end`: a shell command that runs once when the job ends, with a line of JSON on its standard input, see
    operators.md. `rankup launch --on-end` outranks it. Only rank 0 and the agents use it.
    `keep`: how many copies to keep on disk. `tensorboard`: whether to write TensorBoard's files too.
    `log_every_steps`: how often to write the values of `job.step`; before the first such step, every 10 steps.
    `compare_every_steps`: how often ranks compare digests of their weights and optimizer states, to find a machine that
    computes wrongly. None spends 0.5 % of the time on it; 0 is for ranks whose weights differ on purpose.
    `memory_every_steps`: how often each rank copies its part of split state (FSDP2) to its node's memory. None spends
    0.5 % of the time on it; 0 turns these copies off.
    `join_timeout_s`, `setup_timeout_s`, `step_timeout_s`, `save_timeout_s`: deadlines in seconds for the ranks to meet,
    for everything from then to the first step, for a step (0 sets none), and for a save. If one passes, rankup writes
    all stacks and ends the process.

    Raises JoinError if the ranks do not meet in time, PeerLost if a rank is lost meanwhile, and UserError if the
    environment describes no rank, if arguments differ between ranks, or if the run can't be resumed.
    """
    task = array_task(os.environ) if seed is None else None
    seed = seed if seed is not None else task or 0
    given = {name: os.fspath(value) if isinstance(value, PathLike) else value for name, value in locals().items()
             if name not in OWN}
    program, interactive = Program(), is_interactive()
    handler = ExitHandler(program, interactive=interactive)
    program.stop.install(interrupts=interactive)
    program.read_rank()
    if not isinstance(named := os.fspath(run) if isinstance(run, PathLike) else run, str) or "\0" in named:
        raise UserError(f"rankup.init: run must be a folder or an address, got {run!r:.80}. Leave it out.")
    given |= check_options({**given, "device": device, "on_end": on_end})
    may_change = given["may_change"] = sorted({*map(str, may_change)})
    settings = settings_of({} if settings is None else settings)
    need("rankup.init", "numpy", "safetensors", *(["tensorboard"] if tensorboard else []))
    told = (program.rank_env.agent or {}).get("run", {})  # the run of `launch`
    run, address = _place_of(named or told.get("place") or f"runs/{script_name()}")

    def check(path: Path, record: dict[str, Any]) -> None:
        changed = differing({**record.get("settings", settings), "seed": record["seed"]}, {**settings, "seed": seed})
        if refused := {name: text for name, text in changed.items() if name not in may_change or name == "seed"}:
            allow = " name it in may_change," if {*refused} != {"seed"} else ""
            raise UserError(
                f"{run} was begun with other settings: {', '.join(refused.values())}. Set it back to resume the run,"
                f"{allow} or give fresh=True or another run."
            )

    options = {name: value for name, value in given.items() if name != "join_timeout_s"}
    # `job.finish` writes the result. A restart of the same launch repeats the code after the loop, which was cut off
    options["finished"] = lambda newest, result: result.get("step") == newest.step and not group.restarted
    if interactive:
        options["step_timeout_s"] = 0.0
    chosen = Settings(**{**options, "store": given["store"] or address}, check=check, shown=settings)
    program.start(run, guarded=False, stacks=True, on_end=on_end)
    if task is not None:
        program.log.info(f"seed {seed}, the number of this task in an array of jobs")
    if named and told.get("chosen") and (run, address) != _place_of(told["place"]):
        program.log.info(f"the run is {named}, as rankup.init says, and not {told['place']}, as launch says")
    texts = {f"setting {name}": str(value) for name, value in given.items()}
    texts |= {f"settings: {name}": str(value) for name, value in settings.items()}
    group: Group = handler.stack.enter_context(program.join(
        run, settings=texts, timeout_s=join_timeout_s, device=None if device == "auto" else device,
    ))
    handler.take_errors()
    job = handler.stack.enter_context(open_job(group, chosen))
    job._exit_handler, handler.job = handler, job
    if settings:
        job.saving.about["settings"], job.reporting.config = settings, as_yaml(settings)
        if (newest := job.run.newest) is not None:
            group.log.info(f"settings  {', '.join(f'{name} {value}' for name, value in settings.items())}")
            for text in differing(newest.record.get("settings", settings), settings).values():
                group.log.info(f"  {text}")
    seed_everything(derive_seed(seed), group.device)
    if hashes_are_random() and (group.world_size > 1 or job.run.newest is not None):
        group.log.info(HASHES)
    group.watch.enter("setup", 0.0 if interactive else setup_timeout_s)
    return job


def is_interactive() -> bool:
    """Return whether a person types the program, in a notebook or at Python's prompt. Then errors and Ctrl-C end the
    run and not the process, and there are no deadlines between two inputs."""
    return os.getpid() == PID and (hasattr(sys, "ps1") or bool(sys.flags.interactive))


def hashes_are_random() -> bool:
    """Return whether a set of strings has another order in each process. `launch` sets the variable for ranks; here
    it is too late, because Python reads the variable only when it starts."""
    return bool(sys.flags.hash_randomization) and os.environ.get("PYTHONHASHSEED", "") in ("", "random")


def _place_of(run: str) -> tuple[Path, str]:
    """Return the run's folder on this machine, and the address of all runs if `run` is an address, else "". Raises
    UserError for an address that names no run, or that a Path has changed to s3:/bucket."""
    if secrets_in(run):
        raise UserError(must_hold_no_secrets("rankup.init: run"))
    runs, _, name = run.rstrip("/").rpartition("/")
    if is_url(run) and is_url(f"{runs}/") and not runs.endswith("/") and name:
        return runs_folder(runs).absolute() / name, runs
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", run):
        raise UserError(f"rankup.init: run must be a folder, or a text such as s3://bucket/runs/mine, got {run}.")
    return Path(run).absolute(), ""  # absolute, because the script may change its folder


def check_options(given: dict[str, Any]) -> dict[str, int]:
    """Raise UserError for arguments of `init` that can't work. Return the whole numbers among them as int."""
    if not isinstance(device := given["device"], str) or not DEVICE.fullmatch(device):
        raise UserError(f'rankup.init: device must be "auto", "cpu", "cuda" or "cuda:1", got {device!r}.')
    for name, known in {"tracker": ("none", *trackers.RUNS), "save": ("auto", "sync")}.items():
        if given[name] not in known:
            raise UserError(f"rankup.init: {name} must be one of {', '.join(known)}, got {given[name]}.")
    if not isinstance(given["on_end"], str) or "\0" in given["on_end"]:
        raise UserError(f"rankup.init: on_end must be a shell command, got {given['on_end']!r}.")
    may_change = given["may_change"]
    if isinstance(may_change, str) or not isinstance(may_change, Collection):
        raise UserError(f'rankup.init: may_change must be a set of names, got {may_change!r}. Write {{"lr"}}.')
    if type(given["seed"]) is not int:  # a number of numpy, or a text of argparse, would draw other random numbers
        raise UserError(f"rankup.init: seed must be a whole number, got {given['seed']!r}. Give it as int.")
    numbers = {
        name: whole_number(f"rankup.init: {name}", given[name], least=least) for name, least in LEAST.items()
        if given[name] is not None or signature(init).parameters[name].default is not None
    }
    for name in ("fresh", "again", "tensorboard"):
        switch(f"rankup.init: {name}", given[name])
    for name in (name for name in given if name.endswith("_timeout_s")):
        seconds(f"rankup.init: {name}", given[name], least=0 if name == "step_timeout_s" else 1)
    for name in ("store", "mirror"):
        if not isinstance(given[name], str):
            raise UserError(f"rankup.init: {name} must be a folder or an address, got {given[name]!r}. Leave it out.")
        if secrets_in(given[name]):
            raise UserError(must_hold_no_secrets(f"rankup.init: {name}"))
    return numbers


def script_name() -> str:
    """Return the name of the script or module that Python runs, or "default" if there is none (in a notebook)."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name).removesuffix(".__main__")
    return Path(getattr(main, "__file__", None) or "default").stem


@contextlib.contextmanager
def open_job(group: Group, settings: Settings) -> Iterator[Job]:
    """Own the run in the group's folder while the block runs, and find the copy to resume from. All ranks call this.

    `job.run.finished`: nothing is left to do. `job.run.newest`: the copy that `job.track` will restore, or None. Raises
    UserError on all ranks if another attempt of the run is alive, or if the run can't be resumed.
    """
    if settings.tracker != "none":
        group.on_rank0(lambda: trackers.check(settings.tracker))
    with open_run(group, replace(settings, check=partial(check_record, more=settings.check))) as run:
        group.status.begun = not run.finished
        job = Job(group, run, settings)
        try:
            yield job
        except BaseException as error:
            with contextlib.suppress(UserError):  # `error` is the reason to report
                job.reporting.close(type(error))
            raise
        job.reporting.close(None)


def open_checkpoint(
    place: str | PathLike[str] = "", *, run_dir: str | PathLike[str] = "", name: str = "",
    group: Group | None = None, check: Check = no_check, timeout_s: float = 1800.0,
) -> Copy:
    """Read the checkpoint at `place`, a folder or a URL; by default, the newest whole one of the run in `run_dir`,
    which may be a URL too, or that which `job.keep` has called `name`.

    `tracked` of the result maps each name given to `job.track` to that object's state, whole and on the CPU. With
    `group`, all ranks call this for the checkpoint that rank 0 finds. `check(path, record)` raises UserError for a
    checkpoint that the caller can't use. Raises UserError if there is no checkpoint or it is damaged, and PeerLost if
    an object store does not answer within `timeout_s` seconds.
    """
    def own(path: Path, record: dict[str, Any]) -> None:
        # A message must not name the folder of a download, which is removed
        check_record(Path(named) if is_url(named := str(place or run_dir)) else path, record, more=check)

    def find() -> list[str]:
        """Return the folders to try. An address is downloaded for as long as `stack` is open."""
        if is_url(named := str(place or run_dir)):
            return [str(stack.enter_context(fetched(named, timeout_s=timeout_s, name=name)))]
        if place:
            return [str(place)]
        if name:
            step = kept_step(read_json(Path(run_dir, KEPT)), name, str(run_dir))
            return [str(Path(run_dir, "checkpoints", f"step-{step:08d}"))]
        found = [str(path) for path in reversed(list_copies(Path(run_dir, "checkpoints")))]
        if not found:
            raise UserError(f"checkpoint: {run_dir}/checkpoints must hold one, got none. Train first, or name one.")
        return found

    def read_it(path: Path) -> Copy:
        return load(group, Candidate(where=str(path)), check=own) if group is not None else read(path, own)

    with contextlib.ExitStack() as stack:
        paths = [*map(Path, group.on_rank0(find) if group is not None else find())]
        if place or name or is_url(str(run_dir)):
            copy = read_it(paths[0])
            return replace(copy, path=Path(copy.path.name)) if is_url(str(place or run_dir)) else copy
        each = ((f"checkpoint {path.name}", partial(read_it, path)) for path in paths)
        warn = log.warning if group is None or group.is_rank0 else None
        newest = newest_whole(Path(run_dir, "checkpoints"), each, warn)
        assert newest is not None  # otherwise all are damaged, which raises
        return newest


class ExitHandler:
    """The hooks that run when this process ends. They pass the error that ends it to the context managers on `stack`.
    If the script ends without an error after the loop of `job`, but has not called `job.finish`, they call it.

    If the process is `interactive`, an error ends the run, and the process goes on: another `init` may follow.
    """

    open: "ExitHandler | None" = None  # of the job that has not ended

    def __init__(self, program: Program, *, interactive: bool) -> None:
        if (other := ExitHandler.open) is not None and other._pid == os.getpid():
            if not interactive:
                raise UserError(
                    "rankup.init: the earlier job of this process must have ended, got one that is open. Call "
                    "job.finish(), or use `with rankup.init(...) as job:`."
                )
            program.log.warning(str(other.leave(KeyboardInterrupt())))  # a notebook's cell runs again
        ExitHandler.open = self
        self.program, self.stack, self.interactive = program, contextlib.ExitStack(), interactive
        self.job: Job | None = None
        self._code = 0  # of an error after `close`, with which Python would end as 1
        self._pid: int = os.getpid()  # forked processes have another one; 0: already ended
        self._usual = sys.excepthook
        self.take_errors()
        atexit.register(self.at_exit)
        # Saves and uploads need threads, which libraries no longer start when Python calls the functions of atexit
        threading._register_atexit(self._before_threads_end)  # type: ignore[attr-defined]
        if interactive and (shell := getattr(builtins, "get_ipython", None)) is not None:
            shell().events.register("post_run_cell", self._after_cell)  # IPython does not call the hook for errors

    def take_errors(self) -> None:
        """Install the hook for errors. Call it again after torch has wrapped it, because torch buffers its output."""
        sys.excepthook = self._on_error

    def close(self) -> None:
        """Leave the group after success."""
        self.stack.close()
        act_before_end(FINISHED)
        if self.job is not None:
            self.job.close()
        self._pid, self.job = 0, None  # Python keeps the hooks, which would keep the job and every tracked object

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:
            error = self.leave(error)
        if self.interactive and isinstance(error, ExpectedError):
            self.program.log.warning(str(error))
        elif self._pid == 0 and isinstance(error, ExpectedError):  # after `close`
            self._code = self.program.end(error)
        else:
            self._usual(type(error), error, error.__traceback__)

    def _after_cell(self, result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is not None and os.getpid() == self._pid and (end := self.leave(error)) is not error:
            self.program.log.warning(str(end))

    def _before_threads_end(self) -> None:
        if self.job is not None and self.job.loop_is_over:  # otherwise another thread of the script may train
            self.at_exit()

    def at_exit(self) -> None:
        if self._code:
            self.program.exit(self._code)
        if os.getpid() != self._pid:
            return
        try:
            if self.job is None or not self.job.loop_is_over:
                if self.interactive:
                    raise KeyboardInterrupt
                said = getattr(sys, "last_value", None)  # `sys.exit("text")` of a forked rank, or a notebook's error
                if isinstance(said, SystemExit) and isinstance(said.code, int):
                    raise said  # its code is that of this process
                if isinstance(said, SystemExit):
                    raise RuntimeError(f"the script ended without job.finish(): {said}")
                raise UserError(
                    "the script must end its loop over job.epochs or job.steps, or call job.finish, got an end without "
                    "either. job.end(why) ends a run early."
                )
            self.job.finish()
        except BaseException as error:
            self.leave(error)

    def leave(self, error: BaseException) -> BaseException:
        """End the run after `error`, and this process too unless it is interactive. Return the error that ended the
        run: a KeyboardInterrupt is a request to stop, and another rank may have caused `error`."""
        self._pid, job, self.job = 0, self.job, None
        try:
            if isinstance(error, KeyboardInterrupt) and self.interactive:
                self.program.stop.ask("SIGINT")
                error = Stopped(job.saving.save_for_stop() if job is not None else "SIGINT: stopped before the start")
            if isinstance(error, Finished):
                self.stack.close()
            else:
                self.stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as failure:  # the group raises the cause, if that is another rank
            error = failure
        if not self.interactive:
            self.program.exit(self.program.end(error))  # by os._exit: torch's own teardown may wait for a dead rank
        act_before_end(exit_code(error))
        if job is not None:
            job.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return error
