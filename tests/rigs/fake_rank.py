"""Ranks that do as they are told, in milliseconds: what a supervisor forks in the place of train/main.py.

FAKE_RANKS is JSON: for each incarnation of a rank (the last one counts for later ones too) a word for each rank, such
as "exit 171", "signal SIGKILL", "finish" (with a status.json), "save" (waits for SIGTERM, then exit 143, or "save
171"), "stubborn" (ignores SIGTERM), "stop", "parent" (starts a process, and leaves an orphan that ends at once). "step
5, exit 171" reports a finished step first. FAKE_FOLDER gets one file for each start, with what the rank was given.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from train.process import local_launcher, supervisor
from train.process.progress import StepReporter
from train.process.stop import SIGNALS, StopRequest


def use() -> None:
    """To be called first in the process of `launch`."""
    supervisor.ENTRY = "tests.rigs.fake_rank:be"
    local_launcher.slow_modules = lambda config, command: []


def use_impatiently() -> None:
    supervisor.SETTLE_S = 0.5
    use()


def use_pipe() -> None:
    """What `launch` and its ranks print goes to a pipe that the test reads, or does not."""
    pipe = os.open(f"{os.environ['FAKE_FOLDER']}/pipe", os.O_WRONLY)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    use()


def use_settled() -> None:
    """Long enough that only what is tested ends a rank."""
    supervisor.SETTLE_S = 100.0
    supervisor.STOPPED_S = 0.3
    supervisor.TICK_S = 0.1
    use()


def use_slow_server() -> None:
    """The first one starts at once, a later one imports for a long time."""
    use()
    lists = iter([[], ["tests.rigs.slow_library"]])
    usual = supervisor.ForkServer
    supervisor.ForkServer = lambda start_method, _, *rest: usual(start_method, next(lists), *rest)


def use_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    use()


def be(stop: StopRequest) -> None:
    for name in SIGNALS:  # the stop request would leave before the fake does what it was told
        signal.signal(getattr(signal, name), lambda *_: None)
    signal.set_wakeup_fd(-1)
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("RANK", "LOCAL_", "WORLD", "MASTER", "GROUP"))
    }
    rank, restart = int(given.get("LOCAL_RANK", 0)), int(given["RANKUP_RESTART"])
    folder = Path(os.environ["FAKE_FOLDER"])
    aside = folder / f"aside-{restart}-{rank}.json"  # whoever reads, and whoever is killed here, leaves no half of it
    aside.write_text(json.dumps({**given, "arguments": sys.argv[1:], "pid": os.getpid()}))
    aside.rename(folder / f"start-{restart}-{rank}.json")
    plan = json.loads(os.environ["FAKE_RANKS"])
    words = plan[min(restart, len(plan) - 1)][rank]
    if words.startswith("step "):
        step, _, words = words.removeprefix("step ").partition(", ")
        StepReporter(given["RANKUP_PROGRESS"]).report(int(step))
    word, _, what = words.partition(" ")
    if word == "exit":
        os._exit(int(what))
    if word == "signal":
        os.kill(os.getpid(), getattr(signal, what))
    if word == "finish":
        status = {"attempt": given["RANKUP_ATTEMPT"], "state": "finished"}
        (folder / "run" / "status.json").write_text(json.dumps(status))
        os._exit(0)
    if word == "save":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(int(what or 143)))
    if word == "parent":
        child = subprocess.Popen(["sleep", "300"])
        orphan = subprocess.check_output(["sh", "-c", "sleep 0.2 > /dev/null & echo $!"], text=True)
        (folder / f"children-{restart}-{rank}.json").write_text(json.dumps([child.pid, int(orphan)]))
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"ready-{restart}-{rank}").touch()
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(300)
