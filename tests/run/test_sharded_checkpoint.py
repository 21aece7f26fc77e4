"""Sharded checkpoints: each rank writes its part, whole or not at all; they resume and load wherever plain ones do."""

import enum
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties

from rankup.errors import UserError
from tests.rigs.bare_group import group_of
from tests.rigs.checkpoints import training_state
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.small_filesystems import small_disk
from train.group.group import pack, unpack
from train.run import publish, shard_pickles, sharded_checkpoint, weights
from train.run.checkpoint import find_problem, list_checkpoints, load_checkpoint, load_newest

# 8 steps an epoch
LINE = (
    "train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--max-steps", "12",
    "--save-every-steps", "3", "--schedule", "constant", "--log-every-steps", "1", "--tensorboard=false",
    "--progress=none", "--name", "run",
)
FSDP = ("--parallel", "fsdp")
SHARDED = (*FSDP, "--checkpoint-format", "sharded")


def train(forks: Forks, folder: Path, world_size: int, *more: str, **others: Any) -> str:
    codes, output = forks.run(*LINE, *more, "--run-dir", folder, world_size=world_size, **others)
    assert codes == [0] * world_size, output
    return output


def newest(folder: Path) -> Path:
    return list_checkpoints(folder / "run" / "checkpoints")[-1]


def digest(folder: Path) -> str:
    return str(result(folder / "run")["digest"])


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, with checkpoints of step 9 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    train(forks, folder, 2, *SHARDED, "--optimizer", "adamw", "--lr", "0.01")
    return folder


# What is in it --------------------------------------------------------------------------------------------------


def test_each_rank_writes_its_part(trained: Path) -> None:
    path = newest(trained)
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    shards = ["shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp"]
    assert files == ["manifest.json", *shards, "state.json", "training.pt"]
    assert json.loads((path / "manifest.json").read_text())["files"].keys() == {*files} - {"manifest.json"}
    assert not list(path.parent.glob(".*"))


def test_format_changes_no_bit(forks: Forks, trained: Path, tmp_path: Path) -> None:
    train(forks, tmp_path, 2, *FSDP, "--optimizer", "adamw", "--lr", "0.01")
    assert digest(tmp_path) == digest(trained)
    one, other = load_checkpoint(newest(tmp_path)), load_checkpoint(newest(trained)).as_plain()
    assert weights.digest(one.model) == weights.digest(other.model) == digest(trained)
    names = one.state.optimizer["state"].keys()
    assert names == other.state.optimizer["state"].keys() != set()
    for name in names:
        a, b = (found.state.optimizer["state"][name] for found in (one, other))
        assert a.keys() == b.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(a[key], b[key]) for key in a)


# Going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [(), ("--optimizer", "adamw", "--lr", "0.01", "--precision", "bf16")], ids=["sgd", "adamw"]
)
def test_run_goes_on_to_the_same_bits_after_kills(forks: Forks, tmp_path: Path, more: tuple[str, ...]) -> None:
    train(forks, tmp_path / "whole", 2, *SHARDED, *more)
    for rank, step in ((1, 8), (0, 4)):
        env = {"PROBE": json.dumps({"where": "loss", "call": step + 2, "rank": rank, "signal": "SIGKILL"})}
        line = (*LINE, *SHARDED, *more, "--run-dir", tmp_path / "killed")
        codes, output = forks.run(*line, world_size=2, env=env)
        assert codes[rank] == -9, output
    assert "resumed from step-00000009" in train(forks, tmp_path / "killed", 2, *SHARDED, *more)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


