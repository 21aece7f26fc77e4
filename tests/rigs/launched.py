"""One job of two nodes under each launcher, for tests and measurements that kill its ranks and nodes from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import psutil

from tests.rigs import kubepods, slurm_cluster
from tests.rigs.containers import Project, docker, rank_of, wait_for
from tests.rigs.jobs import MAIN, ROOT, environment

PATIENCE_S = 300.0


class Launcher(Protocol):
    """A job of two nodes with a rank each. `run`: its run's folder, `node`: what is killed as a whole node."""

    run: Path
    node: str

    def start(self) -> None: ...

    def stop(self) -> None:
        """Have every rank save and leave, and wait for the end."""

    def processes(self, node: int) -> Iterable[psutil.Process]:
        """All processes of a node, as this machine sees them."""

    def kill_node(self) -> Callable[[], None]:
        """Kill it, and return what brings it back where the launcher itself does not."""


class Launch:
    """`launch` with two ranks. Nobody restarts `launch` itself, so this does."""

    def __init__(self, folder: Path, settings: Sequence[str], stack: ExitStack) -> None:
        self.run, self.node = folder / "job", "`launch` itself, started again at once"
        self.folder, self.settings = folder, settings
        stack.callback(lambda: self.process.kill())

    def start(self) -> None:
        words = [sys.executable, MAIN, "launch", "--nproc=2", MAIN, "--run-dir", self.folder, *self.settings]
        with (self.folder / "output").open("a") as output:
            self.process = subprocess.Popen(words, env=environment(), cwd=ROOT, stdout=output, stderr=output)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def processes(self, node: int) -> Iterable[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_node(self) -> Callable[[], None]:
        self.process.kill()
        self.process.wait()
        return self.start


class Compose:
    """Two containers of compose.yaml."""

    def __init__(self, folder: Path, settings: Sequence[str], stack: ExitStack) -> None:
        self.project = Project(folder, ARGS=" ".join(settings), RESTART="on-failure:100000")
        stack.callback(self.project.remove)
        self.run, self.node = folder / "runs" / "job", "the container of node 1"

    def start(self) -> None:
        self.project.up()

    def stop(self) -> None:
        self.project.stop()

    def processes(self, node: int) -> Iterable[psutil.Process]:
        return psutil.Process(self.project.state(f"node{node}")["Pid"]).children(recursive=True)

    def kill_node(self) -> Callable[[], None]:
        self.project.kill_container("node1")
        return lambda: None


class Pods:
    """The containers of pytorchjob.yaml's two pods. This stands for the operator, which replaces a lost pod."""

    def __init__(self, folder: Path, settings: Sequence[str], stack: ExitStack) -> None:
        self.cluster = kubepods.Cluster(folder, "pytorchjob.yaml", settings)
        stack.callback(self.cluster.remove)
        self.run, self.node = self.cluster.runs / "job", "the pod of node 1, replaced at once"

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        containers = [self.cluster.container(index) for index in (0, 1)]
        docker("stop", "--time", "60", *containers)
        docker("rm", *containers)

    def processes(self, node: int) -> Iterable[psutil.Process]:
        first = psutil.Process(self.cluster.state(node)["Pid"])  # no init: the agent itself
        return [first, *first.children(recursive=True)]

    def kill_node(self) -> Callable[[], None]:
        os.kill(self.cluster.state(1)["Pid"], signal.SIGKILL)

        def back() -> None:
            self.cluster.codes(1)
            self.cluster.replace(1)

        return back


class Slurm:
    """Two tasks of slurm/ddp.sbatch on the two nodes of slurm/local.sh."""

    def __init__(self, folder: Path, settings: Sequence[str], stack: ExitStack) -> None:
        self.cluster, self.folder, self.settings = slurm_cluster.Cluster(), folder, " ".join(settings)
        self.cluster.local("up")
        stack.callback(self.cluster.close)
        self.run, self.node = folder / "runs" / "job", "the agent of task 1"

    def start(self) -> None:
        self.job = self.cluster.submit(self.folder, self.settings, MAX_RESTARTS="100000")

    def stop(self) -> None:
        self.job.cancel()
        self.job.wait()
        self.cluster.idle()

    def processes(self, node: int) -> Iterable[psutil.Process]:
        return self.job.processes(f"node{node}")

    def kill_node(self) -> Callable[[], None]:
        self.job.kill_agent("node1")
        return lambda: None


LAUNCHERS: dict[str, Callable[[Path, Sequence[str], ExitStack], Launcher]] = {
    "launch": Launch, "compose": Compose, "slurm": Slurm, "pods": Pods,
}


def rank_process(job: Launcher, rank: int) -> psutil.Process:
    """The process of a rank, as soon as there is one."""
    found: list[psutil.Process] = wait_for(
        f"a process of rank {rank}", lambda: [each for each in job.processes(rank) if rank_of(each) == rank]
    )
    return found[0]
