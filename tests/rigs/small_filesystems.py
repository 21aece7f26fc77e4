"""Small file systems that only a test sees, in a mount namespace. They need root, or permitted user namespaces."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Mount a file system of that size over `folder`, in the namespace of a separate process.

    Yields its path from outside, through /proc of that process, and a function that changes its size. Sizes are written
    as for mount: 3m."""
    folder.mkdir()
    with subprocess.Popen(
        [*UNSHARE, "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None

        def mount(how: str) -> None:
            print(f"mount {how} {folder} && echo done || echo failed", file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "done\n", how  # type: ignore[union-attr]

        try:
            mount(f"-t tmpfs -o size={size} none")
            yield Path(f"/proc/{holder.pid}/root{folder}"), lambda size: mount(f"-o remount,size={size}")
        finally:
            holder.kill()


def own_tmpfs(where: str, size: str) -> None:
    """Mount a tmpfs that only this process sees. The process must have only one thread, as after a fork."""
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", where)


def own_folder(where: str, folder: Path) -> None:
    """Let only this process see `folder` at the path `where`, under the same condition as for `own_tmpfs`."""
    _mount("--bind", str(folder), where)


def _mount(*words: str) -> None:
    new_mounts, new_user, libc = 0x20000, 0x10000000, ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(new_mounts | (0 if user == 0 else new_user)) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for command in (["mount", "--make-rprivate", "/"], ["mount", *words]):
        subprocess.run(command, check=True)
