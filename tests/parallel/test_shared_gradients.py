"""Two ranks of one host exchange gradients through shared memory, with the same bits as by gloo in every setting."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.rigs.bare_group import group_of
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result
from train.parallel import methods
from train.parallel.shared_gradients import PART, SharedGradients, average, share_gradients

# Parameters of a bit more than a part of shared memory, of half a part, and of few numbers, in one or several buckets
SIZES = ((PART + 77,), (PART // 2, 1), (3,))
STEPS = 8
EXCHANGED = "exchanged through shared memory"
LINE = ("train", "--dataset=digits", "--model=cnn", "--limit-train=256", f"--max-steps={STEPS}", "--log-every-steps=1",
        "--tensorboard=false", "--name=run")


def test_mean_through_shared_memory_equals_gloos_bit_for_bit(forks: Forks) -> None:
    forks.ends(world_size=2, preload="tests.parallel.test_shared_gradients:compare_with_gloo")


def compare_with_gloo() -> None:
    """Runs in each rank. Compare gradients of all magnitudes that go through DDP with the hook and without it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    files = set(os.listdir("/dev/shm"))
    shared = share_gradients(group_of(rank, 2))
    assert shared is not None
    assert not {name for name in set(os.listdir("/dev/shm")) - files if "rankup" in name}
    draw = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.float64):
        for bucket_mb in (0.5, 25.0):
            modules = [Weights(dtype), Weights(dtype)]
            wrapped = [
                DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
                for module in modules
            ]
            wrapped[1].register_comm_hook(shared, average)
            for step in range(4):
                wanted = [magnitudes(parameter, draw) for parameter in modules[0].parameters()]
                for model, module in zip(wrapped, modules, strict=True):
                    if step == 2:  # two backward passes; the second one exchanges the sum of both
                        with model.no_sync():
                            model(wanted).backward()
                    model(wanted).backward()
                    assert all(parameter.grad is not None for parameter in module.parameters())
                for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    assert torch.equal(one.grad.view(torch.uint8), other.grad.view(torch.uint8))
                    one.grad = other.grad = None
    dist.barrier()
    os._exit(0)


class Weights(nn.Module):
    """A model whose gradients are the arguments of its forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList([torch.zeros(size, dtype=dtype) for size in SIZES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.all, gradients, strict=True)]).sum()


def magnitudes(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return numbers of all magnitudes, including -0, infinity and the smallest normal number."""
    numbers = torch.randn(like.shape, generator=draw, dtype=like.dtype)
    numbers *= 10 ** (80 * torch.rand(like.shape, generator=draw, dtype=like.dtype) - 42)
    numbers.view(-1)[:3] = torch.tensor([-0.0, torch.inf, torch.finfo(like.dtype).tiny], dtype=like.dtype)
    return numbers


VARIANTS = {
    "fp32": (), "accumulated": ("--accumulate=4",), "fp16, clipped": ("--precision=fp16", "--clip-norm=0.5"),
    "unused parameters looked for": ("--find-unused-parameters",),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_on_one_host_gives_the_weights_of_two_hosts(forks: Forks, tmp_path: Path, variant: str) -> None:
    near, exchanges = train(forks, tmp_path / "near", *VARIANTS[variant], preload="near")
    assert exchanges == 2 * (STEPS + ("looked for" not in variant))  # one before the first step fixes the buckets
    far, exchanges = train(forks, tmp_path / "far", *VARIANTS[variant], preload="far")
    assert exchanges == 0
    assert result(near)["digest"] == result(far)["digest"]
    assert [line.get("train/loss") for line in metrics(near)] == [line.get("train/loss") for line in metrics(far)]


def test_three_ranks_leave_their_sums_to_gloo(forks: Forks, tmp_path: Path) -> None:
    assert train(forks, tmp_path, "--batch-size=48", preload="near", world_size=3)[1] == 0


def train(forks: Forks, folder: Path, *more: str, preload: str, world_size: int = 2) -> tuple[Path, int]:
    """Train. Return the run's folder and the number of exchanges through shared memory."""
    output = forks.ends(*LINE, *more, f"--run-dir={folder}", world_size=world_size,
                        preload=f"tests.parallel.test_shared_gradients:{preload}")
    return folder / "run", output.count(EXCHANGED)


def near() -> None:
    """Preloaded. Print a line for each exchange through shared memory."""

    def counted(shared: SharedGradients, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        os.write(2, f"{EXCHANGED}\n".encode())
        return average(shared, bucket)

    methods.average = counted


def far() -> None:
    """Preloaded. Do the same for ranks that find no shared memory, as on two hosts."""
    near()
    methods.share_gradients = lambda group: None


# A rank that ends, and ranks of other hosts and users -----------------------------------------------------------------


def test_rank_that_ends_wakes_the_rank_that_waits_for_it(forks: Forks) -> None:
    """A child of the ended rank lives on, as DataLoader workers do for a moment."""
    with forks.running(world_size=2, preload="tests.parallel.test_shared_gradients:lose_a_rank") as job:
        assert job.wait() == [7, -9], job.output
        job.processes[1].kill()  # the child


def lose_a_rank() -> None:
    """Runs in each rank. Rank 1 is killed while rank 0 waits for it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    shared = share_gradients(group_of(rank, 2))
    assert shared is not None
    shared.meet()
    if rank == 1:
        if os.fork() == 0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    for code in (1, 2):  # a second wait fails too
        with contextlib.suppress(dist.DistNetworkError):
            shared.meet()
            os._exit(code)
    os._exit(7)


@pytest.mark.parametrize("where", ["meet_nobody", "meet_another_user"])
def test_rank_of_another_host_or_user_leaves_both_to_gloo(forks: Forks, where: str) -> None:
    if where == "meet_another_user" and os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    forks.ends(world_size=2, preload=f"tests.parallel.test_shared_gradients:{where}")


def meet_nobody() -> None:
    """Runs in each rank. The pid that the other rank sends is that of another process here."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    files = os.listdir("/proc/self/fd")
    os.getpid = os.getppid
    assert share_gradients(group_of(rank, 2)) is None
    assert os.listdir("/proc/self/fd") == files
    os._exit(0)


def meet_another_user() -> None:
    """Runs in each rank. Rank 0 may open the other rank's memory, but rank 1 may not."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 1:
        os.setuid(65534)
    assert share_gradients(group_of(rank, 2)) is None
    os._exit(0)
