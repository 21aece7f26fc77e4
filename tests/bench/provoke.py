"""Records the logs in tests/commands/logs: what torch says when a job fails. CPU, gloo, one machine.

    python tests/bench/provoke.py [CASE...]     # each takes seconds; by default all

A case is a small job of plain torch (not of this program), started with the five variables or by torchrun.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOGS = Path(__file__).resolve().parents[1] / "commands" / "logs"
TIMEOUT_S = 4
# case -> what the ranks do, the variables of each rank, or "torchrun"
CASES: dict[str, tuple[str, list[dict[str, object]] | str]] = {
    "world-size-too-big": ("sum", [{"RANK": 0, "WORLD_SIZE": 2}]),
    "no-such-name": ("sum", [{"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "no-such-host.example"}]),
    "nobody-listens": ("sum", [{"RANK": 1, "WORLD_SIZE": 2}]),
    "port-taken": ("sum", [{"RANK": 0, "WORLD_SIZE": 2, "taken": True}]),
    "duplicate-rank": ("sum", [{"RANK": rank, "WORLD_SIZE": 3} for rank in (0, 1, 1)]),
    "no-rank-variable": ("sum", [{"WORLD_SIZE": 2}]),
    "no-such-interface": ("sum", [{"RANK": rank, "WORLD_SIZE": 2, "GLOO_SOCKET_IFNAME": "eth9"} for rank in (0, 1)]),
    "killed-in-all-reduce": ("kill", "torchrun"),
    "exception-on-one-rank": ("raise", "torchrun"),
    "slow-rank": ("slow", [{"RANK": rank, "WORLD_SIZE": 2} for rank in (0, 1)]),
    "monitored-barrier": ("barrier", [{"RANK": rank, "WORLD_SIZE": 2} for rank in (0, 1)]),
    "models-differ": ("shapes", [{"RANK": rank, "WORLD_SIZE": 2} for rank in (0, 1)]),
    "nccl-without-gpu": ("nccl", [{"RANK": 0, "WORLD_SIZE": 1}]),
    "host-memory": ("memory", [{}]),
    "weights-only": ("weights", [{}]),
    "truncated-checkpoint": ("truncated", [{}]),
    "empty-checkpoint": ("empty", [{}]),
    "local-rank-flag": ("flag", [{}]),
    "no-user-name": ("user", [{}]),
    "healthy": ("sum", "torchrun"),
}


def record(case: str) -> None:
    what, ranks = CASES[case]
    port = 20000 + os.getpid() % 4000 + list(CASES).index(case)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(Path(__file__).read_text())
        clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LD_LIBRARY_PATH")}
        clean["OMP_NUM_THREADS"] = "1"
        if case == "healthy":  # with everything that a successful job may print
            clean = {k: v for k, v in clean.items() if k != "OMP_NUM_THREADS"} | {"TORCH_CPP_LOG_LEVEL": "INFO"}
        clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        line = ["--local-rank=0"] if what == "flag" else ["--do", what]
        listener = None
        if isinstance(ranks, str):
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
            commands = [([sys.executable, *torchrun, "job.py", *line], clean)]
        else:
            if any(rank.get("taken") for rank in ranks):
                listener = subprocess.Popen([sys.executable, "-m", "http.server", str(port)], stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL, cwd=folder)
                time.sleep(2)
            command = [sys.executable, "job.py", *line]
            commands = [(command, clean | {k: str(v) for k, v in rank.items()}) for rank in ranks]
        started = [
            subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command, env in commands
        ]
        text = "".join(process.communicate(timeout=120)[0] for process in started)
        if listener is not None:
            listener.kill()
            listener.wait()
    for path, short in ((folder, "/job"), (sys.prefix, "/venv"), (sys.base_prefix, "/python")):
        text = text.replace(path, short)
    # Frames inside torch's libraries name nothing that a reader could use
    kept = [line for line in text.splitlines() if not line.startswith("frame #")]
    (LOGS / f"{case}.log").write_text("\n".join([*kept, ""]))


def job(what: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    if what == "user":
        import getpass

        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(name, None)
        os.setuid(12345)
        getpass.getuser()
    if what in ("weights", "truncated", "empty"):
        path = Path("checkpoint.pt")
        torch.save({"args": argparse.Namespace(lr=0.1), "weight": torch.zeros(1000)}, path)
        if what != "weights":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if what == "truncated" else b"")
        torch.load(path)
    if what == "memory":
        torch.empty(10**15)
    dist.init_process_group("nccl" if what == "nccl" else "gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    if what == "shapes":
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3 + rank))
    if what == "barrier":
        if rank == 1:
            time.sleep(2 * TIMEOUT_S)
            return
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=TIMEOUT_S / 2))
    for step in range(20):
        if step == 5 and rank == 1:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raise":
                raise KeyError("image_17")
            if what == "slow":
                time.sleep(2 * TIMEOUT_S)
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


if __name__ == "__main__":
    if Path(__file__).name == "job.py":
        parser = argparse.ArgumentParser()
        parser.add_argument("--do", default="")
        parser.add_argument("--local_rank")
        job(parser.parse_args().do)
    else:
        for name in sys.argv[1:] or CASES:
            print(name, flush=True)
            record(name)
