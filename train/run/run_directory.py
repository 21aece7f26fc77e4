"""What a run leaves behind: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result. Rank 0 writes.

The same command goes on from what it finds there, or refuses: nothing in the directory is overwritten that a user could
miss, and one live attempt owns it (see `train.run.lease`).
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from train.config import Config, changed_settings, to_yaml
from train.errors import UserError, disk_error
from train.group.group import Group, on_rank0
from train.group.join import broke_collective
from train.process.atomic_file import write_atomically
from train.process.status import job_of, read_json
from train.run import lineage, rescue
from train.run.checkpoint import Checkpoint, load_newest, share_checkpoint
from train.run.choices import CHOICES
from train.run.lease import Lease
from train.run.lineage import Lineage
from train.run.metrics import Metrics, Progress
from train.run.saver import Saver
from train.run.trackers import table


@dataclass(slots=True)
class RunDirectory:
    """The run directory as this attempt found it, and how to add to it. `lease` is rank 0's, None on the others."""

    config: Config
    group: Group
    finished: bool
    checkpoint: Checkpoint | None  # the state to go on from
    rescuer: str | None  # the attempt that wrote it, where it is a rescue
    saved: Progress  # where the run stood at its newest checkpoint
    lineage: Lineage
    mark: str  # of this attempt in the lineage
    lease: Lease | None = field(repr=False)
    # Writes nothing until `open_metrics`
    metrics: Metrics = field(default_factory=lambda: Metrics(None, Progress(), saved=Progress(), tensorboard=False))
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        self.saver = Saver(self.config, self.group, self.path / "checkpoints", self.check_owner)

    @property
    def path(self) -> Path:
        return self.group.run_dir

    def open_metrics(self, progress: Progress, unit: str) -> Metrics:
        """Metrics from `progress` on, with the speed in `unit`/s. All ranks call this, rank 0's alone write.

        From here on the run continues what this attempt started from, and no other rescue. Raises UserError on all
        ranks where rank 0 can't write.
        """
        self.lineage.go_on(self.mark, rescuer=self.rescuer)
        # One of a later step is damaged, or of an attempt that the run went on without
        rescue.remove(self.lineage.run, above=progress.step)
        rescue.remove(self.lineage.run, up_to=self.saved.step)

        def open_files() -> None:
            try:
                self.lineage.write(self.path)
            except OSError as error:
                raise disk_error(lineage.FILE, self.path, error) from None
            self.metrics = Metrics(
                self.path, progress, saved=self.saved, tensorboard=self.config.tensorboard, unit=unit
            )

        self.metrics.unit = unit
        on_rank0(self.group, open_files)
        return self.metrics

    def check_owner(self) -> None:
        """Raises PeerLost where another attempt owns the directory by now. Rank 0 only."""
        assert self.lease is not None
        self.lease.check()


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group) -> Iterator[RunDirectory]:
    """Own the run directory for the length of the block, and find what is there: a finished run, a checkpoint, nothing.

    All ranks call this. Raises UserError on all of them where another attempt is alive, a setting that affects the
    result has changed, or the newest checkpoint can't be gone on with.
    """
    lease = Lease(group.run_dir, group.attempt) if group.is_rank0 else None
    earlier: Checkpoint | None = None
    with contextlib.ExitStack() as stack:

        def take() -> dict[str, Any]:
            nonlocal earlier
            assert lease is not None
            try:
                stack.enter_context(lease)  # here, not around the block: a refusal has to reach all ranks
                group.status.claim(lease)
                if config.tracker != "none":
                    table.check(config.tracker)
                begun = _find_run(config, group)
                finished, earlier = _find_earlier(config, group)
            except OSError as error:
                raise UserError(f"run_dir: {group.run_dir} must be writable, got {error.strerror or error}.") from None
            saved = [earlier.state.step, earlier.state.evaluated] if earlier else [0, 0]
            mark = lineage.new_mark(group.attempt)
            return {"finished": finished, "lineage": begun.values(), "mark": mark, "saved": saved}

        found = on_rank0(group, take)
        begun, saved = Lineage(**found["lineage"]), Progress(*found["saved"])
        rescued: Checkpoint | None = None
        if found["finished"]:
            rescue.remove(begun.run)
        else:
            rescued = rescue.choose(group, begun, config, above=saved.step, warn=group.log.warning)
            earlier = rescued or share_checkpoint(earlier, group)
        rescuer = rescued.state.attempt if rescued else None
        run = RunDirectory(config, group, found["finished"], earlier, rescuer, saved, begun, found["mark"], lease)
        try:
            yield run
        except BaseException as error:
            if run.saver.writing and broke_collective(error):
                # There will be a rescue, which must not wait for the disk. The thread may publish until this process
                # ends. Until then no other attempt may own the directory: the kernel frees the lease, as after a kill
                stack.pop_all()
            elif run.saver.writing:
                group.watch.enter("save", config.save_timeout_s)
                run.saver.wait()
            with contextlib.suppress(UserError):  # the reason for leaving is the other error
                run.metrics.close()
            raise
        run.metrics.close()  # TensorBoard's writer holds up to two minutes of values in memory


