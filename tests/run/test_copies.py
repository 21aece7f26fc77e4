"""Without a shared disk a second node also keeps the newest checkpoint, which is used if node 0's disk is lost.

Each rank has its own working directory with its own run directory, which makes it a "node" here.
"""

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankup.agent.logs import host_name
from rankup.places.files import STAGING
from rankup.state import copies as state_copies
from rankup.state.choice import SecondCopies
from rankup.state.copies import STATE, to_json
from rankup.state.place import SECOND, Folder
from rankup.state.saver import Options, Saver
from tests.rigs.checkpoints import SETTINGS, flip, load_checkpoint, save, steps, training_state
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import comparable_metrics, outcome, result

LINE = ("train", *SETTINGS, "--run-dir=runs", "--name=run", "--save-every-steps=8")
# The signal comes in step 9, and the ranks agree to stop two steps later
STOP: dict[str, Any] = {"where": "loss", "call": 11, "signal": "SIGTERM", "rank": 0}
HOST = host_name()
FROM_COPY = f"the second copy on {HOST} (rank 1)"


class Nodes:
    """Two nodes without a shared disk."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.folders = forks, [folder / "node0", folder / "node1"]
        for path in self.folders:
            path.mkdir(parents=True)

    def run(self, *more: str, code: int = 0, **order: Any) -> str:
        env = {"PROBE": json.dumps(order)} if order else {}
        output = self.forks.ends(*LINE, *more, world_size=2, cwds=self.folders, env=env, code=code)
        assert "Traceback" not in output
        return output

    def runs(self, node: int) -> Path:
        return self.folders[node] / "runs" / "run"

    def copies(self, node: int = 1) -> list[Path]:
        return sorted(self.runs(node).glob(f"{SECOND}/*/step-*"))

    def lose(self, node: int = 0) -> None:
        """Replace this node by one with an empty disk."""
        shutil.rmtree(self.folders[node])
        self.folders[node].mkdir()


@pytest.fixture
def nodes(forks: Forks, tmp_path: Path) -> Nodes:
    return Nodes(forks, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result and metrics of an undisturbed run."""
    nodes = Nodes(forks, tmp_path_factory.mktemp("undisturbed"))
    output = nodes.run()
    assert "also keeps the newest checkpoint, because the nodes share no disk\n" in output
    assert steps(nodes.runs(0) / "checkpoints") == [24, 32]
    assert [path.name for path in nodes.copies()] == ["step-00000032"]
    assert nodes.copies(0) == []
    return outcome(nodes.runs(0))


# Node 0 comes back with an empty disk ---------------------------------------------------------------------------


def test_run_resumes_from_the_second_copy_to_the_same_weights(nodes: Nodes, undisturbed: dict[str, Any]) -> None:
    nodes.run(code=143, **STOP)
    (copied,) = nodes.copies()
    own, (step,) = nodes.runs(0) / "checkpoints" / copied.name, steps(copied.parent)
    for name in ("model.safetensors", "optimizer.safetensors", "tree.json"):
        assert (copied / name).read_bytes() == (own / name).read_bytes()
    assert load_checkpoint(copied).record["written_by"].startswith("rank 1 on ")
    assert not (nodes.runs(1) / "checkpoints").exists()
    assert not (nodes.runs(1) / "metrics.jsonl").exists()
    nodes.lose()
    output = nodes.run()
    assert f"resumed from step {step}, {FROM_COPY}\n" in output
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]
    later = [entry for entry in undisturbed["metrics"] if entry["step"] > step]
    assert [entry for entry in comparable_metrics(nodes.runs(0)) if entry["step"] > step] == later
    nodes.lose()  # after the end of the run: no step is repeated
    output = nodes.run()
    assert f"resumed from step 32, {FROM_COPY}" in output
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]
    assert "is finished: 32 steps" in nodes.run()


def test_rescue_on_the_other_node_is_found_too(nodes: Nodes, undisturbed: dict[str, Any]) -> None:
    there = nodes.folders[0] / "there"
    order = {"where": "loss", "call": 12, "rank": 0, "tell": str(there), "until": "never"}
    more: dict[str, Any] = {"world_size": 2, "cwds": nodes.folders, "env": {"PROBE": json.dumps(order)}}
    with nodes.forks.running(*LINE, **more) as job:
        job.wait_until(lambda: there.exists() and nodes.copies() != [], "step 10, and the copy of step 8")
        job.processes[0].signal("SIGKILL")
        assert job.wait() == [-9, 171], job.output
    nodes.lose()
    assert "resumed from step 9, rescued by rank 1 on " in nodes.run()
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]


