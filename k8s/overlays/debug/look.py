"""What a pod sees: the launcher's variables, whom names lead to, devices, memory, where it may write. Ends with 0."""

import os
import re
import socket
import time
from pathlib import Path

# Only what launchers set: an environment may hold secrets, and logs are read by many
OURS = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|PET_|JOB_COMPLETION_INDEX$|NCCL_|GLOO_|CUDA_VISIBLE)")
WAIT_S = 60.0  # the Services come up after the pods


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


def main() -> None:
    print(f"host {socket.gethostname()}, user {os.getuid()}:{os.getgid()}, {os.cpu_count()} CPUs")
    for name in sorted(filter(OURS.match, os.environ)):
        print(f"{name}={os.environ[name]}")
    for limit in ("memory.max", "cpu.max"):
        path = Path("/sys/fs/cgroup") / limit
        print(f"{limit}: {path.read_text().strip() if path.exists() else 'unknown'}")
    for name in filter(None, {socket.gethostname(), os.environ.get("MASTER_ADDR", "")}):
        print(f"{name}: {resolve(name)}")
    for folder in ("/", "/app/runs", "/tmp", "/dev/shm"):
        disk = os.statvfs(folder)
        writable = "writable" if os.access(folder, os.W_OK) else "read-only"
        print(f"{folder}: {writable}, {disk.f_bavail * disk.f_frsize >> 20} MiB free")
    import torch

    print(f"torch {torch.__version__}, CUDA devices: {torch.cuda.device_count()}")
    for index in range(torch.cuda.device_count()):
        print(f"  {index}: {torch.cuda.get_device_name(index)}")


if __name__ == "__main__":
    main()