def _find_run(config: Config, group: Group) -> Lineage:
    """The run that the directory holds, or a new one. Rank 0 only. Raises OSError."""
    directory = group.run_dir
    found = Lineage.read(directory)
    if config.fresh and not (found and _begun_by_this_launch(found, group)):
        _put_aside(directory, group.log.info)
        found = None
    if found is None:
        # At once: a restart of this launch has to know that the earlier run has been put aside
        found = Lineage.new(group.attempt, group.launch.start)
        found.write(directory)
    return found


def _find_earlier(config: Config, group: Group) -> tuple[bool, Checkpoint | None]:
    """Whether the run is finished already, and its newest checkpoint. Rank 0 only. Raises UserError."""
    directory = group.run_dir
    earlier = load_newest(directory / "checkpoints", group.log.warning)
    if earlier is not None:
        earlier.state.check_random_scheme(earlier.path)
        if changes := changed_settings(earlier.state.config, config):
            raise UserError(
                f"{directory} was begun with other settings: {'; '.join(changes)}. Set them back to go on, or --fresh "
                "to start anew, or another --name."
            )
        if config.checkpoint_format != "sharded":
            earlier = earlier.as_plain()
    result_file = directory / "result.json"
    result = read_json(result_file) or {}
    if (
        earlier is not None and result.get("step") == earlier.step
        and earlier.step >= (config.max_steps or config.epochs * earlier.state.steps_per_epoch)
    ):
        named = {name: value for name, value in result["metrics"].items() if name in ("accuracy", "loss")}
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(named.items()))
        group.log.info(
            f"{directory} is finished: {earlier.step} steps, {metrics}. More --epochs go on from there, --fresh starts "
            "anew, another --name leaves it."
        )
        return True, earlier
    # A result beside a run that goes on would be read as its end
    result_file.unlink(missing_ok=True)
    write_atomically(directory / "config.yaml", to_yaml(config, choices=CHOICES))
    return False, earlier


def _begun_by_this_launch(found: Lineage, group: Group) -> bool:
    """Whether this attempt is a restart that finds what its own launch began with --fresh, and has to go on with that.

    That it is a restart does not suffice: a first attempt that was killed before it put the earlier run aside has left
    the earlier run. `launch` gives all its attempts ids of one job; where containers are started again (compose, pods),
    `start` names the start of them all.
    """
    if group.launch.start:
        return found.start == group.launch.start
    if not group.restarted or not group.launch.numbers_attempts:
        return group.restarted
    return job_of(found.begun_by) == job_of(group.attempt)


def _put_aside(directory: Path, say: Callable[[str], None]) -> None:
    """Start anew without losing anything: what is there moves to `before-<time>/`."""
    names = ("checkpoints", "tensorboard", "metrics.jsonl", "result.json", "config.yaml", "tracker", lineage.FILE)
    there = [directory / name for name in names if (directory / name).exists()]
    if not there:
        return
    moved = directory / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    moved.mkdir()
    for path in there:
        shutil.move(path, moved / path.name)
    say(f"--fresh: the earlier run was moved to {moved}")
