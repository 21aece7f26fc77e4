"""A workload that writes down what a process found when it began: a forked rank must find what a fresh one finds."""

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from train.config import Config
from train.process import local_launcher
from train.workloads import Workload, images

# What differs from one start to the next, and names that only say how it was started
OWN = ("RANKUP_", "RANK", "MASTER_", "PWD", "OLDPWD", "_")


def build(config: Config) -> Workload:
    facts = {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(OWN)},
        "path": sys.path, "argv": [word for word in sys.argv if not word.startswith("--options")],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel": torch.__config__.parallel_info(),
        "cpu": torch.backends.cpu.get_cpu_capability(), "dtype": str(torch.get_default_dtype()),
        "warnings": [str(entry) for entry in warnings.filters], "gc": [gc.isenabled(), *gc.get_threshold()],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP)],
        "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
    }
    Path(config.options["facts"]).with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(facts))
    return images.build(config)


def read(path: Path, rank: int) -> dict[str, Any]:
    return json.loads(path.with_suffix(f".{rank}").read_text())  # type: ignore[no-any-return]


def use_a_thread() -> None:
    """To be called first in the process of `launch`: let the fork server import this module as `threaded`."""
    usual = local_launcher.slow_modules
    local_launcher.slow_modules = lambda config, command: [*usual(config, command), "tests.rigs.threaded"]


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), name="a-library", daemon=True).start()
