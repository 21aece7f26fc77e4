"""A rank that is killed at any moment costs time and nothing else: the job ends with the weights it would have had.

With dropout, augmentation and DataLoader workers, all of which draw random numbers. At two and at four ranks: a sum of
two numbers is the same in either order, so two ranks would not show that DDP sums in another order after a restart.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from rankup.agent.status import new_job
from tests.rigs.faults import ByHand, Launched, Scene, deliver, random_kills
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import comparable_metrics, rank_env, result

RUNS = int(os.environ.get("RANKUP_RUNS", "12"))
# CI always draws the same kills, so that a failure can be repeated; with RANKUP_RUNS set, each run draws others
SEED = int(os.environ.get("RANKUP_SEED", random.SystemRandom().randrange(10**6) if "RANKUP_RUNS" in os.environ else 1))
KILLS_PER_JOB = 6
# Eight steps an epoch
SETTINGS = (
    "--dataset=fake", "--fake-samples=384", "--batch-size=48", "--max-steps=40", "--model=cnn", "--dropout=0.2",
    "--augment", "--in-memory=never", "--num-workers=1", "--eval-batch-size=16", "--save-every-steps=3",
    "--log-every-steps=1", "--tensorboard=false", "--progress=none", "--name=run", "--step-timeout-s=60",
    "--join-timeout-s=60",
)


@dataclass(frozen=True)
class Undisturbed:
    digest: str
    metrics: list[dict[str, Any]]


@pytest.fixture(scope="session")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Undisturbed]:
    """The run that was never killed, by world size."""
    known: dict[int, Undisturbed] = {}

    def run(world_size: int) -> Undisturbed:
        if world_size not in known:
            folder = tmp_path_factory.mktemp(f"undisturbed-{world_size}")
            codes, output = forks.run("train", f"--run-dir={folder}", *SETTINGS, world_size=world_size)
            assert codes == [0] * world_size, output
            known[world_size] = Undisturbed(result(folder / "run")["digest"], comparable_metrics(folder / "run"))
        return known[world_size]

    return run


def assert_same(scene: Scene, expected: Undisturbed, story: str) -> None:
    assert result(scene.run_dir)["digest"] == expected.digest, story
    assert comparable_metrics(scene.run_dir) == expected.metrics, story
    assert scene.left_after() == [], story


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "share"), [(2, 0.4), (4, 0.35)])
def test_ranks_killed_at_random_and_started_again_by_hand_end_with_the_same_weights(
    world_size: int, share: float, forks: Forks, undisturbed: Callable[[int], Undisturbed], tmp_path: Path
) -> None:
    rng = random.Random(SEED * 10 + world_size)
    left = round(RUNS * share)
    while left > 0:
        kills = random_kills(rng, min(left, KILLS_PER_JOB), world_size)
        print(f"RANKUP_SEED={SEED}: {kills}")
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a job may end before its first kill,
        assert int(folder.name) < 2 * RUNS  # but not each
        scene = ByHand(folder / "run", forks, world_size, f"--run-dir={folder}", *SETTINGS)
        try:
            left -= deliver(kills, scene, world_size)
            assert scene.wait() == [0] * world_size, scene.output
            assert_same(scene, undisturbed(world_size), scene.output)
        finally:
            scene.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "share"), [(2, 0.15), (4, 0.1)])
def test_launch_restarts_ranks_killed_at_random_and_ends_with_the_same_weights(
    world_size: int, share: float, forks: Forks, undisturbed: Callable[[int], Undisturbed], tmp_path: Path
) -> None:
    rng = random.Random(SEED * 100 + world_size)
    left = round(RUNS * share)
    while left > 0:
        kills = random_kills(rng, min(left, KILLS_PER_JOB), world_size)
        print(f"RANKUP_SEED={SEED}: {kills}")
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a job may end before its first kill,
        assert int(folder.name) < 2 * RUNS  # but not each
        line = (f"--run-dir={folder}", *SETTINGS)
        scene = Launched(folder / "run", forks, world_size, *line, options=["--max-restarts=20"])
        try:
            left -= deliver(kills, scene, world_size)
            assert scene.job.wait() == [0], scene.job.output
        finally:
            scene.job.kill()
        assert_same(scene, undisturbed(world_size), scene.job.output)


def test_fresh_that_was_killed_before_it_began_is_still_fresh_after_the_restart(forks: Forks, tmp_path: Path) -> None:
    """The first attempt of a launch may be killed before it puts the earlier run aside. Only attempts after the one
    that did must not put it aside again."""
    line = ("train", f"--run-dir={tmp_path}", *SETTINGS, "--max-steps=6", "--fresh")

    def attempt(job: str, restart: int) -> str:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's
        env = {**rank_env(0, 1, store.port), "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        env["RANKUP_AGENT"] = json.dumps({"commit": {"job": job, "restarts": restart}, "record": None})
        codes, output = forks.run(*line, env=env)
        assert codes == [0], output
        return output

    yesterday, today = new_job(), new_job()
    assert "was moved" not in attempt(yesterday, 0)
    assert "is finished" in attempt(yesterday, 1)
    assert "the earlier run was moved" in attempt(today, 1)
    assert "is finished" in attempt(today, 2)
    assert len(list((tmp_path / "run").glob("before-*"))) == 1
