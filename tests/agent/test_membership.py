"""A job whose number of nodes may change, from outside: agents as processes that are killed, frozen and started again.

The script does not import torch; `tests/promises` has what a training makes of it.
"""

import os
import signal
import sys
from pathlib import Path

import psutil

from tests.agent.test_launch import HEAD, until
from tests.rigs.jobs import Job, ended, free_port, start

# Each rank writes down who it is, and waits
TEXT = HEAD + """
shared, world = pathlib.Path(sys.argv[1]), os.environ["WORLD_SIZE"]
job = os.environ["TORCHELASTIC_RUN_ID"]
path = shared / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-of-{world}"
path.with_suffix(".new").write_text(f"{job} {os.getpid()}")
path.with_suffix(".new").rename(path)
while not (shared / "go").exists(): time.sleep(0.01)
"""


class Nodes:
    """Agents of one job on this machine, one rank each."""

    def __init__(self, folder: Path, limits: str, *options: str) -> None:
        self.folder, self.job, self.port = folder, Job(), free_port()
        self.limits, self.options = (f"--nnodes={limits}", "--lost-after-s=3", "--join-timeout-s=100"), options
        self.agents: dict[int, psutil.Process] = {}
        (folder / "shared").mkdir()
        (folder / "job.py").write_text(TEXT)

    def add(self, node: int) -> None:
        line = ("-m", "rankup", "launch", *self.limits, f"--node-rank={node}", "--master-addr=127.0.0.1",
                f"--master-port={self.port}", f"--run-dir={self.folder}/runs{node}", *self.options)
        start(sys.executable, *line, self.folder / "job.py", self.folder / "shared", job=self.job)
        self.agents[node] = psutil.Process(self.job.processes[-1].pid)

    def kill(self, node: int) -> None:
        """The agent and its ranks."""
        for process in [self.agents[node], *self.agents[node].children(recursive=True)]:
            process.kill()

    def attempt(self, world_size: int, *, after: int = -1) -> int:
        """The number of the next attempt of so many ranks, once all of them are there."""
        def found() -> list[int]:
            names = [path.name.split("-") for path in (self.folder / "shared").glob(f"*-of-{world_size}")]
            starts = [int(name[0]) for name in names]
            return [number for number in starts if number > after and starts.count(number) == world_size]

        return int(min(until(found, f"no attempt of {world_size} ranks")))

    def of_rank(self, rank: int, attempt: int) -> int:
        """The node whose agent has started that rank."""
        path = next((self.folder / "shared").glob(f"{attempt}-{rank}-of-*"))
        parents = psutil.Process(int(path.read_text().split()[1])).parents()
        return next(node for node, agent in self.agents.items() if agent in parents)

    def jobs(self) -> set[str]:
        return {path.read_text().split()[0] for path in (self.folder / "shared").glob("*-of-*")}

    def go(self) -> None:
        (self.folder / "shared/go").touch()


def test_lost_node_is_replaced_by_a_spare(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "--spares=1", "--wait-for-node=100")
    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        first = nodes.attempt(2)
        lost = nodes.of_rank(1, first)
        nodes.kill(lost)
        nodes.attempt(2, after=first)
        nodes.go()
        assert job.wait() == [-9 * (node == lost) for node in range(3)], job.output
    assert "this node is a spare" in job.outputs[3 - lost]
    assert f"node {lost} on " in job.outputs[0]
    assert len(nodes.jobs()) == 1


def test_job_goes_on_with_fewer_nodes_and_takes_one_that_comes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:3", "--wait-for-node=2")
    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        first = nodes.attempt(3)
        nodes.kill(1)
        second = nodes.attempt(2, after=first)
        nodes.add(1)
        nodes.attempt(3, after=second)
        nodes.go()
        assert job.wait() == [0, -9, 0, 0], job.output
    assert "membership" in job.outputs[0]
    assert len(nodes.jobs()) == 1


def test_after_node_0_the_next_one_leads_and_a_new_node_0_founds_no_second_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:3", "--wait-for-node=2")
    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        first = nodes.attempt(3)
        nodes.kill(0)
        second = nodes.attempt(2, after=first)
        nodes.add(0)
        nodes.attempt(3, after=second)
        nodes.go()
        assert job.wait() == [-9, 0, 0, 0], job.output
    assert sum("this node leads from now on" in output for output in job.outputs) == 1
    assert "another node leads" in job.outputs[3]
    assert len(nodes.jobs()) == 1


def test_frozen_node_is_left_and_joins_anew_when_it_wakes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:3", "--wait-for-node=1")
    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        first = nodes.attempt(3)
        frozen = [nodes.agents[2], *nodes.agents[2].children(recursive=True)]
        for process in frozen:
            os.kill(process.pid, signal.SIGSTOP)
        second = nodes.attempt(2, after=first)
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
        nodes.attempt(3, after=second)
        nodes.go()
        assert job.wait() == [0, 0, 0], job.output
    assert "gave no sign of life" in job.outputs[0]


def test_fewer_nodes_than_the_least_wait_and_say_so(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3", "--wait-for-node=0.5")
    with ended(nodes.job) as job:
        for node in range(2):
            nodes.add(node)
        first = nodes.attempt(2)
        nodes.kill(1)
        until(lambda: _runs(nodes) == 0, "the rank does not end")
        nodes.add(2)
        nodes.attempt(2, after=first)
        nodes.go()
        assert job.wait() == [0, -9, 0], job.output


def _runs(nodes: Nodes) -> int:
    """How many ranks of node 0 run."""
    lines = [" ".join(process.cmdline()) for process in nodes.agents[0].children(recursive=True)]
    return sum("job.py" in line for line in lines)


def test_spare_and_limits_must_fit(tmp_path: Path) -> None:
    wrong = {"--spares=1": "--spares must come with --nnodes", "--nnodes=3:2": "--nnodes must be a number of nodes"}
    for words, text in wrong.items():
        with ended(start(sys.executable, "-m", "rankup", "launch", words, "job.py", cwd=tmp_path)) as job:
            assert job.wait() == [2], job.output
        assert text in job.output
