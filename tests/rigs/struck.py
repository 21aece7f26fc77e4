"""`python tests/rigs/struck.py SCRIPT WORDS` runs a user's script, with a fault at the N-th step of an optimizer.

STRIKE in the environment is JSON: {"rank": -1 for all, "call": N, "delay_s": strike this much later, "signal":
"SIGKILL", "in": "fsync" to strike when a file is next written, "hold_s": sleep in this step and each later one,
"marker": a file that is written just before}. If the marker exists, nothing happens. Without STRIKE nothing changes."""

import itertools
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

import rankup  # noqa: F401  # for `launch`, which forks the ranks of a script that imports it
from rankup.agent.processes import be_python

STRIKE = json.loads(os.environ.get("STRIKE", "{}"))
CALLS = itertools.count(1)


def run(script: str) -> None:
    if STRIKE and not Path(STRIKE["marker"]).exists():
        register_optimizer_step_pre_hook(_strike)
    runpy.run_path(script, run_name="__main__")


def by_fork() -> NoReturn:
    """Preload of a process of tests/rigs/fork_server.py, which then runs `python tests/rigs/struck.py WORDS`."""
    be_python([__file__, *sys.argv[1:]])


def _strike(*_: Any) -> None:
    call = next(CALLS)
    if call < STRIKE["call"]:
        return
    if call == STRIKE["call"] and STRIKE.get("signal") and STRIKE["rank"] in (-1, int(os.environ["RANK"])):
        delay_s = STRIKE.get("delay_s", 0.0)
        if "in" in STRIKE:
            setattr(os, STRIKE["in"], lambda *_: _now())
        else:
            threading.Timer(delay_s, _now).start() if delay_s else _now()
    time.sleep(STRIKE.get("hold_s", 0.0))


def _now() -> None:
    Path(STRIKE["marker"]).touch()
    os.kill(os.getpid(), getattr(signal, STRIKE["signal"]))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(sys.argv[0])
