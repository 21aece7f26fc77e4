"""Sharded checkpoints: each rank writes its part, whole or not at all. They resume and load wherever plain ones do."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from rankup import cli
from rankup.errors import UserError
from rankup.state.copies import list_copies
from rankup.state.tree import TensorFile
from tests.rigs.checkpoints import find_problem, fingerprint, flip, load_checkpoint
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, result
from train.run import weights

# 8 steps an epoch
LINE = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--max-steps", "12",
        "--save-every-steps", "3", "--schedule", "constant", "--log-every-steps", "1", "--tensorboard=false",
        "--name", "run")
FSDP = ("--parallel", "fsdp")
SHARDED = (*FSDP, "--checkpoint-format", "sharded")


def train(forks: Forks, folder: Path, world_size: int, *more: str, **others: Any) -> str:
    return forks.ends(*LINE, *more, "--run-dir", folder, world_size=world_size, **others)


def newest(folder: Path) -> Path:
    return list_copies(folder / "run" / "checkpoints")[-1]


def digest(folder: Path) -> str:
    return str(result(folder / "run")["digest"])


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks' run, with checkpoints of steps 9 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    train(forks, folder, 2, *SHARDED, "--optimizer", "adamw", "--lr", "0.01")
    return folder


# Content ---------------------------------------------------------------------------------------------------------


def test_each_ranks_part_is_plain_safetensors(trained: Path) -> None:
    path, ranks = newest(trained), ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *ranks, "state.json", "tree.json"]
    parts = [load_file(path / name) for name in ranks]
    whole = {name: torch.cat([part[f"model/{name}"] for part in parts]) for name in plain_model().state_dict()}
    assert weights.digest(whole) == digest(trained)


def test_sharded_format_changes_no_bit(forks: Forks, trained: Path, tmp_path: Path) -> None:
    train(forks, tmp_path, 2, *FSDP, "--optimizer", "adamw", "--lr", "0.01")
    assert digest(tmp_path) == digest(trained)
    one, other = load_checkpoint(newest(tmp_path)), load_checkpoint(newest(trained))
    assert weights.digest(one.tracked["model"]) == weights.digest(other.tracked["model"]) == digest(trained)
    names = one.tracked["optimizer"]["state"].keys()
    assert names == other.tracked["optimizer"]["state"].keys() != set()
    for name in names:
        a, b = (found.tracked["optimizer"]["state"][name] for found in (one, other))
        assert a.keys() == b.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(a[key], b[key]) for key in a)


# Resuming -------------------------------------------------------------------------------------------------------


def no_part() -> None:
    """In the process of a rank: make rank 1 fail to determine its part."""
    from rankup.errors import UserError
    from rankup.state import saver

    def fails(*given: Any) -> Any:
        raise UserError("state: it must be split by Shard and Replicate.")

    if os.environ["RANK"] == "1":
        saver.own_parts = fails


def test_rank_that_fails_to_split_ends_all_ranks_with_one_line(forks: Forks, tmp_path: Path) -> None:
    line, preload = (*LINE, *SHARDED, "--run-dir", tmp_path), f"{__name__}:no_part"
    output = forks.ends(*line, world_size=2, preload=preload, code=2)
    assert output.count("error: state: it must be split by Shard and Replicate.") == 1, output
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# From and to: sharded and plain, other numbers of ranks, other methods
CHANGES: dict[str, tuple[tuple[int, tuple[str, ...]], tuple[int, tuple[str, ...]]]] = {
    "two ranks to one": ((2, SHARDED), (1, SHARDED)),
    "two ranks to four": ((2, SHARDED), (4, SHARDED)),
    "sharded to plain": ((2, SHARDED), (2, FSDP)),
    "sharded to none": ((2, SHARDED), (1, ("--parallel", "none"))),
    "ddp to sharded": ((2, ("--parallel", "ddp")), (4, SHARDED)),
    "ddp to plain fsdp": ((2, ("--parallel", "ddp")), (2, FSDP)),
}


DIGITS = ("--workload", "images", "--dataset", "digits", "--model", "mlp", "--batch-size", "64")


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one undisturbed process. There is no dropout, because each rank draws its own."""
    folder = tmp_path_factory.mktemp("alone")
    train(forks, folder, 1, *DIGITS)
    return load_checkpoint(newest(folder)).tracked["model"]


@pytest.mark.parametrize("change", CHANGES)
def test_run_resumes_in_another_way(forks: Forks, alone: dict[str, torch.Tensor], tmp_path: Path, change: str) -> None:
    """The momentum is kept too, so that the weights equal those of one process except for the last bits."""
    (first, settings), (then, others) = CHANGES[change]
    train(forks, tmp_path, first, *DIGITS, *settings, "--max-steps", "5")
    output = train(forks, tmp_path, then, *DIGITS, *others)
    assert "resumed from step-00000005" in output
    if settings[1] != others[1]:
        assert f"parallel was {settings[1]}, is {others[1]}: the run goes on, but its last bits will differ" in output
    found = load_checkpoint(newest(tmp_path)).tracked["model"]
    assert all(torch.allclose(found[name], alone[name], rtol=1e-4, atol=1e-6) for name in alone)


# Weights --------------------------------------------------------------------------------------------------------


