"""A scripted Slurm: small programs named srun, scontrol and scancel, which record each call and answer from a file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.rigs.containers import clean_environment
from tests.rigs.jobs import ROOT

NODES = ("big7", "big8", "big9")
# What sbatch sets in the batch script of a job of three nodes
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "big[7-9]", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),2", "SLURM_TASKS_PER_NODE": "16(x2),2", "SLURM_JOB_PARTITION": "gpu",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}
# `answers.json` has what each program does. Ends of steps are used one after another
ANSWERS: dict[str, Any] = {
    "look": {},  # of the first step: up (nodes), blind (nodes that lack all files), gpus (node -> number), hangs,
    # code, says, label
    "codes": [],  # of the steps of agents; "waits" ends with 143 after SIGUSR1
    "silent": 0,  # how often scontrol knows nothing of the job
    "writes": {},  # the files that the agents write, by name
    "job": "Restarts=0 JobState=RUNNING BatchFlag=1 ExcNodeList=(null)", "nodes": 30, "requeue": 0, "update": 0,
}
SLURM = f"""#!{sys.executable} -SE
import json, os, pathlib, signal, subprocess, sys, time
name, words, stub = os.path.basename(sys.argv[0]), sys.argv[1:], pathlib.Path(os.environ["STUB"])
answers = json.loads((stub / "answers.json").read_text())
nodes = {NODES!r}

def note(file, entry):
    with (stub / file).open("a") as lines:
        lines.write(json.dumps(entry) + chr(10))

def look():
    wanted = answers["look"]
    (stub / "looking").touch()
    note("look", words[:words.index("sh")])
    while wanted.get("hangs") and not (stub / "go").exists():
        time.sleep(0.02)
    at = words.index("sh")
    for node in wanted.get("up", nodes):
        paths = [word + ".not" * (node in wanted.get("blind", ())) for word in words[at + 4:]]
        env = dict(os.environ, SLURMD_NODENAME=node, SLURM_GPUS_ON_NODE=str(wanted.get("gpus", {{}}).get(node, "")))
        said = subprocess.run([*words[at:at + 4], *paths], env=env, stdout=subprocess.PIPE, text=True).stdout
        for line in said.splitlines():
            print("1: " * ("label" in wanted) + line, flush=True)
    if "says" in wanted:
        print(wanted["says"], file=sys.stderr)
    sys.exit(wanted.get("code", 0))

if name == "srun" and "sh" in words:
    look()
elif name == "srun":
    before = (stub / "steps").read_text().count(chr(10)) if (stub / "steps").exists() else 0
    note("steps", {{"words": words, "env": dict(os.environ)}})
    for file, text in answers["writes"].items():
        pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(file).write_text(text)
    code = answers["codes"][before]
    if code == "waits":
        note("signals", signal.sigwait([signal.SIGUSR1, signal.SIGTERM]).name)
        code = 143
    sys.exit(code)
else:
    note("control", [name, *words])
    if words[:2] == ["show", "hostnames"]:
        print(*(nodes if words[2] == "big[7-9]" else words[2].split(",")), sep=chr(10))
    elif words[:2] == ["show", "job"]:
        asked = sum(json.loads(line)[1:3] == ["show", "job"] for line in (stub / "control").read_text().splitlines())
        print("JobId=7 JobName=x " + answers["job"] if asked > answers["silent"] else "")
    elif words[:2] == ["show", "partition"]:
        print("PartitionName=gpu TotalCPUs=99 TotalNodes=" + str(answers["nodes"]))
    elif words[0] in ("requeue", "update"):
        sys.exit(answers[words[0]])
"""


class Scripted:
    """`rankup launch` in `folder`, in the batch script of a scripted Slurm."""

    def __init__(self, folder: Path, *codes: int | str, answers: dict[str, Any] | None = None, **env: str) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "slurm-7"
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "scancel"):
            (folder / "bin" / name).write_text(SLURM)
            (folder / "bin" / name).chmod(0o755)
        (folder / "answers.json").write_text(json.dumps({**ANSWERS, **(answers or {}), "codes": codes}))
        (folder / "train.py").write_text("print('trained')\n")
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        clean = {name: text for name, text in clean_environment().items() if name != "OMP_NUM_THREADS"}
        self.env = {**clean, "PYTHONPATH": str(ROOT), "PATH": path, "STUB": str(folder), **BATCH, **env}

    def at(self, step: int) -> None:
        """Give the run a checkpoint of this step."""
        (self.run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)

    def writes(self, files: dict[str, str]) -> None:
        """Make the agents write these files."""
        path = self.folder / "answers.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "writes": files}))

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rankup", "launch", *(words or ("train.py",))]
        output = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, cwd=self.folder, stderr=output, stdout=output, text=True)

    def launch(self, *words: str) -> tuple[int, str]:
        """Run `rankup launch WORDS`. Returns its exit code and what it printed."""
        return self.end(self.start(*words))

    @staticmethod
    def end(process: subprocess.Popen[str], number: signal.Signals | None = None) -> tuple[int, str]:
        if number is not None:
            process.send_signal(number)
        printed = "".join(process.communicate(timeout=240))
        assert "Traceback" not in printed
        return process.returncode, printed

    def lines(self, name: str) -> list[Any]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[str]:
        """Return the command line of each step of agents, without what depends on this machine."""
        shown = (" ".join(step["words"]) for step in self.lines("steps"))
        return [line.replace(sys.executable, "python").replace(str(self.folder), "HERE") for line in shown]

    def asked(self, *first: str) -> list[str]:
        """Return the calls of scontrol or scancel that begin with these words, without them."""
        count = len(first)
        return [" ".join(words[count:]) for words in self.lines("control") if words[:count] == [*first]]

    def requeued(self) -> list[str]:
        return self.asked("scontrol", "requeue")
