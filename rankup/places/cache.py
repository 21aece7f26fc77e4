"""The folders of this machine for copies of what is kept elsewhere, and for the runs of an address. No torch here."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from rankup.env.rank_env import cache_folder
from rankup.errors import UserError
from rankup.urls import is_url


def runs_folder(run_dir: str) -> Path:
    """The folder of all runs on this machine. An address in `run_dir` has one of its own in the cache.

    A run at an address works there, and rank 0 copies what it publishes: see `rankup.state.second`. It may get lost.
    Raises UserError as `cache_root` does.
    """
    if not is_url(run_dir):
        return Path(run_dir)
    url = run_dir.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url)[:60]
    return cache_root() / "runs" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def cache_root() -> Path:
    """The first of `cache_roots`."""
    return cache_roots()[0]


def cache_roots() -> list[Path]:
    """The folders of this machine for copies of what is kept elsewhere, the preferred one first: RANKUP_CACHE alone if
    it is set, else the user's cache, and one in the temporary directory. None need exist.

    Raises UserError where another user may have prepared all of them.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = Path(tempfile.gettempdir(), f"rankup-cache-{os.geteuid()}")  # not that of rescues, where old ones go
    # For a user without a home directory ~ stays as it is
    roots = [shared] if base.startswith("~") else [Path(base, "rankup"), shared]
    roots = [Path(wanted)] if (wanted := cache_folder()) else roots
    if not (own := [root for root in roots if is_own(root)]):
        raise UserError(
            f"cache: {roots[0]} must belong to this user, got another's. Set RANKUP_CACHE to another folder."
        )
    return own


def is_own(folder: Path) -> bool:
    """Whether no other user made `folder` or what it lies in, as all can in the temporary directory. There a missing
    one is made."""
    temporary = Path(tempfile.gettempdir())
    outermost = next((each for each in (folder, *folder.parents) if each.parent == temporary), None)
    if outermost is None:
        return True
    try:
        outermost.mkdir(mode=0o700, exist_ok=True)
        return outermost.lstat().st_uid == os.geteuid()
    except OSError:
        return False
