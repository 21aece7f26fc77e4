"""Jobs with a changing number of nodes, from outside: agents are processes that are killed and restarted.

`simulator.py` tests who may go on, and `tests/promises` what a change means for a training. test_secret.py has a spare
that takes the place of a lost node. The script here does not import torch."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agent.test_launch import HEAD
from tests.rigs import fork_server, namespaces
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, free_port, start, wait_for
from tests.rigs.namespaces import Net
from tests.rigs.object_store import BUCKET, S3, Door

# Each rank writes a file with its rank and its job, and waits
TEXT = HEAD + """
shared, world = pathlib.Path(sys.argv[1]), os.environ["WORLD_SIZE"]
job = os.environ["TORCHELASTIC_RUN_ID"]
path = shared / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-of-{world}"
path.with_suffix(".new").write_text(f"{job} {os.getpid()} {os.environ.get('GLOO_SOCKET_IFNAME')}")
path.with_suffix(".new").rename(path)
if "BAD" in os.environ:
    wait_for(shared / f"{restart}-0-of-{world}")  # it may start late, and would be told to leave before
    os.kill(os.getpid(), signal.SIGKILL)
while not (shared / "go").exists(): time.sleep(0.01)
"""

# For nodes that are frozen or cut off. The loss of a killed node is seen at once
SILENT = "--lost-after-s=3"


class Nodes:
    """Agents of one job on this machine, with one rank each. `forks` starts agents whose ranks import torch."""

    def __init__(
        self, folder: Path, limits: str, *options: str, net: Net | None = None, forks: Forks | None = None
    ) -> None:
        self.net, self.master = net, net.nodes[0].ip if net is not None else "127.0.0.1"
        self.folder, self.forks, self.port = folder, forks, free_port()
        self.job: Any = Job() if forks is None else fork_server.Job([])
        self.words: tuple[object, ...] = (folder / "shared",)
        self.limits, self.options = (f"--nnodes={limits}", "--join-timeout-s=100"), options
        self.agents: dict[int, psutil.Process] = {}
        (folder / "shared").mkdir()
        (folder / "job.py").write_text(TEXT)

    def add(self, node: int, env: dict[str, str] | None = None) -> None:
        # A restarted agent waits until the leader calls it. A busy leader may need more than the usual 4 s
        patience = ("--wait-for-node=60",) if node in self.agents else ()
        line: Any = ("launch", *self.limits, f"--node-rank={node}", f"--master-addr={self.master}",
                     f"--master-port={self.port}", f"--run-dir={self.folder}/runs{node}", *self.options, *patience,
                     self.folder / "job.py", *self.words)
        if self.forks is not None:
            self.job.processes += self.forks.start(*line, env=env).processes
        else:
            prefix = self.net.nodes[node].prefix if self.net is not None else []
            start(*prefix, sys.executable, "-m", "rankup", *line, job=self.job, env=env)
        self.agents[node] = psutil.Process(self.job.processes[-1].pid)

    def start(self, *envs: dict[str, str] | None) -> None:
        """Start the first agents, node 0 last, because it founds the job without nodes that come seconds later."""
        for node, env in reversed([*enumerate(envs)]):
            self.add(node, env)
        self.job.processes.reverse()

    def begin(self, count: int, env: dict[str, str] | None = None) -> int:
        """Start `count` agents. Return the number of their first attempt."""
        self.start(*[env] * count)
        return self.attempt(count)

    def kill(self, node: int) -> None:
        """Kill the agent and its ranks."""
        for process in [self.agents[node], *self.agents[node].children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def attempt(self, world_size: int, *, after: int = -1) -> int:
        """Wait for the next attempt with `world_size` ranks, and return its number."""
        def found() -> list[int]:
            names = [path.name.split("-") for path in (self.folder / "shared").glob(f"*-of-{world_size}")]
            starts = [int(name[0]) for name in names]
            return [number for number in starts if number > after and starts.count(number) == world_size]

        return int(min(wait_for(f"an attempt of {world_size} ranks", found)))

    def of_rank(self, rank: int, attempt: int) -> int:
        """Return the node whose agent started that rank."""
        path = next((self.folder / "shared").glob(f"{attempt}-{rank}-of-*"))
        parents = psutil.Process(int(path.read_text().split()[1])).parents()
        return next(node for node, agent in self.agents.items() if agent in parents)

    def shown(self, node: int) -> str:
        """Return what that node's folder says about the nodes."""
        return "".join(path.read_text() for path in (self.folder / f"runs{node}").glob("job/status/*/progress-*.json"))

    def jobs(self) -> set[str]:
        return {path.read_text().split()[0] for path in (self.folder / "shared").glob("*-of-*")}

    def ranks(self, node: int) -> int:
        """Return how many ranks of that node run."""
        count = 0
        for process in self.agents[node].children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                count += "job.py" in " ".join(process.cmdline())
        return count

    def go(self) -> None:
        (self.folder / "shared/go").touch()


