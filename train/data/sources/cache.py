"""Where downloaded data are kept when the user names no place."""

import os
from pathlib import Path

from rankup import UserError, cache_roots


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


def cached(name: str) -> Path | None:
    """The first cache folder that holds a folder of this name, or None. It need not be writable."""
    return next((root for root in cache_roots() if (root / name).is_dir()), None)


def writable_cache() -> Path:
    """The first cache folder that can be written, created if it is missing. Raises UserError if there is none."""
    roots = cache_roots()
    for root in roots:
        try:
            # 0o700: in a shared temporary folder nobody else should write into ours.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root, os.W_OK | os.X_OK):
            return root
    raise UserError(
        f"{' and '.join(map(str, roots))}: cannot be written, so no data can be kept there. "
        "Set RANKUP_CACHE or data_dir to a folder that can."
    )
