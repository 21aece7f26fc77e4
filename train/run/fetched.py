"""What is read from an address: `--init-from s3://...`, `--checkpoint s3://...`, and a run whose run_dir is one."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rankup.errors import UserError
from train.config.urls import is_url
from train.process.context import cache_root
from train.run.objects import Objects
from train.run.run_store import RunStore
from train.run.stored_checkpoint import MANIFEST, fetch_checkpoint


@contextmanager
def fetched(place: str, *, warn: Callable[[str], None], timeout_s: float) -> Iterator[Path]:
    """The path of `place` for the length of the block: the place itself, or a copy of what is at that address.

    At the address of a run that is its newest checkpoint. Copies of checkpoints are verified. Raises UserError where
    there is nothing to read or the store refuses, and PeerLost where it does not answer within `timeout_s`.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder = cache_root() / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} must be writable, got {error.strerror}. Set RANKUP_CACHE to a folder that is."
        raise UserError(text) from None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield fetch(Objects.open(place, warn=warn, timeout_s=timeout_s), Path(own))


def fetch(address: Objects, directory: Path) -> Path:
    """Copy what is at an address into `directory`, and return its path there: a run's newest checkpoint, or a file.

    `address`: of a run, of a checkpoint's folder, or of an object. A checkpoint is verified. Raises as `Objects` does,
    and UserError where nothing is there, or nothing whole.
    """
    root, _, name = address.root.rpartition("/")
    beside = replace(address, root=root, url=address.url.rpartition("/")[0])
    if address.size(MANIFEST) is not None:
        path, problem = fetch_checkpoint(beside, name, directory)
        if problem:
            raise UserError(f"checkpoint: {address.url} must be a whole checkpoint, got a damaged one: {problem}.")
        return path
    store = RunStore(address)
    if run := store.current_run():
        newest = store.fetch_newest(directory, run=run)
        if newest is not None:
            return newest
    elif beside.download(name, directory / name):
        return directory / name
    raise UserError(f"{address.url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")
