"""The promise: every launcher gives the same weights, bit for bit.

test_torchrun.py tests torchrun's restarts. tests/parallel/test_methods_kills.py tests mpirun and ranks that meet at a
URL. tests/parallel/test_any_ranks.py tests that any number of ranks trains like one rank.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.foreign_scripts import BE_SCRIPT, WARN
from tests.rigs.fork_server import Forks
from tests.rigs.fork_server import Job as ForkedJob
from tests.rigs.jobs import MAIN, Job, free_port, rank_env, result, start

# A job with everything that draws random numbers
LINE = ("train", "--dataset", "digits", "--model", "cnn", "--augment", "--dropout", "0.2", "--epochs", "1", "--seed",
        "3", "--tensorboard=false", "--name", "run")


def run(forks: Forks, run_dir: Path, world_size: int, *arguments: str) -> Path:
    forks.ends(*arguments, "--run-dir", run_dir, world_size=world_size)
    return next(path.parent for path in run_dir.glob("*/result.json"))


@pytest.fixture(scope="module")
def reference(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights that two ranks give."""
    digest: str = result(run(forks, tmp_path_factory.mktemp("reference"), 2, *LINE))["digest"]
    return digest


@pytest.mark.parametrize("arguments", [
    ("--num-workers", "2"),
    ("--save-every-steps", "7", "--log-every-steps", "3", "--eval-batch-size", "50", "--tensorboard=true"),
], ids=" ".join)
def test_settings_of_workers_saves_and_logs_change_no_weight(
    forks: Forks, reference: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert result(run(forks, tmp_path, 2, *LINE, *arguments))["digest"] == reference


def by_hand(_: Forks, *arguments: str) -> Job:
    """Start ranks as in two terminals, with the five variables. OMP_NUM_THREADS is unset in one, and 2 in the other."""
    job, port = Job(), free_port()
    start("env", "-u", "OMP_NUM_THREADS", sys.executable, MAIN, *arguments, env=rank_env(0, 2, port), job=job)
    return start(sys.executable, MAIN, *arguments, env=rank_env(1, 2, port, OMP_NUM_THREADS="2"), job=job)


def by_fresh(_: Forks, *arguments: str) -> Job:
    return start(sys.executable, "-m", "rankup", "launch", "--no-fork", "--nproc=2", MAIN, *arguments)


def by_two_agents_of_old(forks: Forks, *arguments: str) -> ForkedJob:
    """Start two agents of PyTorch's older launcher: torchrun that puts --local-rank=N before all other arguments."""
    line = ("-m", "torch.distributed.launch", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1",
            f"--master-port={free_port()}")
    return ForkedJob([process for node in (1, 0) for process in forks.start(
        *line, f"--node-rank={node}", "-m", "train.main", *arguments, preload=BE_SCRIPT, env=WARN,
    ).processes])


@pytest.mark.parametrize("launcher", [by_fresh, by_hand, by_two_agents_of_old], ids=lambda f: f.__name__)
def test_launcher_changes_no_bit(
    forks: Forks, reference: str, tmp_path: Path, launcher: Callable[..., Job | ForkedJob]
) -> None:
    job = launcher(forks, *LINE, "--run-dir", str(tmp_path))
    try:
        assert set(job.wait()) == {0}, job.output
    finally:
        job.kill()
    assert result(tmp_path / "run")["digest"] == reference
    assert result(tmp_path / "run")["world_size"] == 2


def test_launch_in_pods_changes_no_bit(forks: Forks, reference: str, tmp_path: Path) -> None:
    """Kubeflow's variables count pods, which are agents here."""
    port, agents = str(free_port()), []
    for node in ("1", "0"):
        pod = {"RANK": node, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_NODE_RANK": node,
               "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        agents.append(forks.start("launch", MAIN, *LINE, "--run-dir", tmp_path, env=pod))
    assert [agent.wait() for agent in agents] == [[0], [0]], "\n".join(agent.output for agent in agents)
    assert result(tmp_path / "run")["digest"] == reference