# From and to: sharded and plain, other world sizes, other methods
CHANGES: dict[str, tuple[tuple[int, tuple[str, ...]], tuple[int, tuple[str, ...]]]] = {
    "two ranks to one": ((2, SHARDED), (1, SHARDED)),
    "two ranks to four": ((2, SHARDED), (4, SHARDED)),
    "sharded to plain": ((2, SHARDED), (2, FSDP)),
    "plain to sharded": ((2, FSDP), (2, SHARDED)),
    "sharded to none": ((2, SHARDED), (1, ("--parallel", "none"))),
    "sharded to ddp": ((2, SHARDED), (2, ("--parallel", "ddp"))),
    "none to sharded": ((1, ("--parallel", "none")), (2, SHARDED)),
    "ddp to sharded": ((2, ("--parallel", "ddp")), (4, SHARDED)),
    "ddp to plain fsdp": ((2, ("--parallel", "ddp")), (2, FSDP)),
}


DIGITS = ("--workload", "images", "--dataset", "digits", "--model", "mlp", "--batch-size", "64")


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process that trains from beginning to end. No dropout, which each rank draws for itself."""
    folder = tmp_path_factory.mktemp("alone")
    train(forks, folder, 1, *DIGITS)
    return load_checkpoint(newest(folder)).model


@pytest.mark.parametrize("change", CHANGES)
def test_run_goes_on_in_another_way(
    forks: Forks, alone: dict[str, torch.Tensor], tmp_path: Path, change: str
) -> None:
    """With the momentum, so that the weights are those of one process but for the last bits."""
    (first, settings), (then, others) = CHANGES[change]
    train(forks, tmp_path, first, *DIGITS, *settings, "--max-steps", "5")
    output = train(forks, tmp_path, then, *DIGITS, *others)
    assert "resumed from step-00000005" in output
    if settings[1] != others[1]:
        assert f"parallel was {settings[1]}, is {others[1]}: the run goes on, but its last bits will differ" in output
    found = load_checkpoint(newest(tmp_path)).as_plain().model
    assert all(torch.allclose(found[name], alone[name], rtol=1e-4, atol=1e-6) for name in alone)


def test_shards_of_another_size_are_refused_by_name(trained: Path) -> None:
    tensors = {"model": {"0.weight": torch.zeros(24, 8)}}
    with pytest.raises(RuntimeError, match=r"rank 0: .*0\.weight"):
        sharded_checkpoint.read_shards_into(newest(trained) / "shards", tensors, group_of(0, 1))


# Weights --------------------------------------------------------------------------------------------------------


def test_weights_load_into_a_plain_module_by_torchs_own_tool(trained: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(newest(trained) / "shards", tmp_path / "torch.pt")
    model = plain_model()
    model.load_state_dict(torch.load(tmp_path / "torch.pt")["model"])
    assert weights.digest(model.state_dict()) == digest(trained)


@pytest.mark.parametrize("named", [False, True])
def test_export_is_one_plain_file(forks: Forks, trained: Path, tmp_path: Path, named: bool) -> None:
    where = ("--checkpoint", newest(trained)) if named else ("--name", "run", "--run-dir", trained)
    codes, output = forks.run("export", *where, "--output", tmp_path / "new" / "w.pt")
    assert codes == [0], output
    assert f"the weights of step 12, 4 tensors, 0.0 MB, digest {digest(trained)[:16]}" in output
    model = plain_model()
    model.load_state_dict(torch.load(tmp_path / "new" / "w.pt"))
    assert weights.digest(model.state_dict()) == digest(trained)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["w.pt"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--checkpoint", "/nowhere"), "/nowhere must be a whole checkpoint, got a damaged one: manifest.json is"),
        (("--run-dir", "/nowhere"), "checkpoints must hold one, got none. Train first, or name one."),
        (("--output", "/dev/null/w.pt"), "--output must be a file that can be written, got /dev/null/w.pt: "),
    ],
)
def test_export_of_nothing_is_one_line(forks: Forks, trained: Path, line: tuple[str, str], message: str) -> None:
    codes, output = forks.run("export", "--name", "run", "--run-dir", trained, *line)
    assert codes == [2]
    assert message in output
    assert "Traceback" not in output


def test_export_under_a_launcher_is_refused(forks: Forks, trained: Path) -> None:
    codes, output = forks.run("export", "--name", "run", "--run-dir", trained, world_size=2)
    assert codes == [2, 2]
    assert "export must be started by hand, once" in output


def test_evaluation_reads_it(forks: Forks, trained: Path) -> None:
    codes, output = forks.run("evaluate", *LINE[1:3], "--name", "run", "--run-dir", trained, world_size=2)
    assert codes == [0, 0], output
    assert digest(trained)[:16] in output


def test_another_run_starts_from_it(forks: Forks, trained: Path, tmp_path: Path) -> None:
    output = train(forks, tmp_path, 1, "--init-from", str(newest(trained)), "--max-steps", "1", "--lr", "1e-12")
    assert "4 of 4 tensors" in output


# Damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard flipped": (lambda p: flip(p / "shards/__1_0.distcp"), "shards/__1_0.distcp does not match its digest"),
    "shard truncated": (lambda p: os.truncate(p / "shards/__0_0.distcp", 9), "shards/__0_0.distcp has 9 bytes instead"),
    "shard removed": (lambda p: (p / "shards/__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "metadata flipped": (lambda p: flip(p / "shards/.metadata"), "shards/.metadata does not match its digest"),
    "manifest removed": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_one_is_passed_over_and_said(trained: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(trained / "run" / "checkpoints", tmp_path / "checkpoints")
    harm, why = DAMAGE[damage]
    harm(tmp_path / "checkpoints" / "step-00000012")
    said: list[str] = []
    found = load_newest(tmp_path / "checkpoints", said.append)
    assert found is not None
    assert found.step == 9
    assert said[0].startswith(f"checkpoint step-00000012 was passed over: {why}")


def test_metadata_runs_nothing_that_somebody_put_there(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "harm")))
    with pytest.raises(UserError, match="mkdir has no place in it"):
        sharded_checkpoint.read_all_shards(tmp_path)
    assert not (tmp_path / "harm").exists()


class Evil:
    """Makes the folder `where` when it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.where),)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("bytes", "BytesStorageMetadata has no place in it"), ("absolute", "names a file elsewhere"),
     ("above", "names a file elsewhere")],
)
def test_metadata_reads_tensors_of_its_own_folder_alone(
    forks: Forks, trained: Path, tmp_path: Path, kind: str, message: str
) -> None:
    """A weight declared as bytes would be unpickled by torch as it is."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shards = newest(tmp_path) / "shards"
    shutil.copy(shards / "__0_0.distcp", tmp_path / "run" / "elsewhere")
    metadata = pickle.loads((shards / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if kind == "bytes" and index.fqn == "model.0.weight":
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
            content = io.BytesIO()
            torch.save(Evil(tmp_path / "harm"), content)
            (shards / "__2_0.distcp").write_bytes(content.getvalue())
            index = MetadataIndex(index.fqn)
            info = replace(info, relative_path="__2_0.distcp", offset=0, length=len(content.getvalue()))
            metadata.storage_data = {**metadata.storage_data, index: info}
            break
        if info.relative_path == "__0_0.distcp":
            info.relative_path = str(tmp_path / "run/elsewhere") if kind == "absolute" else "../../../elsewhere"
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(newest(tmp_path))
    line = (*LINE, *SHARDED, "--optimizer", "adamw", "--lr", "0.01", "--max-steps", "15", "--run-dir", tmp_path)
    codes, output = forks.run(*line)
    assert not (tmp_path / "harm").exists()
    assert codes == [2], output
    assert message in output


def sign(path: Path) -> None:
    """Give the checkpoint a manifest of its files as they are now."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    found = {str(file.relative_to(path)): sharded_checkpoint.fingerprint_file(file) for file in files}
    (path / "manifest.json").write_text(json.dumps({**manifest, "files": found}))


