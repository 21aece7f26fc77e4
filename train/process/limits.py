"""The control groups that this process is in, v1 and v2: what a container or a batch job is held to."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Where this process's own group may lie and each of its parents, the own first, with the version: 1 or 2.

    Not each exists: inside a container the path may be the host's, and the mount point is the container's own group.
    `root` replaces the file system's root, for tests.
    """
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = PurePosixPath(path.strip("/")).parts
        groups = [PurePosixPath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        if not controllers:
            yield from ((mount / group, 2) for group in groups)
        elif controller in controllers.split(","):
            yield from ((place / group, 1) for place in (mount / controller, mount / controllers) for group in groups)


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this container or job the kernel has killed for memory so far, or None: not told."""
    for folder, version in folders("memory", root):
        for line in read(folder / ("memory.events" if version == 2 else "memory.oom_control")).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this container or job may still take, or None: no limit is told. Some of what it holds can be given back,
    so that there may be more."""
    found = []
    for folder, version in folders("memory", root):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (read(folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
