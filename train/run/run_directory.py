"""What a run leaves behind: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result. Rank 0 writes.

The same command goes on from what it finds there, or refuses: nothing in the directory is overwritten that a user could
miss, and one live attempt owns it (see `rankup.places.lease`).
"""

import contextlib
import shutil
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rankup.errors import Stopped, UserError, disk_error
from rankup.group.group import Group, broke_collective, on_rank0
from rankup.observe import tracker
from rankup.observe.metrics import Metrics
from rankup.places import lineage
from rankup.places.lease import Lease
from rankup.places.lineage import Lineage
from rankup.places.second import HELD, SecondPlace
from rankup.places.urls import is_url
from rankup.state.copies import remove_unfinished
from rankup.state.saver import Saver
from train.config import Config
from train.run import rescue
from train.run.candidates import Origin, find_origin
from train.run.checkpoint import Checkpoint, find_problem, list_checkpoints, newest_good_step
from train.run.copier import Copier
from train.run.metrics import Progress
from train.run.on_disk import OnDisk, find_earlier, find_run, go_on, is_wanted, not_writable


@dataclass(slots=True, kw_only=True)
class RunDirectory:
    """The run directory as this attempt found it, and how to add to it. `lease` is rank 0's, None on the others."""

    config: Config
    group: Group
    finished: bool
    origin: Origin
    mark: str  # of this attempt in the lineage
    lease: Lease | None = field(repr=False)
    remote: SecondPlace | None = field(repr=False)  # rank 0's, where run_dir is an address
    saving: Progress | None  # `saved`, where its checkpoint has yet to be copied to the address
    mirror: SecondPlace | None = field(repr=False)  # rank 0's, where one is asked for
    # Writes nothing until `open_metrics`
    metrics: Metrics = field(default_factory=lambda: Metrics(None, Progress(), saved=Progress(), tensorboard=False))
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        copier = Copier(self.config, self.group, self.lineage) if self.origin.keeper == self.group.rank else None
        upload = self.remote.upload if self.remote is not None else None
        config = self.config
        self.saver = Saver(
            self.group, self.path / "checkpoints", on_rank0=partial(on_rank0, self.group), how=config.save,
            sharded=config.checkpoint_format == "sharded", keep=config.keep, timeout_s=config.save_timeout_s,
            check_owner=self.check_owner, copier=copier, upload=upload,
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
        self.lineage.go_on(self.mark, step=progress.step, writer=self.origin.writer)

        def open_files() -> None:
            self.check_owner()  # the set-up takes long enough to be frozen in, and replaced
            try:
                self.lineage.write(self.path, check=self.check_owner)
            except OSError as error:
                raise disk_error(lineage.FILE, self.path, error) from None
            self.metrics = Metrics(
                self.path, progress, saved=self.saved, tensorboard=self.config.tensorboard, unit=unit,
                check_owner=self.check_owner,
            )
            if self.remote is not None:  # or a machine that comes next would not know of a run that was begun anew
                self.remote.upload(None, timeout_s=self.config.save_timeout_s)
            if self.mirror is not None:
                self.mirror.start(next(reversed(list_checkpoints(self.path / "checkpoints")), None))

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
    remote: SecondPlace | None = None
    mirror: SecondPlace | None = None
    earlier: Checkpoint | None = None
    directory = group.run_dir / "checkpoints"
    if is_url(config.run_dir):
        group.watch.enter("setup", config.setup_timeout_s)  # a checkpoint may have to be fetched
    with contextlib.ExitStack() as stack:

        def second(url: str, *, required: bool) -> SecondPlace:
            assert lease is not None
            return stack.enter_context(SecondPlace(
                url, group.run_dir, lease, group.log, required=required, keep=config.keep, save_s=config.save_timeout_s,
                setup_s=config.setup_timeout_s, find_problem=find_problem,
            ))

        def claim() -> None:
            assert lease is not None
            group.status.claim(remote or lease, copy=remote.copy_status if remote else None)

        def take() -> dict[str, Any]:
            nonlocal earlier, remote, mirror
            assert lease is not None
            try:
                stack.enter_context(lease)  # here, not around the block: a refusal has to reach all ranks
                if is_url(config.run_dir):
                    remote = second(config.run_dir, required=True)
                    remote.adopt(nothing_here=False, wanted=lambda other: True)
                remove_unfinished(directory)
                shutil.rmtree(group.run_dir / HELD, ignore_errors=True)
                claim()
                if config.tracker != "none":
                    tracker.check(config.tracker)
                if config.mirror:
                    group.watch.enter("setup", config.setup_timeout_s)  # a checkpoint may have to be fetched
                begun = find_run(config, group)
                above = newest_good_step(directory) if remote or config.mirror else -1
                if config.mirror:
                    mirror = second(config.mirror, required=False)
                    nothing = begun is None and above < 0
                    mirror.adopt(nothing_here=nothing, wanted=lambda other: is_wanted(other, config, group))
                    begun = Lineage.read(group.run_dir)
                    claim()  # the mirror's status is of an earlier attempt
                for place in filter(None, (remote, mirror)):
                    if begun is not None:
                        place.fetch(begun.run, above=above)
                        above = newest_good_step(directory)
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
            remote.finish(stopped=False)
        if mirror is not None and not run.finished:
            mirror.finish(stopped=False)