def test_members_of_enums_are_read_as_each_release_of_python_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """3.11.0 to 3.11.3, Debian 12's among them, write `getattr(WriteItemType, "TENSOR")`."""
    member = shard_pickles.WriteItemType.TENSOR
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    with torch.serialization.safe_globals([*shard_pickles.SENT]):
        assert unpack(pack(member)) is member
    (tmp_path / ".metadata").write_bytes(pickle.dumps(TensorProperties(memory_format=torch.preserve_format)))
    properties: Any = shard_pickles.SafeReader(tmp_path).read_metadata()
    assert properties.memory_format is torch.preserve_format
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), "mro")))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(TensorProperties(memory_format=torch.preserve_format)))
    with pytest.raises(UserError, match=r"'mro'\) has no place in it"):
        shard_pickles.SafeReader(tmp_path).read_metadata()
    sent = torch.serialization.safe_globals([*shard_pickles.SENT])
    with sent, pytest.raises(pickle.UnpicklingError, match=r"'mro'\) has no place in it"):
        unpack(pack(member))


def unreadable(trained: Path, folder: Path) -> Path:
    """A copy of the run whose newest `.metadata` was written by a release that knows more classes than ours."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000009")
    path = newest(folder)
    (path / "shards/.metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nClassOfTorch9\n.")
    sign(path)
    return folder


@pytest.mark.parametrize("command", ["train", "evaluate", "export"])
def test_metadata_that_this_release_cannot_read_is_said_and_no_fresh_start_is_advised(
    forks: Forks, trained: Path, tmp_path: Path, command: str
) -> None:
    folder = unreadable(trained, tmp_path)
    line = ("--name", "run", "--run-dir", folder)
    if command == "train":
        line = (*LINE[1:], *SHARDED, "--optimizer", "adamw", "--lr", "0.01", "--max-steps", "15", *line)
    codes, output = forks.run(command, *line, world_size=1 if command == "export" else 2)
    assert set(codes) == {2}, output
    assert output.count("ClassOfTorch9 has no place in it") == 1, output
    assert "Nothing is lost: run the same command with the versions that wrote it" in output
    assert "--fresh" not in output
    assert "Traceback" not in output
    assert find_problem(newest(folder)) == ""


def record_reads() -> None:
    """In the process of a rank: note which files of checkpoints are opened to be read, but the newest's."""
    rank = os.environ.get("RANK", "0")

    def note(event: str, values: tuple[Any, ...]) -> None:
        path = Path(str(values[0])) if event == "open" else Path()
        if path.suffix not in (".pt", ".distcp") and path.name not in (".metadata", "state.json"):
            return
        step = path.parents[path.parent.name == "shards"]
        newest = max((other.name for other in step.parent.glob("step-*")), default="")
        if step.parent.name == "checkpoints" and step.name != newest and values[2] & os.O_ACCMODE == os.O_RDONLY:
            with Path(f"{os.environ['READS']}-{rank}").open("a") as file:
                file.write(f"{path}\n")

    sys.addaudithook(note)


