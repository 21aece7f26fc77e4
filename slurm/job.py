# One start of a Slurm job, for supervise.py: what it has, the steps that it runs, the signals that it gets.
# Run: sbatch slurm/ddp.sbatch
# Edit: nothing.
"""What supervise.py knows of Slurm. In any Python from 3.8 on, and with the standard library only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rankup.env.addresses import ephemeral_range, port_for
from rankup.errors import STOPPED, USER_MISTAKE

ROOT = Path(__file__).resolve().parents[1]
TASK = str(ROOT / "slurm" / "task.sh")
PATIENCE_S = 60  # after the first process has ended well, the others have this long
# What task.sh adds to a code that explains the others: srun returns the highest code of all tasks
LIFTED_FAULT, LIFTED_SIGNAL = 200, 50  # from 1 on, and from 129 to 142


def say(text: str) -> None:
    # Not print: a signal handler may interrupt a print, and Python refuses a second one inside the first
    os.write(2, f"slurm: {text}\n".encode())


def fail(text: str) -> NoReturn:
    """End this process: the user's mistake."""
    say(text)
    sys.exit(USER_MISTAKE)


def number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        fail(f"{name} must be a whole number, got {env[name]!r}")
    return int(env[name])


def job_name(env: Mapping[str, str]) -> str:
    """What Slurm calls the job, or the one task of an array: the id of its last task is the whole array's too."""
    array = env.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{env['SLURM_ARRAY_TASK_ID']}" if array else env["SLURM_JOB_ID"]


