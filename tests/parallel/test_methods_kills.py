"""Ranks of every method and launcher are killed with SIGKILL, and the run ends with the weights and losses of an
undisturbed run. tests/promises/test_places.py kills ranks of ddp at random moments."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, comparable_metrics, ended, free_port, kill, result, start

# 8 steps an epoch, with dropout and data that are drawn again in each epoch
LINE = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--max-steps", "14",
        "--save-every-steps", "3", "--log-every-steps", "1", "--tensorboard=false", "--name", "run")
PATH = {"PYTHONPATH": str(ROOT)}


def outcome(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the digest, and all metrics except those that depend on the clock."""
    return result(folder / "run")["digest"], comparable_metrics(folder / "run")


VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (1, ("--parallel", "none")),
    "dp on one device": (1, ("--parallel", "dp", "--device", "cpu")),
    "ddp in fp16": (2, ("--precision", "fp16")),
    "sent as bf16": (2, ("--compress", "bf16")),
    "fsdp in bf16 with adamw": (
        2, ("--parallel", "fsdp", "--precision", "bf16", "--optimizer", "adamw", "--lr", "0.01")
    ),
}
# Here no surviving rank has the whole state, so the run resumes from its last checkpoint
WITHOUT_RESCUE = ("none", "dp on one device", "fsdp in bf16 with adamw")


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_variant_ends_with_the_weights_of_the_undisturbed_run(
    forks: Forks, tmp_path: Path, variant: str
) -> None:
    world_size, settings = VARIANTS[variant]
    line = (*LINE, *settings)
    output = forks.ends(*line, "--run-dir", tmp_path / "undisturbed", world_size=world_size)
    # Kill the last rank in step 8, after the save of step 6, and five steps later rank 0, which writes
    for rank, env in ((world_size - 1, kill(world_size - 1, 8)), (0, kill(0, 5))):
        codes, output = forks.run(*line, "--run-dir", tmp_path / "killed", world_size=world_size, env=env)
        assert codes[rank] == -9, output
        assert set(codes) <= {-9, 171}, output
    output = forks.ends(*line, "--run-dir", tmp_path / "killed", world_size=world_size)
    resumed = "step-00000009" if variant in WITHOUT_RESCUE else "step 11, rescued by rank 1 on "
    assert f"resumed from {resumed}" in output
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "undisturbed")


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The outcome of two undisturbed ranks, which is the same for every launcher."""
    folder = tmp_path_factory.mktemp("undisturbed")
    forks.ends(*LINE, "--run-dir", folder, world_size=2)
    return outcome(folder)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_killed_ranks_that_met_at_a_url_resume(
    forks: Forks, undisturbed: Any, tmp_path: Path, scheme: str
) -> None:
    for env, expected in ((kill(None, 8), [171, -9]), ({}, [0, 0])):
        url = (tmp_path / "meeting").as_uri() if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
        line = (*LINE, "--run-dir", tmp_path, "--init-method", url, "--world-size", "2")
        jobs = [forks.start(*line, "--rank", "0"), forks.start(*line, "--rank", "1", env=env)]
        codes = [code for job in jobs for code in job.wait()]
        assert codes == expected, "\n".join(job.output for job in jobs)
    assert "resumed from step 7, rescued by rank 0 on " in jobs[0].output
    assert outcome(tmp_path) == undisturbed


@pytest.mark.timeout(900)
def test_mpirun_that_lost_a_rank_resumes_by_the_same_command(undisturbed: Any, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    # By default mpirun kills rank 0 one or two seconds later, and on a busy machine rank 0 may still write its rescue
    patience = ("--mca", "odls_base_sigkill_timeout", "5")
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *patience, "-np", "2")
    command = ("mpirun", *options, sys.executable, MAIN)
    with ended(start(*command, *LINE, "--run-dir", tmp_path, env=PATH | kill(1, 8))) as job:
        assert job.wait(300) != [0], job.output
    with ended(start(*command, *LINE, "--run-dir", tmp_path, env=PATH)) as job:
        assert job.wait(300) == [0], job.output
    assert "resumed from step 7, rescued by rank 0 on " in job.output
    assert outcome(tmp_path) == undisturbed
