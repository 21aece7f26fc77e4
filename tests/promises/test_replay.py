"""`launch --replay` repeats a run whose nodes came and went, without failures, to the same bits. With FSDP2 such a run
also continues, although each rank then holds another part of the state."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.test_membership import Nodes
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import changes, wait_for

# At two steps the ranks of the first run wait until the test has removed or added a node
SCRIPT = """
import hashlib, pathlib, sys, time
import rankup, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
shared = pathlib.Path(sys.argv[1])
job = rankup.init(shared / "run", seed=0)
points = torch.randn(70, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
loader = DataLoader(TensorDataset(points), batch_size=14, shuffle=True)
for epoch in job.epochs(6):
    for (x,) in job.batches(loader):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * job.weight
        optimizer.zero_grad()
        loss.backward()
        with job.step(loss=loss):
            optimizer.step()
        if (job.step_number, job.world_size) in ((8, 3), (17, 2)):
            (shared / f"{job.step_number}-{job.rank}").touch()
            while not (shared / "go").exists():
                time.sleep(0.01)
job.finish()
weights = b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())
if job.is_main:
    print("digest", hashlib.sha256(weights).hexdigest())
"""


@pytest.fixture
def nodes(forks: Forks, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, "2:3", "--wait-for-node=0.5", forks=forks)
    yield made
    made.job.kill()


def train(nodes: Nodes, script: str) -> None:
    """Start three nodes, and wait until all ranks wait at step 8."""
    (nodes.folder / "job.py").write_text(script)
    nodes.start(None, None, None)
    all_at(nodes, 8, 3)


def all_at(nodes: Nodes, step: int, ranks: int) -> None:
    shared = nodes.folder / "shared"
    nodes.job.wait_until(lambda: len([*shared.glob(f"{step}-*")]) == ranks, f"{ranks} ranks at step {step}")


def test_replay_of_a_run_that_lost_and_regained_a_node_gives_the_same_bits(
    nodes: Nodes, forks: Forks, tmp_path: Path
) -> None:
    run = tmp_path / "shared/run"
    train(nodes, SCRIPT)
    nodes.kill(2)
    all_at(nodes, 17, 2)
    nodes.add(2)
    assert nodes.job.wait() == [0, 0, -9, 0], nodes.job.output
    assert changes(run) == [(0, 3), (8, 2), (17, 3)], nodes.job.output
    (tmp_path / "again").mkdir()
    (tmp_path / "again/go").touch()
    line = ("launch", f"--run-dir={tmp_path}/again", f"--replay={run}")
    output = forks.ends(*line, tmp_path / "job.py", tmp_path / "again")
    first, second = [word for word in f"{nodes.job.output}\n{output}".split() if len(word) == 64]
    assert first == second, f"{nodes.job.output}\n{output}"
    for step, ranks in changes(run):
        assert f"replay: {ranks} ranks from step {step}" in output


# At step 6 each rank waits until it has written its part of the copy of step 5, which is published before step 8
SHARDED = SCRIPT.partition("job.finish()")[0]
for old, new in (
    ("from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"),
    ("model = DistributedDataParallel(model)", "fully_shard(model)"),
    ("((8, 3), (17, 2))", "((8, 3),)"),
    ("job.epochs(6)", "job.epochs(100_000)"),  # until the test stops all nodes
    ("optimizer.step()\n", "optimizer.step()\n        time.sleep(0.1 * (job.step_number > 7))\n"
     "        while job.step_number == 6 and any(each.name == 'save' for each in threading.enumerate()):\n"
     "            time.sleep(0.01)\n"),
    ("sys, time", "sys, threading, time"),
):
    assert old in SHARDED
    SHARDED = SHARDED.replace(old, new)


def test_fsdp_continues_after_a_node_is_lost_and_after_it_returns(nodes: Nodes) -> None:
    run = nodes.folder / "shared/run"
    train(nodes, SHARDED)
    nodes.kill(2)
    wait_for("a change to 2 ranks", lambda: len(changes(run)) == 2, log=lambda: nodes.job.output)
    (nodes.folder / "shared/go").touch()
    nodes.add(2)
    wait_for("a change to 3 ranks", lambda: len(changes(run)) == 3, log=lambda: nodes.job.output)
    for agent in nodes.agents.values():
        agent.terminate()
    assert nodes.job.wait() == [143, 143, -9, 143], nodes.job.output
    (_, three), (lost, two), (came, again) = changes(run)
    assert [three, two, again] == [3, 2, 3]
    assert lost == 5 <= came, "the run did not go on from the copy of step 5"
