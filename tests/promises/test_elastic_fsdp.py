"""FSDP2 goes on after a node was lost and after one came: each rank holds another part of the state then."""

import json
from pathlib import Path

from tests.agent.test_membership import Nodes
from tests.promises.test_replay import SCRIPT
from tests.rigs.jobs import ended, wait_for

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