def test_export_is_one_plain_file(forks: Forks, trained: Path, tmp_path: Path) -> None:
    codes, output = forks.run("export", newest(trained), tmp_path / "new" / "w.pt", "--item", "model")
    assert codes == [0], output
    assert "model of step 12, 0.0 MB" in output
    model = plain_model()
    model.load_state_dict(torch.load(tmp_path / "new" / "w.pt"))
    assert weights.digest(model.state_dict()) == digest(trained)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["w.pt"]
    assert cli.main(["export", str(newest(trained)), str(tmp_path / "all.pt")]) == 0
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert weights.digest(whole["model"]) == digest(trained)
    assert whole.keys() == {"model", "optimizer", "scaler"}
    codes, output = forks.run("export", newest(trained), "/dev/null/w.pt")
    assert codes == [2], output
    assert "export: /dev/null must be writable, got " in output


def test_evaluation_reads_a_sharded_checkpoint(forks: Forks, trained: Path) -> None:
    codes, output = forks.run("evaluate", *LINE[1:3], "--name", "run", "--run-dir", trained, world_size=2)
    assert codes == [0, 0], output
    assert digest(trained)[:16] in output


def test_another_run_starts_from_a_sharded_checkpoint(forks: Forks, trained: Path, tmp_path: Path) -> None:
    output = train(forks, tmp_path, 1, "--init-from", str(newest(trained)), "--max-steps", "1", "--lr", "1e-12")
    assert "4 of 4 tensors" in output
    shutil.copytree(newest(trained), tmp_path / "damaged")
    flip(tmp_path / "damaged" / "rank-00001.safetensors", 200)
    line = (*LINE, "--init-from", tmp_path / "damaged", "--run-dir", tmp_path, "--name=other")
    assert "got a damaged one: rank-00001.safetensors" in forks.ends(*line, code=2)


# Damage ---------------------------------------------------------------------------------------------------------


def seal(path: Path) -> None:
    """Make every digest right, as an attacker would who wants the content to be read."""
    files = {file.name: fingerprint(file.read_bytes()) for file in path.iterdir() if file.name != "manifest.json"}
    (path / "manifest.json").write_text(json.dumps({"step": int(path.name[5:]), "files": files}))


def move(path: Path, *place: list[int]) -> None:
    """Move rank 1's part of a tensor to another place."""
    file = path / "rank-00001.safetensors"
    with safe_open(file, framework="pt") as opened:
        places = json.loads(opened.metadata()["places"])
        parts = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    places["model/0.weight"] = place
    file.write_bytes(b"".join(TensorFile(parts, places)))
    seal(path)


@pytest.mark.parametrize("place", [([9, 0], [16, 8]), (["x", 0], [16, 8]), ([8], [16, 8]), None])
def test_missing_or_misplaced_part_is_one_line_and_fills_no_tensor(trained: Path, tmp_path: Path, place: Any) -> None:
    """Even if every digest is right. test_tree.py has damaged and missing files."""
    path = tmp_path / "step-00000012"
    shutil.copytree(newest(trained), path)
    if place is None:
        (path / "rank-00001.safetensors").unlink()
        seal(path)
    else:
        move(path, *place)
    with pytest.raises(UserError, match=r"its files don't fit together \("):
        load_checkpoint(path)


def record_reads() -> None:
    """In the process of a rank: record which files are read of all checkpoints except the newest."""
    rank = os.environ.get("RANK", "0")

    def note(event: str, values: tuple[Any, ...]) -> None:
        path = Path(str(values[0])) if event == "open" else Path()
        if path.suffix != ".safetensors" and path.name not in ("tree.json", "state.json"):
            return
        step = path.parent
        newest = max((other.name for other in step.parent.glob("step-*")), default="")
        if step.parent.name == "checkpoints" and step.name != newest and values[2] & os.O_ACCMODE == os.O_RDONLY:
            with Path(f"{os.environ['READS']}-{rank}").open("a") as file:
                file.write(f"{path}\n")

    sys.addaudithook(note)


@pytest.mark.parametrize("more", [("--parallel", "ddp"), SHARDED], ids=["plain", "sharded"])
def test_save_reads_neither_its_own_files_nor_older_ones(forks: Forks, tmp_path: Path, more: tuple[str, ...]) -> None:
    preload = "tests.state.test_shards:record_reads"
    train(forks, tmp_path, 2, *more, "--keep", "3", preload=preload, env={"READS": str(tmp_path / "reads")})
    assert [path.read_text() for path in tmp_path.glob("reads-*")] == []
    found = {path.name: find_problem(path) for path in list_copies(tmp_path / "run/checkpoints")}
    assert found == {"step-00000008": "", "step-00000009": "", "step-00000012": ""}


# Disks ----------------------------------------------------------------------------------------------------------


OWN_LOOP = (ROOT / "tests" / "rigs" / "struck.py", ROOT / "tests" / "rigs" / "split_loop.py")


@pytest.mark.parametrize(
    ("line", "preload"), [((*LINE, *SHARDED), ""), (OWN_LOOP, "tests.rigs.struck:by_fork")], ids=["program", "own loop"]
)
def test_disks_that_the_nodes_do_not_share_are_refused_at_the_start(
    forks: Forks, tmp_path: Path, line: tuple[str | Path, ...], preload: str
) -> None:
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    output = forks.ends(*line, world_size=2, cwds=folders, preload=preload, code=2)
    assert output.count("needs a run directory that all nodes share") == 1, output
    assert "in which rank 1 on " in output
    assert "--checkpoint-format plain" in output