@pytest.mark.parametrize("more", [("--parallel", "ddp"), SHARDED], ids=["plain", "sharded"])
def test_save_reads_neither_what_it_writes_nor_older_ones(forks: Forks, tmp_path: Path, more: tuple[str, ...]) -> None:
    preload = "tests.run.test_sharded_checkpoint:record_reads"
    train(forks, tmp_path, 2, *more, "--keep", "3", preload=preload, env={"READS": str(tmp_path / "reads")})
    assert [path.read_text() for path in tmp_path.glob("reads-*")] == []
    found = {path.name: find_problem(path) for path in list_checkpoints(tmp_path / "run/checkpoints")}
    assert found == {"step-00000008": "", "step-00000009": "", "step-00000012": ""}


def die_in_save() -> None:
    """In the process of a rank: the one that is named is killed at a point of its second save."""
    from train.run import sharded_checkpoint

    where, rank = os.environ["DIE"].split()
    if os.environ["RANK"] != rank:
        return
    calls: list[int] = []
    owner, name = {"begin": (publish, "create_staging"), "write": (sharded_checkpoint, "_write"),
                   "between": (sharded_checkpoint._HashedFiles, "fingerprints"), "publish": (publish, "publish")}[where]
    real = getattr(owner, name)

    def dies(*given: Any, **more: Any) -> Any:
        path = str(given[0].path if where == "write" else given[0])  # a writer's, or the path itself
        calls.append(1) if "step-00000006" in path or where in ("begin", "between") else None
        if len(calls) == (2 if where in ("begin", "between") else 1):
            if where == "write":
                real(*given, **more)
            os.kill(os.getpid(), 9)
        return real(*given, **more)

    setattr(owner, name, dies)


