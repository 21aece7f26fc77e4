"""A task of a Slurm step that `rankup launch` runs: it starts its agent again, and writes notes for the batch script.
Also the few commands of Slurm that both need. No torch here."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankup.agent.logs import host_name
from rankup.agent.processes import die_with_parent
from rankup.errors import STOPPED

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def restart_if_killed(agent: Callable[[], int], *, max_restarts: int) -> int:
    """Run `agent` in a child of this task of a step, and start it again if it was killed or gave up. Returns its exit
    code; the child returns too. All agents of a job end with the same code. They wait for one that was killed, and if
    all of them gave up, they meet again."""
    stopped, this = list[int](), os.getpid()
    for number in SIGNALS:  # Slurm signals every process of a step. The agent acts on it, and this process waits
        signal.signal(number, lambda number, _: stopped.append(number))
    name = Path("/proc/self/comm")  # for `ps`; without a space, which Slurm's proctrack/linuxproc can't read
    name.write_text("rankup-task")
    for restart in itertools.count(1):
        if (child := os.fork()) == 0:
            name.write_text("rankup-agent")
            die_with_parent(this)
            for number in SIGNALS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            return agent()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        killed, code = code < 0, code if code >= 0 else 128 - code
        if code < 128 or code == STOPPED or restart > max_restarts or stopped:
            break
        say(f"the agent on {host_name()} ended with {code}, restarted ({restart} of {max_restarts})")
    if code >= 128:
        if killed:
            note("failed", os.environ.get("SLURMD_NODENAME", ""))
    elif note("code", str(code)):
        _release()
    return code


def note_cause(text: str) -> None:
    """Note the node in the verdict of agents that gave up, such as "rank 1 on node1 ended with 137"."""
    if found := re.match(r"rank \d+ on (\S+) ended with", text):
        note("failed", found[1])


def note(kind: str, text: str) -> bool:
    """Tell the batch script the exit code of an agent, the node that made the agents give up, or the command and the
    run of `rankup.init(on_end=)`. Returns whether a batch script waits for it."""
    mark = Path(f".slurm-{os.environ.get('SLURM_JOB_ID')}")
    if waits := mark.exists():
        with suppress(OSError), mark.open("a") as file:  # a full disk must not change the code
            file.write(f"{kind} {text}\n")
    return waits


def _release() -> None:
    """Requeue a job that has finished and has lost its first node. It has no batch script, would hold its other nodes
    to the time limit, and ends at once if it is requeued."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    shown = fields(scontrol("show", "job", job_id))
    if shown.get("BatchHost") and shown["BatchHost"] not in scontrol("show", "hostnames", shown["NodeList"]).split():
        subprocess.run(["scontrol", "requeue", job_id], check=False)


# Commands -------------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def fields(shown: str) -> dict[str, str]:
    """Return the fields in scontrol's description of a job."""
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def scontrol(*words: str) -> str:
    """Return scontrol's output, or "" if it fails or does not exist."""
    with suppress(OSError):
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False).stdout
    return ""
