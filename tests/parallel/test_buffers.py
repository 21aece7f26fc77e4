"""Buffers are rank 0's on all ranks after each step."""

from pathlib import Path

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result

SETTINGS = (
    "train", "--dataset=fake", "--fake-samples=24", "--model=mobilenet_v3_small", "--batch-size=12", "--max-steps=2",
    "--image-size=32", "--eval-batch-size=12", "--tensorboard=false", "--name=run", "--join-timeout-s=60",
)


def test_all_ranks_hold_rank_0s_statistics(forks: Forks, tmp_path: Path) -> None:
    """Each rank saw other samples: without an exchange the statistics would differ."""
    preload = "tests.parallel.test_buffers:compare_after_each_step"
    forks.ends(*SETTINGS, f"--run-dir={tmp_path}", world_size=2, preload=preload)
    assert result(tmp_path / "run")["step"] == 2


def compare_after_each_step() -> None:
    """Preloaded: end with an error where the buffers of the ranks differ after a step."""
    import train.loop
    from train.run import weights

    step = train.loop.step

    def compared(t: train.loop.Training) -> bool:
        own = weights.digest(dict(t.plain.named_buffers()))
        finished = step(t)
        digests = t.group.gather(weights.digest(dict(t.plain.named_buffers())))
        assert len(set(digests)) == 1, digests
        assert own not in digests  # they do change
        return finished

    train.loop.step = compared
