"""What is read from an address: `--init-from s3://...`, `--checkpoint s3://...`, and a run whose run_dir is one."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankup.errors import UserError
from rankup.places.cache import cache_root
from rankup.places.place import Place
from rankup.places.stored_run import fetch
from rankup.places.urls import is_url
from rankup.state.copies import find_problem


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
        yield fetch(Place.open(place, warn=warn, timeout_s=timeout_s), Path(own), find_problem)
