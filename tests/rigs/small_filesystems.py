"""Small file systems that only a test sees, in a mount namespace: for root, or where user namespaces are allowed."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@dataclass
class Disk:
    """A tmpfs. `path` leads to it from outside, through /proc of the process that holds its namespace."""

    path: Path
    holder: subprocess.Popen[str]

    def resize(self, size: str) -> None:
        """Make it larger or smaller. `size` is written as for mount: 3m."""
        self._do(f"mount -o remount,size={size} {self._inner}")

    @property
    def _inner(self) -> str:
        return "/" + str(self.path).split("/root/", 1)[1]

    def _do(self, command: str) -> None:
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        self.holder.stdin.write(f"{command} && echo done || echo failed\n")
        self.holder.stdin.flush()
        assert self.holder.stdout.readline() == "done\n", command


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    """A file system of that size, mounted over `folder` in the namespace of a process of its own."""
    folder.mkdir()
    with subprocess.Popen(
        [*UNSHARE, "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as holder:
        disk = Disk(Path(f"/proc/{holder.pid}/root{folder}"), holder)
        disk._do(f"mount -t tmpfs -o size={size} none {folder}")
        try:
            yield disk
        finally:
            holder.kill()


def own_tmpfs(where: str, size: str) -> None:
    """Mount a tmpfs that this process alone sees. The process must have one thread only, as after a fork."""
    libc = _own_mounts()
    _check(libc.mount(b"none", where.encode(), b"tmpfs", 0, f"size={size}".encode()), f"mount {where}")


def own_folder(where: str, folder: Path) -> None:
    """Let this process alone see `folder` at the path `where`. Else as `own_tmpfs`."""
    bind = 1 << 12
    _check(_own_mounts().mount(str(folder).encode(), where.encode(), None, bind, None), f"mount {where}")


def _own_mounts() -> ctypes.CDLL:
    new_mounts, new_user, private = 0x20000, 0x10000000, 1 << 18 | 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(new_mounts | (0 if user == 0 else new_user)), "unshare")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(b"none", b"/", None, private, None), "mount /")
    return libc


def _check(code: int, what: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
