"""Ranks that do as they are told, in milliseconds: what `launch` starts in the place of train/main.py.

FAKE_RANKS is JSON: for each incarnation (the last one counts for later ones too) a word for each rank, such as "exit
171", "signal SIGKILL", "finish" (with a status.json), "save" (waits for SIGTERM, then exit 143, or "save 171"),
"stubborn" (ignores SIGTERM), "stop". FAKE_FOLDER gets one file for each start, with what the rank was given.
"""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path


def use() -> None:
    """To be called first in the process of `launch`."""
    fake = Path(os.environ["FAKE_FOLDER"]) / "python"
    fake.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).read_text())
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    sys.executable = str(fake)


def use_impatiently() -> None:
    from train.process import local_launcher

    local_launcher.SETTLE_S = 0.5
    use()


def use_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    use()


def be() -> None:
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("RANK", "LOCAL_", "WORLD", "MASTER", "GROUP"))
    }
    rank, restart = int(given["LOCAL_RANK"]), int(given["RANKUP_RESTART"])
    folder = Path(os.environ["FAKE_FOLDER"])
    aside = folder / f"aside-{restart}-{rank}.json"  # whoever reads, and whoever is killed here, leaves no half of it
    aside.write_text(json.dumps({**given, "arguments": sys.argv[1:], "pid": os.getpid()}))
    aside.rename(folder / f"start-{restart}-{rank}.json")
    plan = json.loads(os.environ["FAKE_RANKS"])
    word, _, what = plan[min(restart, len(plan) - 1)][rank].partition(" ")
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
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"ready-{restart}-{rank}").touch()
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)


if __name__ == "__main__":
    be()
