"""Nodes are killed, frozen, cut off and started again in random order. No step is lost, the job never splits into two
that both keep training, and a replay of the run ends with the same bits.

The seed is in the name of each test: `make unit ARGS='tests/promises/test_changes.py -k "[17]"'`. `make soak` runs 200.
`RANKUP_RUNS=100 RANKUP_SEED=1000 python -m pytest -n 4 tests/promises/test_changes.py` runs others, four at once.
"""

import contextlib
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.rigs import namespaces
from tests.rigs.fork_server import Forks, Process
from tests.rigs.jobs import free_port, metrics, wait_for
from tests.rigs.namespaces import Net

RUNS = 2 * int(os.environ.get("RANKUP_RUNS", "1"))
FIRST = int(os.environ.get("RANKUP_SEED", "2"))
STEPS = 400
SETTLE_S = 60.0

# Each rank records every step that it finishes. The steps are slow until the test creates the file `go`
SCRIPT = f"""
import hashlib, os, pathlib, socket, sys, time
import rankup, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
shared, own = pathlib.Path(sys.argv[1]), sys.argv[2] == "own"
job = rankup.init(shared / (f"run-{{socket.gethostname()}}" if own else "run"), seed=0, log_every_steps=1)
points = torch.randn(20 * 60, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
loader = DataLoader(TensorDataset(points), batch_size=60, shuffle=True)
attempt, job_id = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_RUN_ID"]
file = open(shared / f"steps/{{socket.gethostname()}}-{{os.getpid()}}", "a", buffering=1)
for epoch in job.epochs({STEPS // 20}):
    for (x,) in job.batches(loader):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * job.weight
        optimizer.zero_grad()
        loss.backward()
        with job.step(loss=loss):
            optimizer.step()
            print(job.step_number + 1, attempt, job.rank, job.world_size, time.time(), job_id, file=file)
        while job.step_number == {STEPS - 40} and not (shared / "go").exists(): time.sleep(0.01)
        time.sleep(0.0 if (shared / "go").exists() else 0.2 if job.step_number < 10 else 0.03)
job.finish()
weights = b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())
if job.is_main:
    print("digest", hashlib.sha256(weights).hexdigest())
"""


