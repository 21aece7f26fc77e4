"""The promise: N processes equal one, and every launcher ends with the same weights.

Dropout, augmentation and DataLoader workers are on where the digest is compared: what is random must not depend on who
started the job.
"""

import sys
from pathlib import Path

import pytest
from forks import Forks
from jobs import MAIN, Job, ended, environment, free_port, metrics, rank_env, result, start

# Constant: the cosine over so few steps would end at zero and hide what the last steps add
CURVE = (
    "--dataset=digits", "--model=cnn", "--batch-size=64", "--max-steps=40", "--lr=0.04", "--schedule=constant",
    "--log-every-steps=1", "--tensorboard=false", "--progress=none",
)  # fmt: skip
EQUAL = (
    "train", "--dataset=fake", "--fake-samples=128", "--model=cnn", "--batch-size=32", "--max-steps=8", "--dropout=0.2",
    "--augment", "--in-memory=never", "--num-workers=1", "--tensorboard=false", "--progress=none", "--simulated-nodes",
)  # fmt: skip


def curve(forks: Forks, folder: Path, world_size: int) -> list[float]:
    codes, output = forks.run("train", *CURVE, f"--run-dir={folder}", f"--name={world_size}", world_size=world_size)
    assert codes == [0] * world_size, output
    return [entry["train/loss"] for entry in metrics(folder / str(world_size)) if "train/loss" in entry]


def test_ranks_with_one_global_batch_follow_the_curve_of_one_process(forks: Forks, tmp_path: Path) -> None:
    """The mean of a batch summed in parts: fp32 rounds differently, by 1e-7 a step, which 40 steps magnify a little."""
    alone = curve(forks, tmp_path, 1)
    assert len(alone) == 40
    assert alone[-1] < 0.9 * alone[0]  # it learns, so that a curve of nothing would not do
    for world_size in (2, 4):
        assert curve(forks, tmp_path, world_size) == pytest.approx(alone, rel=1e-4)


def torchrun(folder: Path, *options: str) -> list[str]:
    """The command of one agent."""
    words = [*EQUAL, f"--run-dir={folder.parent}", f"--name={folder.name}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "train.main", *words]


def started(way: str, folder: Path) -> Job:
    """Two ranks, started in one of the ways."""
    own = [f"--run-dir={folder.parent}", f"--name={folder.name}"]
    port, job = free_port(), Job()
    if way == "launch":
        start(sys.executable, MAIN, "launch", "--nproc=2", *EQUAL[1:], *own, job=job)
    elif way == "five variables":
        for rank in range(2):
            start(sys.executable, MAIN, *EQUAL, *own, env=rank_env(rank, 2, port), job=job)
    elif way == "torchrun":
        start(*torchrun(folder, "--nproc-per-node=2", f"--master-port={port}"), env=LENIENT, job=job)
    elif way == "torch.distributed.launch":
        launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={port}"]
        start(*launch, MAIN, *EQUAL, *own, env=LENIENT, job=job)
    else:
        for node in range(2):
            nodes = ("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1")
            start(*torchrun(folder, *nodes, f"--master-port={port}"), env=LENIENT, job=job)
    return job


# Agents of torch warn of what is theirs
LENIENT = {"PYTHONWARNINGS": "default"}
WAYS = ("launch", "five variables", "torchrun", "torch.distributed.launch", "two agents")


@pytest.fixture(scope="module")
def digest_by_forks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job with other data paths: no workers, all in memory."""
    folder = tmp_path_factory.mktemp("parity")
    codes, output = forks.run(
        *EQUAL, "--in-memory=always", "--num-workers=0", f"--run-dir={folder}", "--name=run", world_size=2
    )
    assert codes == [0, 0], output
    digest: str = result(folder / "run")["digest"]
    return digest


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_end_with_the_same_weights_however_started(way: str, digest_by_forks: str, tmp_path: Path) -> None:
    job = started(way, tmp_path / "run")
    with ended(job):
        assert set(job.wait(180)) == {0}, job.output
    assert result(tmp_path / "run")["digest"] == digest_by_forks
    assert result(tmp_path / "run")["world_size"] == 2


def test_threads_that_a_launcher_sets_change_no_bit(digest_by_forks: str, tmp_path: Path) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 for several processes, nobody does for ranks by hand; `num_threads` decides."""
    assert "OMP_NUM_THREADS" in environment()
    job, port = Job(), free_port()
    for rank in range(2):
        env = {**rank_env(rank, 2, port), "OMP_NUM_THREADS": "2"}
        start(sys.executable, MAIN, *EQUAL, f"--run-dir={tmp_path}", "--name=run", env=env, job=job)
    with ended(job):
        assert job.wait(180) == [0, 0], job.output
    assert result(tmp_path / "run")["digest"] == digest_by_forks
