"""--init-method: where the ranks meet, given as a URL instead of MASTER_ADDR and MASTER_PORT. No torch here.

`tcp://host:port` is the two variables in another form. With `file:///path` rank 0 opens a free port and writes its
address into that file, which all ranks can read; it is removed once they have met (see `train.group.file_rendezvous`).
torch's own file store keeps everything in the file, and waits without end where an earlier run left one.
"""

import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from train.errors import LaunchError


def environment(
    environ: Mapping[str, str], *, url: str, rank: int | None = None, world_size: int | None = None
) -> dict[str, str]:
    """`environ` and the variables that the flags stand for.

    Raises LaunchError for a URL of another kind, and where a flag repeats a variable that is set.
    """
    flags = {"--rank": ("RANK", rank), "--world-size": ("WORLD_SIZE", world_size)}
    given = {name: str(value) for name, value in flags.values() if value is not None}
    given |= parse_url(url) if url else {}
    for flag, (name, value) in {**flags, "--init-method": ("MASTER_ADDR", url or None)}.items():
        if value is not None and name in environ:
            raise LaunchError(
                f"{flag} must be left out where {name}={environ[name]} is set already, got {value}. Keep one."
            )
    return {**environ, **given}


def parse_url(url: str) -> dict[str, str]:
    """The variables that a URL stands for. Raises LaunchError for a URL of another kind and for a file in no folder."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        path = Path(urllib.request.url2pathname(parts.path))
        if not path.parent.is_dir() or path.is_dir():
            raise LaunchError(f"--init-method must name a file in a folder that exists and all ranks see, got {path}.")
        # No address is known yet: these pass the checks of the five variables, and nobody opens the port
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANKUP_FILE": str(path)}
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@]+):([0-9]+)/?", parts.netloc + parts.path)
    if parts.scheme == "tcp" and address and not parts.query:
        return {"MASTER_ADDR": address[1].strip("[]"), "MASTER_PORT": address[2]}
    raise LaunchError(f"--init-method must be tcp://HOST:PORT or file:///PATH, got {url}. For env:// leave it out.")
