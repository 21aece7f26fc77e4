"""A run whose run directory is an address, `--run-dir s3://bucket/runs`. No torch.

The run works in a folder of this machine, as any other, and what it publishes there is copied to the store. At opening
the store counts: whatever machine comes next, with an empty disk or an old one, goes on from what is there.
"""

import contextlib
import hashlib
import shutil
import time
from pathlib import Path

from train.config import Config
from train.group.group import Group
from train.process.exit import within
from train.process.status import read_json, write_json
from train.run import lineage
from train.run.checkpoint import newest_good_step
from train.run.lease import Lease
from train.run.lineage import Lineage
from train.run.objects import Objects
from train.run.run_store import RunStore
from train.run.store_lease import StoreLease, folder_of

SEEN = ".store-seen.json"  # digests of run.json as this folder last read it from the store or wrote it there
SUPERSEDED = "superseded"
LAST_WORD_S = 3.0  # for the status of an attempt that ends: a lost rank's restart does not wait longer for a dead store
SHARE = 0.9  # of a deadline: ours has to come before the watchdog's, which does not know the store


class RemoteRun:
    """The store's side of a run, for the length of a `with` block. Rank 0 only; one thread at a time uses it."""

    def __init__(self, config: Config, group: Group, lease: Lease) -> None:
        """`lease`: of the folder on this machine."""
        self.folder, self.config, self._folder_lease = group.run_dir, config, lease
        self.address = f"{config.run_dir.rstrip('/')}/{group.run_dir.name}"
        self._say, self._say_quietly = group.log.info, group.log.debug
        patience_s = SHARE * min(config.setup_timeout_s, config.save_timeout_s)
        objects = Objects.open(config.run_dir, warn=group.log.warning, timeout_s=patience_s)
        self.store = RunStore(objects.below(group.run_dir.name))
        self._lease = StoreLease(self.store.objects, group.run_dir, group.attempt)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "RemoteRun":
        """Own the run. Raises UserError where another attempt does, and as `Objects` does."""
        self._stack.enter_context(self._lease)
        self.store.owner = self._lease.number
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def adopt(self) -> None:
        """Make the folder hold what the store says of the run, unless it is this folder that wrote that last.

        Raises as `Objects` does, and OSError.
        """
        there = self.store.run_file()
        run = self.store.current_run()
        if run is None or (there is not None and _digest(there) in self._seen()):
            return  # nothing is there yet, or this folder may be ahead of it
        self._put_aside()
        self.store.fetch_files(self.folder)
        if Lineage.read(self.folder) is None:  # lost in the store
            Lineage(run, "", "", []).write(self.folder)
        write_json(self.folder / SEEN, [_digest((self.folder / lineage.FILE).read_bytes())])

    def fetch_checkpoint(self, run: str) -> None:
        """Copy the newest checkpoint of that run here, where it is of a later step than those that are here."""
        began_s = time.monotonic()
        directory = self.folder / "checkpoints"
        path = self.store.fetch_newest(directory, run=run, above=newest_good_step(directory))
        if path is not None:
            self._say(f"fetched {path.name} from {self.address} in {time.monotonic() - began_s:.1f} s")

    def holds(self, path: Path, run: str) -> bool:
        """Whether the store has this checkpoint already."""
        return self.store.holds(path, run=run)

    def upload(self, path: Path, *, timeout_s: float) -> None:
        """Copy a published checkpoint, and the files beside it before: a resumed run does not repeat saved steps.

        Raises UserError where the store refuses, PeerLost where it does not answer within `timeout_s`, or where another
        attempt owns the run by now. The checkpoint stays here in any case.
        """
        self.store.objects = self.store.objects.within(SHARE * timeout_s)
        began_s = time.monotonic()
        self._upload_files()
        run = (read_json(self.folder / lineage.FILE) or {})["run"]
        self.store.upload_checkpoint(path, run=run, keep=self.config.keep, check_owner=self._lease.check)
        seconds = time.monotonic() - began_s
        self._say_quietly(f"copied {path.name} to {self.address} in {seconds:.1f} s")

    def finish(self) -> None:
        """Copy the files once more. Raises as `upload` does."""
        self.store.objects = self.store.objects.within(SHARE * self.config.save_timeout_s)
        self._lease.check()
        self._upload_files()

    def is_ours(self) -> bool:
        """Whether no other attempt has been seen to take the run over, here or in the store. Asks no store."""
        return self._folder_lease.is_ours() and self._lease.is_ours()

    def check(self) -> None:
        """Raises PeerLost where `is_ours` is not so."""
        self._folder_lease.check()
        if not self._lease.is_ours():
            self._lease.check()

    def copy_status(self, path: Path) -> None:
        """Copy `status.json`, which is written last of all, when the lease has been given back. Raises nothing."""

        def copy() -> None:
            quick = self.store.objects.within(0.0)
            if self.is_ours() and not self._lease.followed():
                quick.below(folder_of(self.store.owner)).write(path.name, path.read_bytes())

        within(LAST_WORD_S, copy)

    def _upload_files(self) -> None:
        with contextlib.suppress(OSError):
            now = _digest((self.folder / lineage.FILE).read_bytes())
            # Before it is written there: a kill in between must not make this folder a stranger to its own run
            write_json(self.folder / SEEN, list(dict.fromkeys([*self._seen()[-1:], now])))
        self.store.upload_files(self.folder)

    def _seen(self) -> list[str]:
        found = read_json(self.folder / SEEN)
        return found if isinstance(found, list) else []

    def _put_aside(self) -> None:
        """What an earlier attempt on this machine left, and others have gone on without."""
        there = [self.folder / name for name in (*lineage.OF_RUN, "status.json") if (self.folder / name).exists()]
        if not any(path.name in ("checkpoints", lineage.FILE) for path in there):
            return
        aside = self.folder / SUPERSEDED
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in there:
            shutil.move(path, aside / path.name)
        self._say(f"{self.address} went on elsewhere: what this machine had of it was moved to {aside}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
