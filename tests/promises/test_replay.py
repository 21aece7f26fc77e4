"""A run whose nodes came and went: `launch --replay` trains it again, without failures, to the same bits. FSDP2 goes on
too, although each rank holds another part of the state then."""

import json
import sys
from pathlib import Path

from tests.agent.test_membership import Nodes
from tests.rigs.jobs import Job, ended, start, wait_for

# Two places at which the ranks of the first run wait for what happens to a node
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


def test_replay_of_a_run_that_lost_a_node_and_got_it_back_ends_with_the_same_bits(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3", "--wait-for-node=0.5")
    (tmp_path / "job.py").write_text(SCRIPT)
    shared = tmp_path / "shared"

    def all_at(step: int, ranks: int) -> None:
        wait_for(f"{ranks} ranks at step {step}", lambda: len([*shared.glob(f"{step}-*")]) == ranks)

    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        all_at(8, 3)
        nodes.kill(2)
        all_at(17, 2)
        nodes.add(2)
        job.wait()
    entries = [json.loads(line) for line in (shared / "run/metrics.jsonl").read_text().splitlines()]
    changes = [(entry["step"], entry["job/ranks"]) for entry in entries if "job/ranks" in entry]
    assert changes == [(0, 3), (8, 2), (17, 3)], job.output
    (tmp_path / "again").mkdir()
    (tmp_path / "again/go").touch()
    line = ("-m", "rankup", "launch", f"--run-dir={tmp_path}/again", f"--replay={shared / 'run'}")
    again = start(sys.executable, *line, tmp_path / "job.py", tmp_path / "again", job=Job())
    with ended(again):
        assert again.wait() == [0], again.output
    first, second = [word for word in f"{job.output}\n{again.output}".split() if len(word) == 64]
    assert first == second, f"{job.output}\n{again.output}"
    for step, ranks in changes:
        assert f"replay: {ranks} ranks from step {step}" in again.output


# FSDP2 --------------------------------------------------------------------------------------------------------------

SHARDED = SCRIPT.partition("weights = ")[0]
for old, new in (
    ("from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"),
    ("model = DistributedDataParallel(model)", "fully_shard(model)"),
    ("((8, 3), (17, 2))", "((8, 3),)"),
    ("job.epochs(6)", "job.epochs(40)"),
    ("optimizer.step()\n", "optimizer.step()\n        time.sleep(0.3 * (job.world_size == 2))\n"),
):
    assert old in SHARDED
    SHARDED = SHARDED.replace(old, new)


def test_fsdp_goes_on_after_a_node_was_lost_and_after_it_came_back(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3", "--wait-for-node=0.5")
    (tmp_path / "job.py").write_text(SHARDED)
    shared = tmp_path / "shared"

    def changes() -> list[tuple[int, int]]:
        path = shared / "run/metrics.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(entry["step"], entry["job/ranks"]) for entry in entries if "job/ranks" in entry]

    with ended(nodes.job) as job:
        for node in range(3):
            nodes.add(node)
        wait_for("3 ranks at step 8", lambda: len([*shared.glob("8-*")]) == 3)
        nodes.kill(2)
        wait_for("a change to 2 ranks", lambda: len(changes()) == 2)
        nodes.add(2)
        assert job.wait() == [0, 0, -9, 0], job.output
    (_, three), (lost, two), (came, again) = changes()
    assert [three, two, again] == [3, 2, 3]
    assert 0 < lost <= 8 <= came, "it began anew"
