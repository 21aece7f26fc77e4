# Supervises a training as a Slurm job: checks its nodes, restarts lost ranks, requeues it, ends with its exit code.
# Run: sbatch slurm/ddp.sbatch      (its last line starts this file, on the job's first node)
# Edit: nothing; the settings are environment variables, which ddp.sbatch sets.
"""The supervisor runs outside any container, in the Python that the node has, 3.8 or newer.

It imports only the standard library, slurm/job.py, and two files of rankup/ that need nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import kept_code  # noqa: E402
import suspects  # noqa: E402
from job import ROOT, TASK, Job, fail, job_name, number, say, shell_code  # noqa: E402

from rankup.errors import FAULT, FINISHED, STOPPED, root_cause, worth_restarting  # noqa: E402

FIT = (0, 10)  # the doctor's codes for nodes that are fit to train; 10 is with warnings


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
        # Nodes may share /tmp, as those of local.sh do: cp fails where another one makes the same file at that moment
        words = ["bash", "-c", 'mkdir -p "$2" && flock "$2" cp -r "$1/." "$2"', "-", job.env["DATA"], copy]
        if job.srun(1, words).wait() != 0:
            fail(f"DATA={job.env['DATA']} can't be copied to {copy} of every node")
        yield ["--data-dir", copy]
    finally:
        job.srun(1, ["rm", "-rf", copy]).wait()


def progress_of(job: Job, attempt: str, words: Sequence[str]) -> tuple[Path, int, int, int]:
    """The run's directory, its newest checkpoint's step, the exit code that the ranks of `attempt` wrote down, and the
    rank that they lost, or -1.

    In the container and by the program itself: its settings say where the run is.
    """
    command = ["srun", "--nodes=1", "--ntasks=1", "--overlap", *job.container(), TASK, "progress", *words]
    env = {**job.env, "RANKUP_ATTEMPT": attempt}
    asked = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    found = re.search(r"^(.+) (\d+) (\d+) (-?\d+)$", asked.stdout, re.MULTILINE)
    return (Path(found[1]), int(found[2]), int(found[3]), int(found[4])) if found else (Path.cwd(), 0, 0, -1)


def train(job: Job, words: Sequence[str]) -> tuple[int, Path, int]:
    """Run the training or script, and again where that can help. Returns its code, the run's directory and newest step.

    `words`: of train.main, train or run first. A script's steps are not known: its newest step is always 0.
    """
    launcher, tries = job.env["LAUNCHER"], number(job.env, "MAX_RESTARTS") + 1
    code, run_dir, step = STOPPED, Path("RUN"), 0
    for restart in range(tries):
        if job.stopping:
            return STOPPED, run_dir, step
        if restart:
            job.look_at_nodes()
        index = job.num_requeues * tries + restart
        attempt = f"slurm-{job.id}-{index}"
        code = job.run_ranks(words, attempt=attempt, port=job.port(index), launcher=launcher)
        if code == FINISHED or job.ending:
            break
        if not job.is_ours():
            fail("Slurm has ended this job, or started it anew elsewhere: this process ends")
        run_dir, step, written, suspect = progress_of(job, attempt, words)
        # torchrun turns every code into 1. And where a task is lost, srun asks the other tasks to stop, and returns the
        # code of that, although their ranks wrote down that they lost a peer
        if written and (launcher == "torchrun" or code == STOPPED):
            code = written
        if job.stopping and code == FAULT and not written:
            code = STOPPED  # the stop cut off a rank that was still starting; a fault while saving is written down
        code = root_cause([code], stopped=job.stopping)
        say(f"attempt {index} ended with {code} at step {step}")
        if worth_restarting(code) and not job.stopping:
            suspects.note(job, run_dir, suspect)
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
    for name, known in (("LAUNCHER", ("tasks", "torchrun")), ("COMMAND", ("train", "run", "doctor"))):
        if os.environ[name] not in known:
            fail(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {os.environ[name]}")
    command = os.environ["COMMAND"]
    if os.environ["KEEP_CODE"] and command in ("train", "run"):
        kept_code.run_kept(list(words), job=job_name(os.environ), command=command)
    job = Job(os.environ)
    seed = os.environ.get("SLURM_ARRAY_TASK_ID")
    if command == "run" and (os.environ["DATA"] or os.environ["DOCTOR"]):
        fail("DATA and DOCTOR go with COMMAND=train: a script reads its data itself, COMMAND=doctor checks the nodes")
    if command != "run":  # a script reads SLURM_ARRAY_TASK_ID itself
        words = [*(["--seed", seed] if seed else []), *words]  # an array trains one seed in each of its tasks
    check_nodes(job)
    with data_on_each_node(job) as more:
        words = [*words, *more]
        if command not in ("train", "run"):
            sys.exit(job.run_ranks([command, *words], attempt=command, port=job.port(step=1)))
        if os.environ["DOCTOR"]:
            fit = job.run_ranks(["doctor", *words], attempt="doctor", port=job.port(step=1))
            if fit not in FIT:
                say(f"the doctor says no, exit code {fit} (20 not fit, 30 could not be completed): nothing was trained")
                sys.exit(fit)
        code, run_dir, step = train(job, [command, *words])
    if code < 128:
        sys.exit(code)
    if code != STOPPED and not job.ending:
        refuse_without_progress(run_dir, step, code)
    job.requeue(code, f" at step {step}", run=run_dir.name, queued=lambda: suspects.exclude(job, run_dir))


if __name__ == "__main__":
    main(sys.argv[1:])