@pytest.mark.parametrize("where", ["begin 0", "write 0", "write 1", "between 1", "publish 0"])
def test_kill_in_a_save_leaves_the_one_before(forks: Forks, trained: Path, tmp_path: Path, where: str) -> None:
    more = (*SHARDED, "--optimizer", "adamw", "--lr", "0.01")
    line = (*LINE, *more, "--run-dir", tmp_path)
    preload = "tests.run.test_sharded_checkpoint:die_in_save"
    codes, output = forks.run(*line, world_size=2, env={"DIE": where}, preload=preload)
    assert sorted(codes) == [-9, 171], output
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-00000003"]
    assert find_problem(newest(tmp_path)) == ""
    assert "resumed from step-00000003" in train(forks, tmp_path, 2, *more)
    assert digest(tmp_path) == digest(trained)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


# Disks ----------------------------------------------------------------------------------------------------------


def test_full_disk_is_one_line_and_room_lets_it_go_on(forks: Forks, tmp_path: Path) -> None:
    wide = (*SHARDED, "--options.width", "20000", "--keep", "3", "--max-steps", "9")
    train(forks, tmp_path / "whole", 2, *wide)
    with small_disk(tmp_path / "disk", "5m") as disk:
        codes, output = forks.run(*LINE, *wide, "--run-dir", disk.path, world_size=2)
        assert codes == [2, 2], output
        assert "Traceback" not in output
        assert output.count("has no space left") == 1, output
        names = [path.name for path in list_checkpoints(disk.path / "run/checkpoints")]
        assert names == ["step-00000003", "step-00000006"]
        assert not list((disk.path / "run/checkpoints").glob(".*"))
        disk.resize("50m")
        assert "resumed from step-00000006" in train(forks, disk.path, 2, *wide)
        assert digest(disk.path) == digest(tmp_path / "whole")


def test_disks_that_the_nodes_do_not_share_are_refused_at_the_start(forks: Forks, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    codes, output = forks.run(*LINE, *SHARDED, world_size=2, cwds=folders)
    assert codes == [2, 2], output
    assert output.count("needs a run directory that all nodes share") == 1, output
    assert "in which rank 1 on " in output
    assert "--checkpoint-format plain" in output


def test_sharded_is_for_fsdp_alone(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run(*LINE, "--checkpoint-format", "sharded", "--run-dir", tmp_path)
    assert codes == [2]
    assert "--checkpoint-format must be plain with parallel auto, got " in output


def test_take_over_by_another_attempt_publishes_nothing(tmp_path: Path) -> None:
    def lost() -> None:
        raise UserError("another attempt has it")

    staging = publish.create_staging(tmp_path, 123456789)
    files = training_state(123456789).to_files()
    with pytest.raises(UserError, match="another attempt"):
        publish.publish(staging, files, {}, step=123456789, keep=1, check_owner=lost)
    assert list(tmp_path.iterdir()) == []
    publish.publish(publish.create_staging(tmp_path, 123456789), files, {}, step=123456789, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-123456789"]
