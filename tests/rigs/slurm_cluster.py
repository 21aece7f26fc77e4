"""A real Slurm for tests: slurm/local.sh's nodes made of namespaces, the jobs on them, and what they leave running."""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.rigs.containers import clean_environment, rank_of, wait_for
from tests.rigs.jobs import ROOT, environ_of, last_step, result

LOCAL, DDP = ROOT / "slurm" / "local.sh", ROOT / "slurm" / "ddp.sbatch"
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge iproute2 util-linux"


def why_not() -> str:
    """Return why there can be no Slurm here and the command that changes this, or "" if there can."""
    tools = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setsid")
    if lacking := [tool for tool in tools if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]:
        return f"no {', '.join(lacking)} here: {INSTALL}"
    if os.geteuid() != 0:
        return "Slurm's daemons and namespaces take root: sudo make unit ARGS='-k slurm'"
    tried = subprocess.run(
        ["unshare", "-n", "-u", "-m", "-p", "-f", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here ({tried.stderr.strip()}): docker run --privileged" if tried.returncode else ""


class Cluster:
    """Nodes and jobs with names, addresses and numbers that no other Slurm of this machine has.

    The cluster takes the first number that no other tests hold now. `up` removes what killed tests left under it."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.num_nodes = num_nodes
        for number in range(8):
            self.folder = folder = Path(tempfile.gettempdir(), f"rankup-test{number}")
            self.lock = folder.with_suffix(".lock").open("w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                self.lock.close()
        else:
            raise AssertionError("eight Slurms of tests run on this machine already")
        self.env = clean_environment(
            {
                "SLURM_CONF": str(folder / "slurm.conf"), "RANKUP_SLURM_DIR": str(folder), "SWITCH": folder.name,
                "NET": f"192.168.{79 + number}", "PORT": str(17817 + 10 * number), "NODES": str(num_nodes),
                "FIRST_JOB": str(1 + 1000 * number), "PYTHONWARNINGS": "default",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the command `rankup`
            }
        )
        self.numbers = itertools.count()

    def run(self, *words: str | Path, check: bool = True, cwd: Path = ROOT, **env: str) -> str:
        """Run a command with this Slurm, and return its output through a file, because daemons would keep a pipe
        open."""
        output = self.folder.with_name(f"{self.folder.name}-{next(self.numbers)}.txt")
        with output.open("wb") as file:
            done = subprocess.run(
                [str(word) for word in words], env={**self.env, **env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, timeout=400, check=False,
            )
        text = output.read_text()
        output.unlink()
        assert done.returncode == 0 or not check, f"{' '.join(map(str, words))}: {done.returncode}\n{text}"
        return text

    def local(self, *words: str) -> None:
        self.run(LOCAL, *words)

    def close(self) -> None:
        """Remove this Slurm, and release its number."""
        with self.lock:
            self.local("down")

    def submit(
        self, folder: Path, arguments: str, *options: str, launch: str = "", script: str = "", **env: str
    ) -> "SlurmJob":
        """Run sbatch OPTIONS ddp.sbatch ARGUMENTS in `folder`. `launch`: more options of `rankup launch`. `script`:
        what to start in place of the training program."""
        file = DDP
        if not (folder / "train").exists():
            (folder / "train").symlink_to(ROOT / "train")  # the file starts train/main.py of the checkout
        if launch or script:
            text, count = re.subn(
                r"^exec rankup launch .*", f'exec rankup launch {launch} {script or "train/main.py train"} "$@"',
                DDP.read_text(), flags=re.MULTILINE,
            )
            assert count == 1
            file = folder / "job.sbatch"
            file.write_text(text)
        words = ["sbatch", "--parsable", *options, file, *arguments.split()]
        return SlurmJob(self, self.run(*words, cwd=folder, **env).strip(), folder)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of jobs on any node, agents included. Their environment has a job's id."""
        found = []
        for process in psutil.process_iter():
            env = environ_of(process.pid)
            if "SLURM_JOB_ID" in env and env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
                found.append(process)
        return found

    def idle(self) -> None:
        """Wait until all nodes are up and idle, and no process of any job runs."""
        wait_for("idle nodes", lambda: self.num_idle() == self.num_nodes, log=self.report)
        wait_for("end of all processes", lambda: not self.processes(), log=lambda: str(self.processes()))

    def num_idle(self) -> int:
        return int(self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() or 0)

    def report(self) -> str:
        return self.run("sinfo", "-N", check=False) + self.run("squeue", check=False)


class SlurmJob:
    def __init__(self, cluster: Cluster, number: str, folder: Path) -> None:
        self.cluster, self.number, self.folder = cluster, number, folder

    @property
    def output(self) -> str:
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self) -> dict[str, str]:
        """Return scontrol's information on the job."""
        text = self.cluster.run("scontrol", "show", "job", self.number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def log(self) -> str:
        shown = self.cluster.run("scontrol", "show", "job", self.number, check=False)
        return f"{self.cluster.report()}{shown}\n{self.output}"

    def wait(self, *, timeout_s: float = 600) -> str:
        """Wait until the job is over for good, and return its state. End Slurm's pause after each requeue."""

        def over() -> str:
            state = self.show()["JobState"]
            if state == "PENDING":
                self.start_now()
            return state if state in OVER else ""

        state: str = wait_for(f"end of job {self.number}", over, timeout_s=timeout_s, log=self.log)
        return state

    def go_on(self) -> None:
        """Wait until the job runs again after a requeue."""

        def running() -> bool:
            self.start_now()
            return self.show()["JobState"] == "RUNNING"

        wait_for("the next start", running, log=self.log)

    def start_now(self) -> None:
        """End Slurm's pause after a requeue, once the last start is gone from every node.

        Slurm's clock counts whole seconds: a start in the second of the requeue finds its credential revoked, or gets
        no step on a node that came back."""
        shown = self.show()
        requeued = time.mktime(time.strptime(shown["SubmitTime"], "%Y-%m-%dT%H:%M:%S"))
        if shown["JobState"] != "PENDING" or time.time() - requeued < 4:
            return  # before the requeue, the time is that of the first start
        if not self.cluster.processes() and not self.daemons():
            self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)

    def daemons(self) -> list[psutil.Process]:
        """Return Slurm's own processes of this job: one per step and node."""
        name = f"slurmstepd: [{self.number.split('_')[0]}."
        return [
            process for process in psutil.process_iter(["cmdline"]) if name in " ".join(process.info["cmdline"] or ())
        ]

    def code(self) -> int:
        return int(self.show()["ExitCode"].split(":")[0])

    def cancel(self, *options: str) -> None:
        self.cluster.run("scancel", *options, self.number)

    # Its ranks and its run -----------------------------------------------------------------------------------------

    def processes(self, node: str = "") -> list[psutil.Process]:
        """Return the processes of this job's steps, on one node or on all."""
        found = []
        for process in self.cluster.processes():
            env = environ_of(process.pid)
            if env.get("SLURM_JOB_ID") == self.number and node in env.get("SLURMD_NODENAME", ""):
                found.append(process)
        return found

    def ranks(self, node: str = "") -> list[psutil.Process]:
        """Return the processes that train, on one node or on all, in the order of their ranks."""
        found = [(rank, process) for process in self.processes(node) if (rank := rank_of(process)) is not None]
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def agents(self, node: str) -> list[psutil.Process]:
        """Return the agents of a node, without the supervisors that start them again."""
        found = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                if "launch" in process.cmdline() and process.name() == "rankup-agent":
                    found.append(process)
        return found

    def kill_agent(self, node: str) -> None:
        wait_for(f"an agent on {node}", lambda: self.agents(node), log=self.log)[0].send_signal(signal.SIGKILL)

    def kill_rank(self, node: str) -> None:
        wait_for(f"a rank on {node}", lambda: self.ranks(node), log=self.log)[0].send_signal(signal.SIGKILL)

    def step(self, run: str = "job") -> int:
        return last_step(self.folder / "runs" / run)

    def wait_for_step(self, step: int, run: str = "job") -> None:
        looks = itertools.count(1)

        def seen() -> str:
            if self.step(run) >= step:
                return "reached"
            # Ask Slurm only at every 20th call: asking takes much longer than reading, and the step would be noticed
            # late
            over = next(looks) % 20 == 0 and self.show()["JobState"] in OVER
            return "reached" if self.step(run) >= step else "over" if over else ""

        # A read may find a line half written; the next one finds it whole
        assert wait_for(f"step {step}", seen, timeout_s=600, log=self.log) == "reached", self.log()

    def wait_for_text(self, text: str, count: int = 1) -> None:
        wait_for(f'"{text}"', lambda: len(re.findall(text, self.output)) >= count, log=self.log)

    def result(self, run: str = "job") -> dict[str, Any]:
        folder = self.folder / "runs" / run
        assert (folder / "result.json").exists(), self.log()
        return result(folder)