class Sequence:
    """One job, and the random faults that the test causes in its nodes."""

    def __init__(self, seed: int, folder: Path, forks: Forks) -> None:
        self.random, self.folder, self.forks = random.Random(seed), folder, forks
        choose = self.random
        self.count = choose.randint(3, 5)
        self.most = choose.randint(2, self.count)
        self.least = choose.randint(1, 2)
        self.where = choose.choice(("shared", "shared", "own"))
        self.net, self.port = Net(folder / "net", self.count), free_port()
        for node in self.net.nodes:
            node.run("mount -t tmpfs tmpfs /dev/shm")  # each node needs its own memory: a rescue is written there
        self.options = (f"--nnodes={self.least}:{self.most}", f"--spares={self.count - self.most}",
                        "--wait-for-node=0.5", "--lost-after-s=3", "--join-timeout-s=100", "--max-restarts=100")
        self.agents: dict[int, Process] = {}
        self.outputs: list[tuple[str, Process]] = []
        self.frozen: dict[int, list[psutil.Process]] = {}
        self.parted = self.killed = 0
        self.killed_pids: set[int] = set()
        self.told = [f"{self.count} nodes, {' '.join(self.options)}, {self.where}"]
        (folder / "steps").mkdir()
        (folder / "job.py").write_text(SCRIPT)

    def add(self, node: int) -> None:
        line = ("launch", *self.options, f"--node-rank={node}", f"--master-addr={self.net.nodes[0].ip}",
                f"--master-port={self.port}", f"--run-dir={self.folder}/runs{node}", self.folder / "job.py",
                self.folder, self.where)
        job = self.forks.start(*line, env=self.net.nodes[node].env, preload="tests.rigs.namespaces:enter")
        self.agents[node] = job.processes[0]
        self.outputs.append((f"node {node}", job.processes[0]))

    # The faults -----------------------------------------------------------------------------------------------------

    def tell(self, what: str) -> None:
        self.told.append(f"{time.time():.2f} {what}")

    def processes(self, node: int) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            agent = psutil.Process(self.agents[node].pid)
            return [agent, *agent.children(recursive=True)]
        return []

    def ranks(self, node: int) -> list[psutil.Process]:
        found = []
        for process in self.processes(node)[1:]:
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("rank "):
                    found.append(process)
        return found

    def kill(self, processes: list[psutil.Process]) -> None:
        self.killed_pids |= {process.pid for process in processes}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def happen(self) -> None:
        """Cause one random fault, or undo one. Choose only nodes without which the job can continue."""
        choose, up = self.random, [node for node in self.agents if node not in self.frozen]
        kinds = ["rank", "freeze", "cut", "agent", "return", "return"]
        kind = choose.choice(kinds)
        node = choose.choice(up or [0])
        if kind == "rank" and up and (ranks := self.ranks(node)):
            self.tell(f"kill the rank of node {node}")
            self.kill(ranks)
        elif kind == "freeze" and up:
            self.tell(f"freeze node {node}")
            self.frozen[node] = self.processes(node)
            for process in self.frozen[node]:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
        elif kind == "cut" and not self.parted:
            some = choose.sample(range(self.count), choose.randint(1, self.count // 2))
            others = [node for node in range(self.count) if node not in some]
            if choose.random() < 0.3:
                some, others = some[:1], others[:1]
            self.tell(f"cut {some} from {others}")
            self.parted = 1
            self.net.part(some, others)
        elif kind == "agent" and not self.parted and not self.frozen and len(up) > 2:
            self.settle()  # otherwise all nodes that know of the last change may be gone
            time.sleep(2.0)  # by then a spare has its vote
            self.tell(f"kill node {node}")
            self.kill(self.processes(node))
            del self.agents[node]
        elif kind == "return":
            gone = [node for node in range(self.count) if node not in self.agents]
            if self.parted and 0 in gone and len(gone) >= self.least:
                gone.remove(0)  # it would start a second job, see "One job, never two" in nodes.md
            back = [*self.frozen, *gone, *(["cut"] if self.parted else [])]
            if back:
                self.come_back(choose.choice(back))

    def come_back(self, what: int | str) -> None:
        if what == "cut":
            self.tell("mend the network")
            self.parted = 0
            self.net.join()
        elif what in self.frozen:
            self.tell(f"wake node {what}")
            for process in self.frozen.pop(int(what)):
                with contextlib.suppress(psutil.Error):
                    process.resume()
        else:
            self.tell(f"start node {what} again")
            self.add(int(what))

    def settle(self) -> None:
        """Wait until as many ranks as possible have finished a step in the same attempt."""
        wanted, began_s = min(self.most, len(self.agents)), time.time()

        def there() -> bool:
            found = [each for each in self.steps() if each["time"] > began_s]
            newest = max((each["attempt"] for each in found), default=0)
            ranks = {(each["rank"], each["world"]) for each in found if each["attempt"] == newest}
            return ranks == {(rank, wanted) for rank in range(wanted)}

        until_s = time.monotonic() + SETTLE_S
        while not there():
            if self.furthest() >= STEPS - 40:
                return
            assert time.monotonic() < until_s, f"no attempt with {wanted} ranks finished a step within {SETTLE_S:g} s"
            time.sleep(0.05)

    def steps(self) -> list[dict]:
        found = []
        for path in (self.folder / "steps").iterdir():
            node, _, pid = path.name.partition("-")
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    step, attempt, rank, world, at, job = line.split()
                    found.append({"step": int(step), "attempt": int(attempt), "rank": int(rank), "world": int(world),
                                  "time": float(at), "job": job, "node": node, "pid": int(pid)})
        return sorted(found, key=lambda each: each["time"])

    def furthest(self) -> int:
        return max((each["step"] for each in self.steps()), default=0)

    def run(self) -> None:
        for node in range(self.count):
            self.add(node)
        wait_for("a step", lambda: self.furthest() > 2)
        for _ in range(self.random.randint(3, 7)):
            if self.furthest() > STEPS - 80:
                break
            time.sleep(self.random.choice((0.05, 0.5, 1.0, 3.0, 4.0)))
            self.happen()
        for what in [*self.frozen, *(["cut"] if self.parted else [])]:
            self.come_back(what)
        for node in range(self.count):
            if node not in self.agents and self.random.random() < 0.5:
                self.come_back(node)
        self.finish()

    def finish(self) -> None:
        self.settle()
        (self.folder / "go").touch()
        self.tell("go")
        until_s = time.monotonic() + 100
        for node, agent in self.agents.items():
            assert agent.ended.wait(max(0.0, until_s - time.monotonic())), f"node {node} does not end"
        codes = {node: agent.code for node, agent in self.agents.items()}
        assert set(codes.values()) == {0}, f"exit codes {codes}"

    # The checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        steps = self.steps()
        assert len({each["job"] for each in steps}) == 1, "there were two jobs"
        members = defaultdict(set)
        for each in steps:
            members[each["attempt"]].add((each["node"], each["rank"], each["world"], each["pid"]))
        for attempt, found in members.items():
            assert len({rank for _, rank, _, _ in found}) == len(found), f"attempt {attempt} has a rank twice: {found}"
            assert len({world for _, _, world, _ in found}) == 1, f"attempt {attempt}: world sizes differ: {found}"
        # An attempt may repeat a step only if no node that had finished the step takes part. When such a node returns
        # later, the other nodes have already computed the step again
        world, firsts = dict[int, int](), dict[int, int]()
        for attempt in sorted(members):
            its = [each for each in steps if each["attempt"] == attempt]
            first = min(each["step"] for each in its)
            nodes = {each["node"] for each in its}
            for each in steps:
                if each["attempt"] < attempt and each["node"] in nodes and each["pid"] not in self.killed_pids:
                    anew = any(each["attempt"] < other and firsts[other] <= each["step"] for other in firsts)
                    assert each["step"] < first or anew, f"attempt {attempt} repeats step {first}, despite {each}"
            firsts[attempt] = first
            assert first <= max(world, default=0) + 1, f"attempt {attempt} begins at step {first} after {max(world)}"
            for each in its:
                world[each["step"]] = each["world"]
            began_s = min(each["time"] for each in its)
            late = defaultdict(int)
            for each in steps:
                if each["attempt"] < attempt and each["time"] > began_s:
                    late[each["pid"]] += 1
            assert all(count == 1 for count in late.values()), f"an earlier attempt trains beside {attempt}: {late}"
        assert sorted(world) == list(range(1, STEPS + 1)), "steps are missing"
        runs = [*self.folder.glob("run*/metrics.jsonl")]
        self.run_dir = max(runs, key=lambda path: path.stat().st_mtime).parent
        entries = metrics(self.run_dir)
        lines = [each["step"] for each in entries if "train/loss" in each]
        begin = 1 if self.where == "shared" else lines[0]  # earlier lines are on the node that had rank 0 before
        assert lines == [*range(begin, STEPS + 1)], "metrics.jsonl"
        record = json.loads((self.run_dir / f"checkpoints/step-{STEPS:08d}/state.json").read_text())
        said = [dict(record["world_sizes"])]
        said += [{e["step"]: e["job/ranks"] for e in entries if "job/ranks" in e}] if begin == 1 else []
        for changes in said:
            now = 0
            for step in range(1, STEPS + 1):
                now = changes.get(step - 1, now)
                assert world[step] == now, f"step {step} had {world[step]} ranks, the record says {now}"

    def replay(self) -> None:
        again = self.folder / "again"
        (again / "steps").mkdir(parents=True)
        (again / "go").touch()
        line = ("launch", f"--run-dir={again}", f"--replay={self.run_dir}", self.folder / "job.py", again, "shared")
        output = self.forks.ends(*line)
        digests = [word for _, process in self.outputs for word in process.output.split() if len(word) == 64]
        digests += [word for word in output.split() if len(word) == 64]
        # A node that joins just after the last step may make the others restart and print the digest again
        assert len(digests) > 1, (digests, output)
        assert len({*digests}) == 1, f"the replay ends with different bits: {digests}\n{output}"

    def all(self) -> None:
        """Run the job, check it and replay it. Raises AssertionError with the list of faults and all output."""
        try:
            self.run()
            self.check()
            self.replay()
        except AssertionError as error:
            outputs = "\n".join(f"--- {who}, {process.code}\n{process.output}" for who, process in self.outputs)
            told = "\n".join(self.told)
            raise AssertionError(f"{error}\n{told}\n{outputs}") from None

    def close(self) -> None:
        for node in [*self.agents]:
            self.kill(self.processes(node))
        self.net.close()


@pytest.fixture
def sequence(request: pytest.FixtureRequest, tmp_path: Path, forks: Forks) -> Iterator[Sequence]:
    namespaces.need()
    made = Sequence(request.param, tmp_path, forks)
    yield made
    made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sequence", range(FIRST, FIRST + RUNS), indirect=True)
def test_random_faults_of_nodes_lose_no_step_and_replay_to_the_same_bits(sequence: Sequence) -> None:
    sequence.all()


@pytest.mark.parametrize("sequence", [4], indirect=True)
def test_losing_node_0_and_its_disk_before_the_first_checkpoint_loses_no_step(sequence: Sequence) -> None:
    assert sequence.where == "own"
    for node in range(sequence.count):
        sequence.add(node)
    wait_for("steps", lambda: sequence.furthest() > 3)
    sequence.kill(sequence.processes(0))
    del sequence.agents[0]
    sequence.finish()
    sequence.check()


@pytest.mark.parametrize("sequence", [31], indirect=True)
def test_job_that_went_on_with_one_node_takes_the_others_back(sequence: Sequence) -> None:
    for node in range(3):
        sequence.add(node)
    sequence.settle()
    for node in (1, 2):
        sequence.kill(sequence.processes(node))
        del sequence.agents[node]
        sequence.settle()
    for node in (1, 2):
        sequence.add(node)
    sequence.finish()
    sequence.check()
