"""`launch --replay`: a run whose nodes came and went is trained again, without failures, to the same bits."""

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