class Job:
    """This start of this Slurm job: what it has, the steps that it runs, and the signals that it gets."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.id = number(env, "SLURM_JOB_ID")
        self.name = job_name(env)
        self.num_requeues = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.nproc = int(env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_NTASKS_PER_NODE") or 1)
        cpus = int(env.get("SLURM_CPUS_ON_NODE") or 1)
        self.overcommit = []
        if cpus < self.nproc:
            say(f"{self.nproc} processes share {cpus} CPUs on each node: ask for more with --cpus-per-task")
            self.overcommit = ["--overcommit"]
        # srun would read these options of the whole job, but they mean something else in a step
        of_job = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"}
        cpus_each = str(max(1, cpus // self.nproc))
        self.env = {
            **{name: value for name, value in env.items() if name not in of_job},
            "RANKUP": str(ROOT), "NPROC": str(self.nproc), "OMP_NUM_THREADS": cpus_each,
            "SRUN_CPUS_PER_TASK": cpus_each,
        }
        self._take_nodes(env["SLURM_JOB_NODELIST"])
        self.step: subprocess.Popen[str] | None = None  # the ranks, which a signal has to reach
        self.stopping = False  # somebody asked the job to save and leave
        self.ending = False  # Slurm itself ends this start: no restart and no requeue by us
        # USR2 for sites where USR1 means something else: then --signal=B:USR2@120
        signal.signal(signal.SIGUSR1, self._on_warning)
        signal.signal(signal.SIGUSR2, self._on_warning)
        signal.signal(signal.SIGTERM, self._on_end)  # scancel, the time limit, or a requeue

    def _take_nodes(self, nodes: str) -> None:
        """These nodes are the job's, as Slurm lists them: "node[0-3]"."""
        self.hosts = output("scontrol", "show", "hostnames", nodes).split()
        if not self.hosts:
            fail(f'scontrol can\'t read the node list "{nodes}": EDIT what sets SLURM_JOB_NODELIST')
        self.nodes, self.num_nodes, self.env["MASTER_ADDR"] = nodes, len(self.hosts), self.hosts[0]

    def look_at_nodes(self) -> None:
        """Go on with the nodes that are left: Slurm takes a lost one away from a job with --no-kill."""
        listed = re.search(r"\sNodeList=(\S+)", output("scontrol", "show", "job", self.name))
        if listed and listed[1] != self.nodes:
            say(f"of {self.nodes} this job has {listed[1]} left: going on there")
            self._take_nodes(listed[1])

    def _on_warning(self, signum: int, frame: FrameType | None) -> None:
        say("the time is almost up, or a signal says so: saving, then requeued")
        self._stop()

    def _on_end(self, signum: int, frame: FrameType | None) -> None:
        self.ending = True
        self._stop()

    def _stop(self) -> None:
        self.stopping = True
        if self.step is not None:
            self.step.send_signal(signal.SIGUSR1)  # srun passes it on to every task

    def container(self) -> list[str]:
        """srun's options for pyxis. An apptainer image is started by each task instead."""
        image, here = self.env["IMAGE"], os.getcwd()
        if not image or image.endswith(".sif"):
            return []
        mounts = [f"{ROOT}:{ROOT}", f"{here}:{here}", *(["/tmp:/tmp"] if self.env["DATA"] else [])]
        return [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={here}"]

    def srun(self, processes: int, words: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a step with so many processes on each node. `more` is for subprocess.Popen."""
        options = [
            f"--nodes={self.num_nodes}", f"--ntasks={processes * self.num_nodes}", f"--ntasks-per-node={processes}",
            "--kill-on-bad-exit=1", f"--wait={PATIENCE_S}",
        ]
        more = {"env": self.env, **more}
        return subprocess.Popen(["srun", *options, *words], stdin=subprocess.DEVNULL, text=True, **more)

    def run_ranks(self, words: Sequence[str], *, attempt: str, port: int, launcher: str = "tasks") -> int:
        """Run `words` of train.main on all ranks, and return the exit code: a mistake or a fault of any rank first."""
        env = {**self.env, "LAUNCHER": launcher, "MASTER_PORT": str(port), "RANKUP_ATTEMPT": attempt}
        processes = 1 if launcher == "torchrun" else self.nproc
        self.step = self.srun(processes, [*self.overcommit, *self.container(), TASK, *words], env=env)
        if self.stopping:
            self._stop()  # a signal came while the step was being started
        code = shell_code(self.step.wait())
        self.step = None
        if code > LIFTED_FAULT:
            return code - LIFTED_FAULT
        return code - LIFTED_SIGNAL if 128 < code - LIFTED_SIGNAL < STOPPED else code

    def port(self, attempt: int = 0, *, step: int = 0) -> int:
        """The port of one attempt: another job on these nodes, or an earlier attempt, may still hold its own."""
        return port_for(self.id, restart=attempt, step=step, ephemeral=ephemeral_range())

    def is_ours(self) -> bool:
        """Whether Slurm still runs this start of the job. This process lives on when its node's slurmd has died, but
        Slurm starts the job anew on another node then."""
        asked = subprocess.run(["scontrol", "show", "job", self.name], stdout=subprocess.PIPE, text=True)
        current = re.search(rf"Restarts={self.num_requeues}\s", asked.stdout)
        return asked.returncode == 0 and current is not None and "JobState=RUNNING" in asked.stdout

    def requeue(
        self, code: int, where: str = "", *, run: str = "RUN", queued: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Have Slurm start the job anew, if it may, and end this process with `code`.

        `queued`: is called once the job waits for its next start, before Slurm ends this one.
        """
        most = number(self.env, "MAX_REQUEUES")
        if self.ending:
            sys.exit(code)
        if self.num_requeues >= most:
            say(f"not requeued: MAX_REQUEUES={most}")
            sys.exit(code)
        say(f"requeued{where}; start {self.num_requeues + 1} is over")
        # Slurm ends every process of this start now, and kills after KillWait. What `queued` starts inherits this
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if subprocess.run(["scontrol", "requeue", self.name]).returncode != 0:
            say(f"could not be requeued: sbatch the same with --name {run} goes on")
        else:
            queued()
        sys.exit(code)


def output(*words: str) -> str:
    """What a command prints."""
    return subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout


def shell_code(returncode: int) -> int:
    """A process's end as a shell counts it: 128 and the signal's number where a signal ended it."""
    return returncode if returncode >= 0 else 128 - returncode
