"""Where downloaded data are kept when the user names no place."""

import os
import tempfile
from pathlib import Path

from rankup.env.rank_env import cache_folder
from rankup.errors import UserError
from rankup.places.cache import is_own


def visible(root: Path) -> list[str]:
    """The names in a folder, sorted, without hidden ones (locks and unfinished downloads are hidden).

    [] if there is no such folder. Raises UserError if it is not a folder or cannot be listed.
    """
    try:
        return sorted(name for name in os.listdir(root) if not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{root}: data_dir must be a folder that can be read ({error.strerror}).") from error


def cache_roots() -> list[Path]:
    """RANKUP_CACHE alone if it is set; otherwise XDG_CACHE_HOME/rankup or ~/.cache/rankup, then one in /tmp."""
    if wanted := cache_folder():
        return [Path(wanted)]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # For a user without a home directory ~ stays as it is.
    roots = [] if base.startswith("~") else [Path(base) / "rankup"]
    return [*roots, Path(tempfile.gettempdir()) / f"rankup-cache-{os.geteuid()}"]


def cached(name: str) -> Path | None:
    """The first cache folder that holds a folder of this name, or None. It need not be writable."""
    return next((root for root in cache_roots() if (root / name).is_dir() and is_own(root)), None)


def writable_cache() -> Path:
    """The first cache folder that can be written, created if it is missing. Raises UserError if there is none."""
    roots = cache_roots()
    for root in roots:
        try:
            # 0o700: in a shared temporary folder nobody else should write into ours.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if is_own(root) and os.access(root, os.W_OK | os.X_OK):
            return root
    raise UserError(
        f"{' and '.join(map(str, roots))}: cannot be written, so no data can be kept there. "
        "Set RANKUP_CACHE or data_dir to a folder that can."
    )
