"""Anybody on the network can reach a job's ports. Nothing that strangers send is executed or changes a weight."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import MAIN, ROOT, result
from tests.rigs.strangers import Strangers

DIGITS = ("--dataset", "digits", "--model", "cnn", "--batch-size", "64", "--tensorboard=false")
LINE = ("train", *DIGITS, "--max-steps", "150", "--save-every-steps", "20", "--join-timeout-s", "20",
        "--step-timeout-s", "20")
NO_HOROVOD = pytest.mark.skipif(find_spec("horovod") is None, reason="no Horovod here: make horovod builds it")


# torch's collectives of objects, and every call that unpickles. torch.load unpickles without weights_only=True
UNPICKLES = re.compile(
    r"_object_list|(?<!construct)(?<!read)_object\(|cloudpickle|(?<!w)pickle\.(loads?|Unpickler)\(|"
    r"torch\.load\((?!.*weights_only=True)"
)


def test_source_has_no_call_that_unpickles():
    for path in [path for name in ("rankup", "train") for path in sorted((ROOT / name).rglob("*.py"))]:
        found = [line for line in path.read_text().splitlines() if UNPICKLES.search(line)]
        assert not found, f"{path}: {found}"


METHODS = {
    "ddp": ("--parallel", "ddp", "--optimizer", "adamw"),
    "fsdp": ("--parallel", "fsdp", "--optimizer", "adamw"),
    "sharded": ("--parallel", "fsdp", "--checkpoint-format", "sharded"),
    "horovod": ("--parallel", "horovod", "--optimizer", "adamw"),
}


@pytest.mark.parametrize("method", [pytest.param(m, marks=NO_HOROVOD if m == "horovod" else ()) for m in METHODS])
def test_ranks_unpickle_nothing_even_inside_torch(forks: Forks, tmp_path: Path, method: str):
    """Train, save and resume while every attempt to unpickle raises an error."""
    more = ("--num-workers", "0", "--device", "cpu", "--run-dir", tmp_path, "--name", "run")
    for steps in ("4", "8"):
        line = ("train", *DIGITS, *METHODS[method], "--max-steps", steps, "--save-every-steps", "3", *more)
        output = forks.ends(*line, world_size=2, preload="tests.rigs.strangers:unpickle_nothing")
    assert "resumed from step-00000004" in output


def test_other_commands_unpickle_nothing(forks: Forks, tmp_path: Path):
    where = ("--run-dir", tmp_path, "--name", "run")
    for line in (
        ("train", *DIGITS, "--max-steps", "2", "--init-from"),
        ("evaluate",),
        ("predict", "--output", tmp_path / "predictions.csv"),
        ("doctor",),
    ):
        if line[-1] == "--init-from":
            forks.ends("train", *DIGITS, "--max-steps", "1", "--run-dir", tmp_path, "--name", "first")
            line = (*line, *(tmp_path / "first" / "checkpoints").iterdir())
        forks.ends(*line, *where, world_size=2, preload="tests.rigs.strangers:unpickle_nothing")


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    forks.ends(*LINE, "--run-dir", folder, "--name", "run", world_size=2)
    return str(result(folder / "run")["digest"])


@pytest.fixture
def proof(tmp_path: Path) -> Iterator[Path]:
    """A path that exists only if something that a stranger sent was executed. Checked at the end."""
    yield tmp_path / "proof"
    assert not (tmp_path / "proof").exists()


def disturbed(job: Job, proof: Path, *, seed: int, only: str = "") -> Strangers:
    """Wait for the job's end, with strangers at all its ports from its start."""
    try:
        with Strangers(lambda: [process.pid for process in job.processes], proof, seed=seed, only=only) as strangers:
            job.wait()
    finally:
        job.kill()
    # Each rank has one more port, but a busy scanner may be late for an attempt that ends early
    assert len(strangers.heard) >= 2, f"strangers must reach the store's port and one of a rank: {strangers.heard}"
    return strangers


def test_launched_run_with_strangers_keeps_its_weights(forks: Forks, tmp_path: Path, undisturbed: str, proof: Path):
    line = ("launch", "--nproc=2", "--max-restarts=20", MAIN, *LINE, "--run-dir", tmp_path, "--name", "run")
    job = forks.start(*line)
    strangers = disturbed(job, proof, seed=0)
    assert job.processes[0].code == 0, f"{job.output}\n{strangers.log}"
    assert result(tmp_path / "run")["digest"] == undisturbed
    assert not strangers.open_to_all, "a job on one machine needs no port that others reach"


@pytest.mark.parametrize(("only", "seed"), [("", 0), ("gloo", 1), ("store", 0)])
def test_attempt_with_strangers_succeeds_or_ends_with_a_code_to_retry(
    forks: Forks, tmp_path: Path, undisturbed: str, proof: Path, only: str, seed: int
):
    where = ("--run-dir", tmp_path, "--name", "run")
    slow = {"SLOW_RANKS": str(seed % 2)}
    job = forks.start(*LINE, *where, world_size=2, env=slow, preload="tests.rigs.strangers:form_slowly")
    strangers = disturbed(job, proof, seed=seed, only=only)
    codes = [process.code for process in job.processes]
    if codes == [0, 0]:
        assert result(tmp_path / "run")["digest"] == undisturbed
    else:
        assert all(code is not None and (code < 0 or code >= 128) for code in codes), f"{job.output}\n{strangers.log}"
        assert not (tmp_path / "run" / "result.json").exists()