def test_node_that_is_asked_to_leave_ends_nothing_else(tmp_path: Path) -> None:
    """Also while the leader is lost, and if the node itself leads."""
    nodes = Nodes(tmp_path, "1:5", "--wait-for-node=1")
    with ended(nodes.job) as job:
        attempt = nodes.begin(5)
        for node, left in ((4, 4), (3, 2), (1, 1)):
            if node == 3:
                nodes.kill(0)
            nodes.agents[node].terminate()
            attempt = nodes.attempt(left, after=attempt)
            assert job.processes[node].wait(100) == 143
        nodes.go()
        assert job.wait() == [-9, 143, 0, 143, 143], job.output
    assert "this node leaves, and the job goes on without it" in job.outputs[1]
    assert len(nodes.jobs()) == 1


def test_script_that_ends_with_0_during_a_change_of_nodes_restarts(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:2", "--wait-for-node=0.5")
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    (tmp_path / "job.py").write_text(handler + TEXT)
    with ended(nodes.job) as job:
        first = nodes.begin(1)
        nodes.add(1)
        nodes.attempt(2, after=first)
        nodes.go()
        assert job.wait() == [0, 0], job.output


def test_leader_whose_ranks_keep_failing_is_left_out(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:3", "--wait-for-node=1", "--max-failures-per-node=2")
    with ended(nodes.job) as job:
        nodes.start({"BAD": ""}, None, None)
        nodes.attempt(2)
        assert job.processes[0].wait(100) == 172
        nodes.go()
        assert job.wait() == [172, 0, 0], job.output
    assert len([*(tmp_path / "shared").glob("*-0-of-3")]) == 2, job.output
    assert "this node is left out: rank" in job.outputs[0]
    assert "(node 0 on " in job.outputs[1]


def test_job_ends_if_it_needs_a_failing_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3", "--wait-for-node=0.5", "--max-failures-per-node=2")
    with ended(nodes.job) as job:
        nodes.add(0)
        nodes.add(1, env={"BAD": ""})
        assert job.wait() == [137, 137], job.output
    assert "failure 2 of its ranks, and too few nodes are left without that one" in job.outputs[0]


# Cut networks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    """Two machines."""
    namespaces.need()
    made = Net(tmp_path / "net", 2)
    yield made
    made.close()


def test_node_1_continues_after_node_0_with_a_shared_folder(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:2", "--wait-for-node=0.5", f"--shared-dir={tmp_path}/places")
    with ended(nodes.job) as job:
        first = nodes.begin(2)
        nodes.kill(0)
        second = nodes.attempt(1, after=first)
        nodes.add(0)
        nodes.attempt(2, after=second)
        nodes.go()
        assert job.wait() == [-9, 0, 0], job.output
    assert "this node leads from now on" in job.outputs[1]
    assert "another node leads" in job.outputs[2]
    assert len(nodes.jobs()) == 1


def test_one_of_two_cut_apart_nodes_continues_once_the_object_store_answers(net: Net, s3: S3, tmp_path: Path) -> None:
    """Each node reaches the store through its own door. At first one door is deaf, and the other overloaded."""
    shared = f"--shared-dir=s3://{BUCKET}/{tmp_path.name}"
    nodes = Nodes(tmp_path, "1:2", "--wait-for-node=0.5", SILENT, shared, net=net)
    answers, port = threading.Event(), free_port()
    with ended(nodes.job) as job, ExitStack() as doors:
        deaf, overloaded = (doors.enter_context(s3.door(listener=node.listener(port))) for node in net.nodes)
        first = nodes.begin(2, deaf.env)
        deaf.rule = lambda request: answers.wait(100) and None
        overloaded.rule = lambda request: None if answers.is_set() else 503
        net.cut(1)

        def tries(door: Door) -> int:
            return sum(request.name.endswith("-after-1.json") and request.method == "PUT" for request in door.seen)

        def alone() -> list[Path]:
            return [*(tmp_path / "shared").glob("*-of-1")]

        wait_for("two attempts of both nodes to claim", lambda: min(tries(deaf), tries(overloaded)) > 1 or alone())
        assert not alone(), "a node continued although the store has not answered"
        before = tries(deaf), tries(overloaded)
        answers.set()
        second = nodes.attempt(1, after=first)
        other = 1 - nodes.of_rank(0, second)
        wait_for("two attempts of the other node", lambda: tries((deaf, overloaded)[other]) > before[other] + 1)
        assert sorted(nodes.ranks(node) for node in (0, 1)) == [0, 1], "not exactly one node continues"
        net.mend(1)
        nodes.attempt(2, after=second)
        nodes.go()
        assert job.wait() == [0, 0], job.output
    assert all("another part of the job goes on, or --shared-dir does not answer" in each for each in job.outputs)
    assert len(nodes.jobs()) == 1


def test_node_that_began_alone_uses_the_interface_to_its_newcomer(net: Net, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:2", "--wait-for-node=0.5", net=net)
    with ended(nodes.job) as job:
        first = nodes.begin(1)
        nodes.add(1)
        second = nodes.attempt(2, after=first)
        nodes.go()
        assert job.wait() == [0, 0], job.output
    assert {path.read_text().split()[2] for path in (tmp_path / "shared").glob(f"{second}-*")} == {"eth0"}
