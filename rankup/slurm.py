"""`rankup launch` in a Slurm allocation: runs itself once on each node by srun, and requeues the job until it finishes.

| the agents end with, or Slurm sends     | what this process does                                                    |
|-----------------------------------------|---------------------------------------------------------------------------|
| 0, or a mistake or fault (below 128)    | ends with that code                                                       |
| 143, 170, 171, a signal's code          | requeues the job; not a second time without a new checkpoint, except 143  |
| USR1, USR2: the time is almost up       | makes the agents save and stop, then requeues the job                     |
| TERM: scancel, the time limit, requeue  | makes the agents save and stop; Slurm decides what follows                |
| INT, HUP: Ctrl-C or the end of a shell  | makes the agents save and stop                                            |

In each task of the step, rankup/slurm_task.py runs the agent. No torch here.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankup.agent.logs import host_name
from rankup.agent.operators import tell_end
from rankup.agent.script import Script
from rankup.env.allocation import Allocation, without_shape
from rankup.env.rank_env import run_name
from rankup.errors import FAULT, FINISHED, STOPPED, USER_MISTAKE, UserError
from rankup.slurm_task import SIGNALS, fields, say, scontrol
from rankup.timing import ON_END_S, ON_REQUEUE_S
from rankup.urls import is_url

FIRST_STEP_S, MAX_REQUEUES = 120.0, 100
ASKS = 12  # how often to ask a Slurm that does not answer, every 5 s
FIT = (FINISHED, 10)  # exit codes of the doctor
KINDS = ("code", "failed", "on_end")  # of the notes of agents
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# Prints which of the given paths a node lacks, and how many GPUs the step has there
LOOK = """for path; do test -e "$path" || echo "lacks $SLURMD_NODENAME $path"; done
echo "up $SLURMD_NODENAME ${SLURM_GPUS_ON_NODE:-0}" """


class Start:
    """One start of a Slurm job, in its batch script or in an salloc shell."""

    def __init__(self, given: Namespace, script: Script, allocation: Allocation) -> None:
        """`given`: the parsed options of `launch`; `given.line` has the words for the agents."""
        self.given, self.job = given, allocation
        self.stopping = self.ending = False  # somebody asked the job to stop; and it must not be requeued
        self.requeued, self.began_s = False, time.monotonic()
        self.step: subprocess.Popen[str] | None = None  # srun, while the agents run
        self.mark = Path(f".slurm-{allocation.job_id}").absolute()
        self.run = self.told_run = run_folder(given)
        self.on_end = ""  # the command of the script
        self.elastic = given.nnodes is not None and (given.nnodes[0] < given.nnodes[1] or given.spares > 0)
        self.hosts = scontrol("show", "hostnames", allocation.nodes).split()
        self._check(script)
        self.env = without_shape(os.environ)
        # Without --export=ALL, the steps of a job with another --export would get none of this shell's variables
        self.options = [
            f"--nodes={allocation.num_nodes}", f"--ntasks={allocation.num_nodes}", "--ntasks-per-node=1",
            f"--cpus-per-task={allocation.cpus}", "--kill-on-bad-exit=0", "--export=ALL",
        ]
        if allocation.gpus and "SLURM_GPUS" not in os.environ:  # with --gpus nodes may have different numbers of GPUs
            # All GPUs of a node, even if each task was to get one, or if an --exclusive job asked for fewer
            self.options.append(f"--gpus-per-node={allocation.gpus}")
        # The tasks end together with one exit code. After a task is lost, the others have 30 s to end
        self.options += ["--no-kill", "--wait=0"] if self.elastic else ["--wait=30"]
        self.options += given.srun_args or ()

    def _check(self, script: Script) -> None:
        """Raise UserError for options that this allocation can't follow."""
        given, nodes = self.given, self.job.num_nodes
        for tool in ("srun", "scontrol", "scancel"):
            if shutil.which(tool) is None:
                raise UserError(
                    f"slurm: {tool} must be on PATH in job {self.job.job}, got none. In a container, start rankup "
                    "outside of it, with --image; to use only this machine, give --here."
                )
        if (given.image or "").endswith((".sif", ".sqsh")) and not os.path.isfile(given.image):
            raise UserError(f"--image must be an existing file, got {given.image}. slurm/README.md says how.")
        if not self.hosts:
            raise UserError(f"slurm: scontrol must be able to read the list of nodes, got {self.job.nodes!r}.")
        if given.nnodes and not given.nnodes[0] <= nodes <= given.nnodes[1] + given.spares:
            found = ":".join(map(str, dict.fromkeys(given.nnodes)))
            raise UserError(
                f"--nnodes must be {nodes}, as in this allocation, got {found}. Leave it out, or give sbatch or salloc "
                "another --nodes."
            )
        if not given.image:  # an image may have a script of its own. Agents check the rest in the environment of srun
            script.check(os.environ, world_size=1)

    def __call__(self) -> int:
        """Run this start of the job, and then the command of --on-end or of the script. Returns the exit code."""
        code, cause = FAULT, ""
        try:
            code = self._run()
            return code
        except UserError as error:
            code, cause = USER_MISTAKE, str(error)
            raise
        finally:
            tell_end(
                self.given.on_end or self.on_end, self.told_run, code=code, cause=cause, began_s=self.began_s,
                requeued=self.requeued, limit_s=ON_REQUEUE_S if self.requeued else ON_END_S,
            )

    def _run(self) -> int:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        with self._marked():
            nodes = self._look()
            if nodes.keys() < {*self.hosts}:
                return self._requeue(STOPPED, "", failed={*self.hosts} - nodes.keys())
            nproc = self._nproc(nodes)
            if self.given.doctor and (code := self._doctor(nproc)) not in FIT and not self.stopping:
                say(f"the doctor ended with {code} (20: nodes not fit, 30: not completed): the job does not train")
                return code
            code, failed = self._train(nproc)
        at = self._step()
        say(f"start {self.job.restarts + 1} ended with {code} at step {at}")
        if code < 128 or (code != STOPPED and not self.ending and self._failed_before(at)):
            return code
        return self._requeue(code, f" at step {at}", failed=failed)

    def _step(self) -> int:
        """Return the step of the run's newest checkpoint, or 0."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in (self.run / "checkpoints").glob("step-*"))
        return max((int(each[1]) for each in found if each), default=0)

    # The steps ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Within the block a new file in the current folder shows whether all nodes see this folder, and not only one
        of the same name. Then the agents write notes to it, see `note`."""
        try:
            self.mark.write_text("")
        except OSError as error:
            raise UserError(
                f"slurm: the current folder must be writable, got {self.mark.parent} on {host_name()} "
                f"({error.strerror}). Start the job in a folder on a disk that all nodes share."
            ) from None
        try:
            yield
        finally:
            self.mark.unlink(missing_ok=True)

    def _look(self) -> dict[str, int]:
        """Run a small first step on all nodes. Slurm may start a job on a node that has just come back, and then never
        run a step there. Returns the number of GPUs of each node that ran it."""
        limit_s = FIRST_STEP_S if self.given.first_step_s is None else self.given.first_step_s
        paths = [self.mark, *([] if self.given.image else [Path(sys.executable), Path(__file__)])]
        named = (Path(self.given.words[0]), Path(self.given.image or ""))
        paths += [path.absolute() for path in named if os.path.isfile(path)]
        # The user's options for srun may send the output elsewhere
        step = self._start("-oall", "-eall", "sh", "-c", LOOK, "-", *map(str, paths), pipe=True)
        if step is None:
            return {}
        for patience_s, then in ((limit_s, step.terminate), (5.0, step.kill), (None, step.kill)):
            try:
                found, said = step.communicate(timeout=patience_s)
                break
            except subprocess.TimeoutExpired:
                then()
        answers = re.findall(r"^(?: *\d+: )?(up|lacks) (\S+) (.*)$", found, re.MULTILINE)  # srun may number the lines
        lacking = sorted((path, node) for kind, node, path in answers if kind == "lacks")
        for path, pairs in itertools.groupby(lacking, key=lambda pair: pair[0]):
            raise UserError(
                f"slurm: {path} must exist on all nodes, got none on {' '.join(node for _, node in pairs)}. Put it on "
                "a disk that all nodes share."
            )
        nodes = {node: int(gpus) for kind, node, gpus in answers if kind == "up"}
        if mistake := re.search(r"^srun: (.*(unrecognized|Invalid (--|MPI)).*)", said, re.MULTILINE):
            given = shlex.join(self.given.srun_args or ())
            raise UserError(f"--srun-args must be options of srun, got {given or 'none'}: {mistake[1]}")
        if nodes.keys() < {*self.hosts} and not self.stopping:
            why = f"srun ended with {step.returncode}{''.join(f': {line}' for line in said.splitlines()[-1:])}"
            say(f"not every node of {self.job.nodes} ran a first step within {limit_s:g} s ({why})")
        return nodes

    def _nproc(self, nodes: Mapping[str, int]) -> int:
        """Return how many ranks each node gets. `nodes`: each node's number of GPUs."""
        gpus = self.job.gpus or max(nodes.values())
        if isinstance(self.given.nproc, int):
            nproc = self.given.nproc
        elif len({*nodes.values()}) > 1:
            counts = ", ".join(f"{number} on {node}" for node, number in sorted(nodes.items()))
            raise UserError(
                f"slurm: all nodes must have the same number of GPUs, got {counts}. Give --gpus-per-node to sbatch or "
                "salloc, or --nproc to launch."
            )
        elif self.given.nproc and not gpus:
            raise UserError("--nproc gpu must have GPUs in the allocation, got none. Give --gpus-per-node to sbatch.")
        else:
            nproc = gpus or self.job.tasks
        if self.job.cpus < nproc:
            say(f"{nproc} ranks share {self.job.cpus} CPUs on each node: ask for more with --cpus-per-task")
        self.env.setdefault("OMP_NUM_THREADS", str(max(1, self.job.cpus // nproc)))
        return nproc

    def _doctor(self, nproc: int) -> int:
        """Check whether the nodes are fit to train. Returns the doctor's exit code."""
        where = ["--run-dir", self.given.run_dir]
        return self._agents(["--nproc", str(nproc), "--max-restarts", "0", *where, "-m", "rankup", "doctor", *where])

    def _train(self, nproc: int) -> tuple[int, set[str]]:
        """Run the agents of the job. Returns their exit code, and the node that made them give up, if they name one."""
        nodes, words = self.job.num_nodes, ["--nproc", str(nproc), *self.given.line]
        shown = shlex.join(self._command(words[:len(words) - len(self.given.words) + 1]))  # arguments may be secret
        ranks = f"{nproc} rank{'s' if nproc > 1 else ''}{' on each' if nodes > 1 else ''}"
        say(f"{nodes} node{'s' if nodes > 1 else ''}, {ranks}: {shown}{' ...' if self.given.words[1:] else ''}")
        code = self._agents(words)
        noted = ""
        with suppress(OSError):  # somebody has cleaned the folder
            noted = self.mark.read_text()
        notes = [line.partition(" ") for line in noted.splitlines()]
        codes, failed, ends = ([text for kind, _, text in notes if kind == wanted] for wanted in KINDS)
        if ends:
            self.on_end, run = json.loads(ends[-1])
            self.told_run = Path(run)
        if self.elastic and codes:
            code = int(codes[0])  # srun's own code may be that of a lost node
        code = STOPPED if self.stopping and code >= 128 else code
        return code, {*failed[-1:]} & {*self.hosts} if code != STOPPED else set()

    def _agents(self, words: Sequence[str]) -> int:
        """Run an agent on each node, unless somebody has asked the job to stop. Returns their exit code."""
        step = self._start(*self._command(words)[1:])
        code = STOPPED if step is None else step.wait()
        self.step = None
        return code if code >= 0 else 128 - code

    def _command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `rankup launch WORDS` on each node, in the image if there is one."""
        here, image = str(Path.cwd()), self.given.image
        # A snapshot has links into the folder in which its user stands
        seen = here.rpartition("/.rankup/")[0] or here
        if not image:
            return ["srun", *self.options, *_myself(), "launch", *words]
        # A hook of the container may give each task a rank
        inside = ["env", *(f"--unset={name}" for name in RANK_VARIABLES), "python3", "-m", "rankup", "launch", *words]
        if image.endswith(".sif"):
            nv = ["--nv"] if self.job.gpus else []
            apptainer = ["apptainer", "exec", *nv, "--bind", f"{seen},/tmp", "--pwd", here, image]
            return ["srun", *self.options, *apptainer, *inside]
        mounts = [f"--container-image={image}", f"--container-mounts={seen}:{seen}", f"--container-workdir={here}"]
        return ["srun", *self.options, *mounts, *inside]

    def _start(self, *words: str, pipe: bool = False) -> "subprocess.Popen[str] | None":
        """Start srun, unless somebody has asked the job to stop."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # srun keeps this mask, and waits for the signals
        try:
            if self.stopping or signal.sigpending() & {*SIGNALS}:
                return None
            output = subprocess.PIPE if pipe else None
            # Ctrl-C must reach only this process, because srun would kill the tasks at the second one
            step = subprocess.Popen(
                ["srun", *self.options, *words] if pipe else ["srun", *words], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env=self.env, text=True, start_new_session=True,
            )
            self.step = None if pipe else step
            return step
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _on_signal(self, number: int, frame: Any) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            say("the time is almost up, or somebody sent the signal: saving, then requeueing")
        else:
            self.ending = True
        self.stopping = True
        if number in (signal.SIGINT, signal.SIGHUP):
            say(f"{signal.Signals(number).name}: saving, then stopping")
            subprocess.run(["scancel", "--signal=TERM", self.job.job_id], check=False)  # to the tasks, not to salloc
        elif self.step is not None:
            self.step.send_signal(signal.SIGUSR1)  # srun forwards it to all tasks, but would kill them after SIGTERM

    # Requeueing -----------------------------------------------------------------------------------------------------

    def _failed_before(self, at: int) -> bool:
        """Return whether an earlier start failed at the same step. Note this one."""
        note, earlier = self.run / ".slurm-failed", ""
        with suppress(OSError):
            earlier = note.read_text().strip()
        with suppress(OSError):
            self.run.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{at}\n")
        if earlier != str(at):
            return False
        say(f"failed again without a new checkpoint since step {at}: not requeued")
        return True

    def _requeue(self, code: int, where: str, *, failed: Collection[str]) -> int:
        """Make Slurm requeue the job, unless it must not. `failed`: nodes to leave out. Returns the exit code."""
        if self.ending:
            return code
        job, limit = self.job, MAX_REQUEUES if self.given.max_requeues is None else self.given.max_requeues
        shown = self._shown()
        name = f" with --name {self.run.name}" if self._step() else ""  # a script may keep its state in its own way
        if shown.get("BatchFlag") == "0":
            elsewhere = f", in another job{name}" if name and self.run.name == run_name(os.environ) else ""
            say(f"salloc's jobs are not requeued: run the same line again to resume{elsewhere}")
            return code
        if not shown:
            say(f"not requeued, because scontrol can't read job {job.job}: submit it again{name}")
            return code
        if job.restarts >= limit:
            say(f"not requeued: the limit is --max-requeues {limit}")
            return code
        # This process survives the death of its node's slurmd, but Slurm then restarts the job on another node
        if (shown.get("Restarts"), shown.get("JobState")) != (str(job.restarts), "RUNNING"):
            self.given.on_end = self.on_end = ""  # the other start tells
            raise UserError("slurm: Slurm has ended this job or restarted it elsewhere: this process ends.")
        # Slurm will send SIGTERM to every process of this start, and SIGKILL after KillWait
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if subprocess.run(["scontrol", "requeue", job.job], check=False).returncode:
            say(f"Slurm refused to requeue the job: submit it again{name}")
            return code
        self.requeued = True
        say(f"requeued{where}; start {job.restarts + 1} is over")
        if failed and not self.given.no_exclude:
            self._exclude(failed, shown.get("ExcNodeList", "(null)"))
        return code

    def _shown(self) -> dict[str, str]:
        """Return what scontrol shows of the job. slurmctld may be restarting, so ask for a minute."""
        for _ in range(ASKS):
            if shown := fields(scontrol("show", "job", self.job.job)):
                return shown
            time.sleep(5)
        return {}

    def _exclude(self, failed: Collection[str], earlier: str) -> None:
        """Make Slurm leave nodes out of the next start, if enough are left: a third of all at most."""
        before = [] if earlier == "(null)" else scontrol("show", "hostnames", earlier).split()
        both, names = sorted({*before, *failed}), " ".join(sorted(failed))
        found = re.search(r"TotalNodes=([0-9]+)", scontrol("show", "partition", self.job.partition))
        total = int(found[1]) if found else len(self.hosts)
        if len(both) > total // 3 or total - len(both) < self.job.num_nodes:
            say(f"the next start may use {names} again, because too few other nodes would be left")
            return
        change = ["scontrol", "update", f"JobId={self.job.job}", f"ExcNodeList={','.join(both)}"]
        done = "leaves out" if subprocess.run(change, check=False).returncode == 0 else "can't leave out"
        say(f"the next start {done} {names}: {shlex.join(change)}")


def run_folder(given: Namespace) -> Path:
    """Return the run's folder, from --run-dir and --name of `launch`, or of the script's arguments. A script's file of
    settings is not read."""
    folder, name, words = str(given.runs), run_name(os.environ, given.name), iter(given.words)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--run-dir", "--run_dir", "--name"):
            value = value if equals else next(words, "")
            folder, name = (folder, value) if flag == "--name" else (value, name)
    return Path("runs" if is_url(folder) else folder, name or "")


def _myself() -> list[str]:
    """Return how this process was started, up to its command: `python /venv/bin/rankup`, `python -m rankup`."""
    own = sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv[1:])]
    return [sys.executable, *own]
