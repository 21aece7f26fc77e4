# Supervises a training as a Slurm job: checks its nodes, restarts lost ranks, requeues it, ends with its exit code.
# Run: sbatch slurm/ddp.sbatch      (its last line starts this file, on the job's first node)
# Edit: nothing; the settings are environment variables, which ddp.sbatch sets.
"""The supervisor runs outside any container, in the Python that the node has, 3.8 or newer.

It imports only the standard library and two files of train/ that need nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(os.environ.get("RANKUP") or Path(__file__).resolve().parents[1])
sys.path.insert(0, str(ROOT))

from train.errors import FAULT, FINISHED, STOPPED, USER_MISTAKE, root_cause, worth_restarting  # noqa: E402
from train.process.addresses import ephemeral_range, port_for  # noqa: E402

TASK = str(ROOT / "slurm" / "task.sh")
PATIENCE_S = 60  # after the first process has ended well, the others have this long
LIFTED = 200  # task.sh adds this to the codes of mistakes and faults: srun returns the highest code of all tasks
FIT = (0, 10)  # the doctor's codes for nodes that are fit to train; 10 is with warnings


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


class Job:
    """This start of this Slurm job: what it has, the steps that it runs, and the signals that it gets."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.id = number(env, "SLURM_JOB_ID")
        # The id of an array's last task is the array's too, and would mean all of its tasks
        array = env.get("SLURM_ARRAY_JOB_ID")
        self.name = f"{array}_{env['SLURM_ARRAY_TASK_ID']}" if array else str(self.id)
        self.nodes = env["SLURM_JOB_NODELIST"]
        self.num_nodes = number(env, "SLURM_JOB_NUM_NODES")
        self.num_requeues = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.nproc = int(env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_NTASKS_PER_NODE") or 1)
        cpus = int(env.get("SLURM_CPUS_ON_NODE") or 1)
        self.overcommit = []
        if cpus < self.nproc:
            say(f"{self.nproc} processes share {cpus} CPUs on each node: ask for more with --cpus-per-task")
            self.overcommit = ["--overcommit"]
        hosts = subprocess.run(["scontrol", "show", "hostnames", self.nodes], stdout=subprocess.PIPE, text=True).stdout
        if not hosts.split():
            fail(f'scontrol can\'t read the node list "{self.nodes}": EDIT what sets SLURM_JOB_NODELIST')
        # srun would read these options of the whole job, but they mean something else in a step
        of_job = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"}
        cpus_each = str(max(1, cpus // self.nproc))
        self.env = {
            **{name: value for name, value in env.items() if name not in of_job},
            "RANKUP": str(ROOT), "NPROC": str(self.nproc), "MASTER_ADDR": hosts.split()[0],
            "OMP_NUM_THREADS": cpus_each, "SRUN_CPUS_PER_TASK": cpus_each,
        }
        self.step: subprocess.Popen[str] | None = None  # the ranks, which a signal has to reach
        self.stopping = False  # somebody asked the job to save and leave
        self.ending = False  # Slurm itself ends this start: no restart and no requeue by us
        # USR2 for sites where USR1 means something else: then --signal=B:USR2@120
        signal.signal(signal.SIGUSR1, self._on_warning)
        signal.signal(signal.SIGUSR2, self._on_warning)
        signal.signal(signal.SIGTERM, self._on_end)  # scancel, the time limit, or a requeue

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        say("the time is almost up, or a signal says so: saving, then requeued")
        self._stop()

    def _on_end(self, number: int, frame: FrameType | None) -> None:
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
        return code - LIFTED if code > LIFTED else code

    def port(self, attempt: int = 0, *, step: int = 0) -> int:
        """The port of one attempt: another job on these nodes, or an earlier attempt, may still hold its own."""
        return port_for(self.id, restart=attempt, step=step, ephemeral=ephemeral_range())

    def is_ours(self) -> bool:
        """Whether Slurm still runs this start of the job. This process lives on when its node's slurmd has died, but
        Slurm starts the job anew on another node then."""
        asked = subprocess.run(["scontrol", "show", "job", self.name], stdout=subprocess.PIPE, text=True)
        current = re.search(rf"Restarts={self.num_requeues}\s", asked.stdout)
        return asked.returncode == 0 and current is not None and "JobState=RUNNING" in asked.stdout

    def requeue(self, code: int, where: str = "", *, run: str = "RUN") -> NoReturn:
        """Have Slurm start the job anew, if it may, and end this process with `code`."""
        most = number(self.env, "MAX_REQUEUES")
        if self.ending:
            sys.exit(code)
        if self.num_requeues >= most:
            say(f"not requeued: MAX_REQUEUES={most}")
            sys.exit(code)
        say(f"requeued{where}; start {self.num_requeues + 1} is over")
        if subprocess.run(["scontrol", "requeue", self.name]).returncode != 0:
            say(f"could not be requeued: sbatch the same with --name {run} goes on")
        sys.exit(code)


def shell_code(returncode: int) -> int:
    """A process's end as a shell counts it: 128 and the signal's number where a signal ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def check_nodes(job: Job) -> None:
    """Have each node look for the checkout and the current folder: every later step needs both.

    Requeues the job if not every node runs even this step: Slurm 22.05 was seen to start a job on a node that had just
    come back, and never to run a step there.
    """
    here, limit_s = Path.cwd(), number(job.env, "FIRST_STEP_S")
    # A file of this job: another node may have a folder of the same name on its own disk
    seen = here / f".slurm-{job.id}"
    try:
        seen.touch()
    except OSError:
        fail(f"can't write to {here} on {socket.gethostname()}: submit from a folder on a disk that all nodes share")
    look = "for path; do [[ -e $path ]] || { hostname; break; }; done"
    words = ["bash", "-c", look, "-", str(seen), str(ROOT / "train" / "main.py")]
    step = job.srun(1, words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        blind, _ = step.communicate(timeout=limit_s)
        code = shell_code(step.returncode)
    except subprocess.TimeoutExpired:
        blind, code = "", 124  # as timeout(1) says it
        os.killpg(step.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)
    finally:
        seen.unlink()
    if code != 0:
        say(f"not every node of {job.nodes} runs a step within {limit_s} s (srun: {code})")
        job.requeue(STOPPED)
    if blind.strip():
        hosts = " ".join(blind.split())
        fail(f"{here} or {ROOT} is not there on {hosts}: put the checkout and runs/ on a disk that all nodes share")


@contextlib.contextmanager
def data_on_each_node(job: Job) -> Iterator[list[str]]:
    """Copy DATA to each node's own disk, and remove it at the end. Yields the words that `train` needs for it."""
    if not job.env["DATA"]:
        yield []
        return
    copy = f"/tmp/rankup-{job.id}"
    try:
        if job.srun(1, ["cp", "-r", "--no-target-directory", job.env["DATA"], copy]).wait() != 0:
            fail(f"DATA={job.env['DATA']} can't be copied to {copy} of every node")
        yield ["--data-dir", copy]
    finally:
        job.srun(1, ["rm", "-rf", copy]).wait()


def progress_of(job: Job, attempt: str, words: Sequence[str]) -> tuple[Path, int, int]:
    """The run's directory, its newest checkpoint's step, and the exit code that the ranks of `attempt` wrote down.

    In the container and by the program itself: its settings say where the run is.
    """
    command = ["srun", "--nodes=1", "--ntasks=1", "--overlap", *job.container(), TASK, "progress", *words]
    env = {**job.env, "RANKUP_ATTEMPT": attempt}
    asked = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    found = re.search(r"^(.+) (\d+) (\d+)$", asked.stdout, re.MULTILINE)
    return (Path(found[1]), int(found[2]), int(found[3])) if found else (Path.cwd(), 0, 0)


def train(job: Job, words: Sequence[str]) -> tuple[int, Path, int]:
    """Run the training, and again where that can help. Returns its exit code, the run's directory and newest step."""
    launcher, tries = job.env["LAUNCHER"], number(job.env, "MAX_RESTARTS") + 1
    code, run_dir, step = STOPPED, Path("RUN"), 0
    for restart in range(tries):
        if job.stopping:
            return STOPPED, run_dir, step
        index = job.num_requeues * tries + restart
        attempt = f"slurm-{job.id}-{index}"
        code = job.run_ranks(["train", *words], attempt=attempt, port=job.port(index), launcher=launcher)
        if code == FINISHED or job.ending:
            break
        if not job.is_ours():
            fail("Slurm has ended this job, or started it anew elsewhere: this process ends")
        run_dir, step, written = progress_of(job, attempt, words)
        if launcher == "torchrun" and written:
            code = written  # torchrun turns every code into 1
        if job.stopping and code == FAULT and not written:
            code = STOPPED  # the stop cut off a rank that was still starting; a fault while saving is written down
        code = root_cause([code], stopped=job.stopping)
        say(f"attempt {index} ended with {code} at step {step}")
        if not worth_restarting(code):
            break
    return code, run_dir, step


def refuse_without_progress(run_dir: Path, step: int, code: int) -> None:
    """End a job that failed at the same step in its last start, too: it would do so without end."""
    mark = run_dir / ".slurm-failed"
    if mark.exists() and mark.read_text().strip() == str(step):
        say(f"failed again without a new checkpoint since step {step}: not requeued")
        sys.exit(code)
    run_dir.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{step}\n")


def main(words: Sequence[str]) -> NoReturn:
    for name, known in (("LAUNCHER", ("tasks", "torchrun")), ("COMMAND", ("train", "bench", "doctor"))):
        if os.environ[name] not in known:
            fail(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {os.environ[name]}")
    job = Job(os.environ)
    seed = os.environ.get("SLURM_ARRAY_TASK_ID")
    words = [*(["--seed", seed] if seed else []), *words]  # an array trains one seed in each of its tasks
    check_nodes(job)
    with data_on_each_node(job) as more:
        words = [*words, *more]
        command = os.environ["COMMAND"]
        if command != "train":
            sys.exit(job.run_ranks([command, *words], attempt=command, port=job.port(step=1)))
        if os.environ["DOCTOR"]:
            fit = job.run_ranks(["doctor", *words], attempt="doctor", port=job.port(step=1))
            if fit not in FIT:
                say(f"the doctor says no, exit code {fit} (20 not fit, 30 could not be completed): nothing was trained")
                sys.exit(fit)
        code, run_dir, step = train(job, words)
    if code < 128:
        sys.exit(code)
    if code != STOPPED and not job.ending:
        refuse_without_progress(run_dir, step, code)
    job.requeue(code, f" at step {step}", run=run_dir.name)


if __name__ == "__main__":
    main(sys.argv[1:])
