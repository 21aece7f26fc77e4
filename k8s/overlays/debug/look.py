"""Print what a pod sees: the launcher's variables, names, the master's port, devices, memory, folders. End with 0."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

# Only what launchers set: an environment may hold secrets, and logs are read by many
OURS = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|PET_|JOB_COMPLETION_INDEX$|NCCL_|GLOO_|CUDA_VISIBLE)")
WAIT_S = 180.0  # the Services start after the pods, and a node may have to pull the image


def resolve(name: str, *, wait_s: float = WAIT_S) -> str:
    """The addresses of a name, as soon as it has any."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return " ".join(sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)}))
        except OSError as error:
            if time.monotonic() > until_s:
                return f"does not resolve after {wait_s:g} s: {error}"
            time.sleep(1)


def meet(environ: Mapping[str, str], *, wait_s: float = WAIT_S) -> str:
    """Whether the master's port is reached, as one line.

    Rank 0 listens there until all others have come: the job ends with it, and would end Workers whose init container
    still looks for its name.
    """
    address, port = environ.get("MASTER_ADDR"), int(environ.get("MASTER_PORT", "0"))
    others = int(environ.get("PET_NNODES", "1").split(":")[0]) - 1
    if not address or not port:
        return "no MASTER_ADDR and MASTER_PORT"
    until_s = time.monotonic() + wait_s
    if environ.get("RANK", "0") == "0":
        met: set[str] = set()
        with socket.create_server(("", port)) as server:
            while len(met) < others and (left_s := until_s - time.monotonic()) > 0:
                server.settimeout(left_s)
                with contextlib.suppress(TimeoutError):
                    connection, peer = server.accept()
                    connection.close()
                    met.add(peer[0])
        return f"port {port}: reached by {len(met)} of {others} other pods ({' '.join(sorted(met)) or 'none'})"
    while True:
        try:
            socket.create_connection((address, port), timeout=2).close()
            return f"{address}:{port} is reached"
        except OSError as error:
            if time.monotonic() > until_s:
                return f"{address}:{port} is not reached after {wait_s:g} s: {error}"
            time.sleep(0.5)


def limits(root: Path = Path("/")) -> list[str]:
    """What the container may use, by its control groups, which are of version 1 on older nodes and of version 2."""
    from train.process.limits import cpu_quota, memory_limit

    memory, cpus = memory_limit(root), cpu_quota(root)
    return [
        f"memory limit: {'none' if memory is None else f'{memory >> 20} MiB'}",
        f"CPUs to use: {'all' if cpus is None else f'{cpus:g}'}",
    ]


def main() -> None:
    print(f"host {socket.gethostname()}, user {os.getuid()}:{os.getgid()}, {os.cpu_count()} CPUs")
    for name in sorted(filter(OURS.match, os.environ)):
        print(f"{name}={os.environ[name]}")
    print("\n".join(limits()))
    for name in filter(None, {socket.gethostname(), os.environ.get("MASTER_ADDR", "")}):
        print(f"{name}: {resolve(name)}")
    for folder in ("/", "/app/runs", "/tmp", "/dev/shm"):
        disk = os.statvfs(folder)
        writable = "writable" if os.access(folder, os.W_OK) else "read-only"
        print(f"{folder}: {writable}, {disk.f_bavail * disk.f_frsize >> 20} MiB free")
    print(meet(os.environ), flush=True)
    import torch

    print(f"torch {torch.__version__}, CUDA devices: {torch.cuda.device_count()}")
    for index in range(torch.cuda.device_count()):
        print(f"  {index}: {torch.cuda.get_device_name(index)}")


if __name__ == "__main__":
    main()