def test_nodes_in_another_order_resume_from_the_newest_copy(nodes: Nodes, undisturbed: dict[str, Any]) -> None:
    """Slurm may change their order. The checkpoints become node 1's, and later node 0's again, but outdated."""
    nodes.run(code=143, **STOP)
    nodes.folders.reverse()
    assert f"resumed from step 10, the second copy on {HOST} (rank 0)" in nodes.run(code=143, **STOP)
    nodes.folders.reverse()
    output = nodes.run()
    assert f"resumed from step 20, the second copy on {HOST} (rank 0)" in output
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]


# Which copy is used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", STATE])
def test_damaged_copy_never_leads_to_a_silent_fresh_start(
    nodes: Nodes, undisturbed: dict[str, Any], name: str
) -> None:
    nodes.run(code=143, **STOP)
    (copied,) = nodes.copies()
    flip(copied / name, 20)
    if name == "model.safetensors":
        nodes.lose()
        output = nodes.run(code=2)
        assert f"got only damaged ones: step {int(copied.name[5:])}, {FROM_COPY}: " in output
        assert f"{name} does not match its digest" in output
        return
    assert "resumed from step-00000010" in nodes.run()
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]
    assert [path.name for path in nodes.copies()] == ["step-00000032"]


def test_other_settings_are_refused_and_fresh_uses_no_copy(nodes: Nodes) -> None:
    nodes.run(code=143, **STOP)
    nodes.lose()
    assert "was begun with other settings: lr: 0.08 -> 0.25" in nodes.run("--lr=0.25", code=2)
    assert len(nodes.copies()) == 1
    output = nodes.run("--lr=0.25", "--fresh", code=143, **STOP | {"call": 3})  # before its first checkpoint
    assert "resumed" not in output
    assert "copies this node's second copies of an earlier run were moved to " in output
    assert f"begins anew: step 10, {FROM_COPY}, is of another run and not used\n" in output
    (aside,) = nodes.runs(1).glob(f"before-*-{SECOND}-*/step-*")
    assert load_checkpoint(aside).record["config"]["lr"] == 0.08
    nodes.lose()
    assert "resumed from step 2, " in nodes.run("--lr=0.25", "--max-steps=4")


def test_disk_that_cannot_keep_a_copy_gives_one_line_and_training_continues(
    nodes: Nodes, undisturbed: dict[str, Any]
) -> None:
    nodes.runs(1).mkdir(parents=True)
    (nodes.runs(1) / SECOND).write_text("in the way")
    output = nodes.run()
    assert output.count("no second copy: checkpoint: runs/run/copies") == 1
    assert result(nodes.runs(0))["digest"] == undisturbed["digest"]


def test_shared_disk_gets_no_second_copy(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*LINE, world_size=2, cwds=[tmp_path, tmp_path])
    assert "copies " not in output
    assert not (tmp_path / "runs" / "run" / SECOND).exists()


# The writer ----------------------------------------------------------------------------------------------------


class Writer:
    """A writer of second copies, with the warnings that it logged and the folder of its copies."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        log = SimpleNamespace(warning=self.said.append, debug=lambda text: None)
        group: Any = SimpleNamespace(
            is_rank0=False, rank=1, run_dir=folder, max=int, gather=lambda value: [value], device=torch.device("cpu"),
            log=log, watch=SimpleNamespace(enter=lambda *_, **__: None), world_size=2,
        )
        second = SecondCopies(group).of("run")
        self.folder = second.path
        self.saver = Saver(
            group, Folder(folder / "checkpoints"), Options(sharded=False), token="it", saved=lambda step: None,
            second=second,
        )

    def save(self, step: int, *, wait: bool = False) -> None:
        tracked = {"model": {"weight": torch.full((3,), float(step))}, "optimizer": {}, "scaler": {}}
        self.saver.save(step, lambda: to_json(training_state(step)), tracked, wait=wait)


def test_slow_disk_skips_copies_except_the_last_and_removes_outdated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write, writer, written = threading.Event(), state_copies.write_durably, Writer(tmp_path), set[str]()
    save(writer.folder, 40)

    def slow(path: Path, content: Any) -> Any:
        go_on.wait(60)
        written.add(path.parent.name.removeprefix(STAGING)[:13])
        return write(path, content)

    monkeypatch.setattr(state_copies, "write_durably", slow)
    writer.save(4)
    writer.save(8)  # skipped, because the training does not wait
    go_on.set()
    writer.save(12, wait=True)
    writer.saver.wait_for_second()
    assert (steps(writer.folder), writer.said) == ([12], [])
    assert written == {"step-00000004", "step-00000012"}


def test_ranks_that_are_not_compared_keep_no_second_copy(nodes: Nodes) -> None:
    nodes.run("--compare-every-steps=0")
    assert nodes.copies() == []
