"""Whether this container's training makes progress. Each rank writes a file; this file, run by itself, reads them.

    python -I train/process/health.py    # one line; 0: every rank here makes progress, 1: one hangs or none has started

It only reports: the program's own deadlines end a hang. It imports neither torch nor this package, as a health check
runs every few seconds beside the training. Times are of the monotonic clock, which all containers of a machine share.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT_S = 2.0
# A process that has written nothing for this long is stopped or frozen, or a call of it holds the interpreter's lock.
SILENT_S = 10.0
# No step of a healthy job takes this long, and its deadline is far later. RANKUP_HEALTHY_STEP_S sets another.
HEALTHY_STEP_S = 60.0


def report(rank: int, state: Callable[[], dict[str, Any]], ended: threading.Event) -> None:
    """Keep `$RANKUP_HEALTH_DIR/rank-N.json` up to date until `ended` is set; do nothing without that variable.

    `state`: returns phase, step, entered_s, timeout_s and waiting; it is called by a thread of this function.
    """
    folder = os.environ.get("RANKUP_HEALTH_DIR")
    if not folder:
        return
    # Not at the top: the health check runs this file by itself, without the package
    from rankup.places.files import write_atomically

    path = Path(folder) / f"rank-{rank}.json"

    def write() -> None:
        while True:
            with contextlib.suppress(OSError):
                write_atomically(path, json.dumps({"pid": os.getpid(), "written_s": time.monotonic(), **state()}))
            if ended.wait(REPORT_S):
                break

    threading.Thread(target=write, name="health", daemon=True).start()


def judge(folder: Path, *, healthy_step_s: float) -> tuple[bool, str]:
    """Whether every rank that reports to `folder` makes progress, and one line that says where each stands."""
    verdicts = [_judge_rank(path, healthy_step_s) for path in sorted(folder.glob("rank-*.json"))]
    if not verdicts:
        return False, f"no rank has reported to {folder}"
    return all(good for good, _ in verdicts), "; ".join(text for _, text in verdicts)


def _judge_rank(path: Path, healthy_step_s: float) -> tuple[bool, str]:
    rank, state, now_s = path.stem.replace("-", " "), json.loads(path.read_text()), time.monotonic()
    silent_s, lasted_s = now_s - state["written_s"], now_s - state["entered_s"]
    limit_s = min(state["timeout_s"], healthy_step_s) if state["phase"] == "step" else state["timeout_s"]
    where = f"{rank}: {state['phase']} (step {state['step']}) for {lasted_s:.0f} s"
    if silent_s > SILENT_S:
        return False, f"{where}, no sign of life for {silent_s:.0f} s: stopped or frozen"
    if state["timeout_s"] > 0 and lasted_s > limit_s:
        return False, f"{where}, {'waiting for another rank' if state['waiting'] else 'hung'}"
    return True, where


if __name__ == "__main__":
    folder = Path(os.environ.get("RANKUP_HEALTH_DIR", "/tmp/rankup-health"))
    healthy, line = judge(folder, healthy_step_s=float(os.environ.get("RANKUP_HEALTHY_STEP_S", HEALTHY_STEP_S)))
    print(line)
    sys.exit(not healthy)
