"""What a run leaves behind: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result. Rank 0 writes.

The same command goes on from what it finds there, or refuses: nothing in the directory is overwritten that a user could
miss, and one live attempt owns it (see `train.run.lease`).
"""

import contextlib
import shutil
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankup.errors import Stopped, UserError, disk_error
from rankup.observe import tracker
from rankup.observe.metrics import Metrics
from train.config import Config
from train.config.urls import is_url
from train.group.group import Group, on_rank0
from train.group.join import broke_collective
from train.run import lineage, rescue
from train.run.checkpoint import Checkpoint
from train.run.copier import Copier
from train.run.lease import Lease
from train.run.lineage import Lineage
from train.run.metrics import Progress
from train.run.mirror import HELD, Mirror
from train.run.on_disk import OnDisk, find_earlier, find_run, go_on, is_wanted, not_writable
from train.run.origin import Origin, find_origin
from train.run.publish import remove_unfinished
from train.run.remote import RemoteRun
from train.run.saver import Saver


@dataclass(slots=True, kw_only=True)
class RunDirectory:
    """The run directory as this attempt found it, and how to add to it. `lease` is rank 0's, None on the others."""

    config: Config
    group: Group
    finished: bool
    origin: Origin
    mark: str  # of this attempt in the lineage
    lease: Lease | None = field(repr=False)
    remote: RemoteRun | None = field(repr=False)  # rank 0's, where run_dir is an address
    saving: Progress | None  # `saved`, where its checkpoint has yet to be copied to the address
    mirror: Mirror | None = field(repr=False)  # rank 0's, where one is asked for
    # Writes nothing until `open_metrics`
    metrics: Metrics = field(default_factory=lambda: Metrics(None, Progress(), saved=Progress(), tensorboard=False))
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        copier = Copier(self.config, self.group, self.lineage) if self.origin.keeper == self.group.rank else None
        upload = self.remote.upload if self.remote is not None else None
        self.saver = Saver(
            self.config, self.group, self.path / "checkpoints", self.check_owner, copier, upload=upload
        )

    @property
    def path(self) -> Path:
        return self.group.run_dir

    @property
    def address(self) -> str:
        """Where a user finds the run: its folder, or its address in a store."""
        return self.remote.address if self.remote is not None else str(self.path)

    @property
    def lineage(self) -> Lineage:
        return self.origin.lineage

    @property
    def saved(self) -> Progress:
        """Where the run stood at its newest checkpoint on rank 0's disk."""
        return self.origin.saved

    def open_metrics(self, progress: Progress, unit: str) -> Metrics:
        """Metrics from `progress` on, with the speed in `unit`/s. All ranks call this, rank 0's alone write.

        From here on the run continues what this attempt started from, and no other rescue. Raises, on all ranks,
        UserError where rank 0 can't write, and PeerLost where another attempt owns the directory by now.
        """
        self.lineage.go_on(self.mark, writer=self.origin.writer)

        def open_files() -> None:
            self.check_owner()  # the set-up takes long enough to be frozen in, and replaced
            try:
                self.lineage.write(self.path)
            except OSError as error:
                raise disk_error(lineage.FILE, self.path, error) from None
            self.metrics = Metrics(
                self.path, progress, saved=self.saved, tensorboard=self.config.tensorboard, unit=unit,
                check_owner=self.check_owner,
            )
            if self.mirror is not None:
                self.mirror.start()

        self.metrics.unit = unit
        on_rank0(self.group, open_files)
        # One of a later step is damaged, or of an attempt that the run went on without
        rescue.remove(self.lineage.run, above=progress.step)
        rescue.remove(self.lineage.run, up_to=self.saved.step)
        return self.metrics

    def check_owner(self) -> None:
        """Raises PeerLost where another attempt owns the directory by now. Rank 0 only."""
        owner = self.remote or self.lease
        assert owner is not None
        owner.check()


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group) -> Iterator[RunDirectory]:
    """Own the run directory for the length of the block, and find what is there: a finished run, a checkpoint, nothing.

    All ranks call this. Raises UserError on all of them where another attempt is alive, a setting that affects the
    result has changed, or the newest checkpoint can't be gone on with.
    """
    lease = Lease(group.run_dir, group.attempt) if group.is_rank0 else None
    remote: RemoteRun | None = None
    mirror = Mirror(config, group) if config.mirror and group.is_rank0 else None
    earlier: Checkpoint | None = None
    if is_url(config.run_dir):
        group.watch.enter("setup", config.setup_timeout_s)  # a checkpoint may have to be fetched
    with contextlib.ExitStack() as stack:

        def claim() -> None:
            assert lease is not None
            group.status.claim(remote or lease, copy=remote.copy_status if remote else None)

        def take() -> dict[str, Any]:
            nonlocal earlier, remote
            assert lease is not None
            try:
                stack.enter_context(lease)  # here, not around the block: a refusal has to reach all ranks
                if is_url(config.run_dir):
                    remote = stack.enter_context(RemoteRun(config, group, lease))
                    remote.adopt()
                remove_unfinished(group.run_dir / "checkpoints")
                shutil.rmtree(group.run_dir / HELD, ignore_errors=True)
                claim()
                if config.tracker != "none":
                    tracker.check(config.tracker)
                begun = find_run(config, group)
                if remote is not None and begun is not None:
                    remote.fetch_checkpoint(begun.run)
                if mirror is not None:
                    group.watch.enter("setup", config.setup_timeout_s)  # a checkpoint may have to be fetched
                    mirror.fetch(begun, wanted=lambda other: is_wanted(other, config, group))
                    begun = Lineage.read(group.run_dir)
                    claim()  # the mirror's status is of an earlier attempt
                finished, earlier, problem = find_earlier(config, group)
            except OSError as error:
                raise not_writable(group, error) from None
            new = Lineage.new(group.attempt, group.launch.start)
            if earlier is not None:
                new.run = earlier.state.run  # run.json was lost: trackers know the run by the same id all the same
            return asdict(OnDisk(
                finished=finished, problem=problem, token=lease.token, mark=lineage.new_mark(group.attempt),
                lineage=begun.values() if begun else None, new=new.values(),
                saved=[earlier.state.step, earlier.state.evaluated] if earlier else None,
            ))

        disk = OnDisk(**on_rank0(group, take))
        if disk.finished:
            origin = Origin(Lineage(**disk.lineage or disk.new), Progress(*disk.saved or (0, 0)), checkpoint=earlier)
            rescue.remove(origin.lineage.run)
        else:
            origin = find_origin(config, group, disk, earlier)
            if disk.problem:
                on_rank0(group, lambda: go_on(config, group))
        found = earlier  # the checkpoint in rank 0's folder
        saving = None
        if is_url(config.run_dir) and not on_rank0(
            group, lambda: remote is None or found is None or remote.holds(found.path, origin.lineage.run)
        ):
            saving = copy(origin.saved)
        run = RunDirectory(
            config=config, group=group, finished=disk.finished, origin=origin, mark=disk.mark, lease=lease,
            remote=remote, saving=saving, mirror=mirror,
        )
        try:
            if saving is not None and group.is_rank0:
                run.saver.upload_beside(group.run_dir / "checkpoints" / f"step-{saving.step:08d}", step=saving.step)
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
            if mirror is not None and isinstance(error, Stopped):
                mirror.finish(stopped=True)
            raise
        run.metrics.close()  # TensorBoard's writer holds up to two minutes of values in memory
        if remote is not None:
            remote.finish()
        if mirror is not None and not run.finished:
            mirror.finish(stopped=False)
