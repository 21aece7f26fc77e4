"""`launch`: `rankup launch`, with what this program knows of faults, stacks and machines. No torch here."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rankup import cli
from rankup.agent.logs import host_name
from rankup.agent.script import Script
from rankup.agent.status import tell_platform
from rankup.doctor.report import CODES, VERDICTS, WARNING
from rankup.errors import FINISHED

MAIN = Path(__file__).parents[1] / "main.py"


def launch(words: Sequence[str]) -> int:
    """Be the agent of this node. Returns the exit code."""
    return cli.launch(words, preflight=_preflight)


def _preflight(script: Script, run_dir: str) -> int:
    """The doctor's exit code for this machine where it is not fit to train, else 0.

    Alone, without the other machines: a container that is replaced in the middle of a training finds the others at
    work, not at their doctor. Whether the machines reach each other is checked when they meet.
    """
    words = [sys.executable, str(MAIN), "doctor", "--alone", "--run-dir", run_dir]
    own = [*script.words[2 if script.words[0] == "-m" else 1 :], "--"]
    of_training = own[0] == "train" or own[0].startswith("-")
    if of_training and script.file is not None and script.file.resolve() == MAIN.resolve():
        words += own[own[0] == "train" : -1]  # its settings, which say where it writes and reads
    code = subprocess.run(words, env={**os.environ, "RANKUP_PARENT": str(os.getpid())}, check=False).returncode
    if code in (FINISHED, CODES[WARNING]):
        return FINISHED
    code = code if code >= 0 else 128 - code
    why = f"preflight on {host_name()}: {VERDICTS.get(code, 'the doctor itself failed')}. No rank was started"
    print(f"{why} (exit code {code})", file=sys.stderr)
    tell_platform(why, code)
    return code
