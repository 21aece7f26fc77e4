"""Workers of a user's loader ignore signals to the job, and the loader otherwise works as before."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rankup.loop.batches import evaluation_batches, source_of
from rankup.loop.workers import Workers
from tests.rigs.jobs import ended, start


class Asked(Dataset[torch.Tensor]):
    """Samples that say whether their worker ignores the signals that stop a job."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *ignored()])


def ignored() -> list[bool]:
    """Return for each of the three signals that stop a job whether this process ignores it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    return [bool(mask >> (number - 1) & 1) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


def begun(worker: int) -> None:
    assert all(ignored())  # the user's own worker_init_fn runs too, after ours
    torch.manual_seed(worker)


@pytest.mark.parametrize("how", ["training", "evaluation"])
def test_workers_ignore_signals_that_stop_a_job(how: str) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    loader: Any = DataLoader(Asked(), batch_size=4, num_workers=1, worker_init_fn=begun)
    if how == "evaluation":
        pairs = evaluation_batches(loader, 1, 0, 1, pad=False)
    else:
        pairs = source_of(loader, 0, 1, any_order=False).open(1, epoch=0, skip=0, state=None)
    batches = torch.cat([batch for batch, _ in pairs])
    assert batches[:, 0].tolist() == [*range(16)]
    assert batches[:, 1:].all()
    assert signal.getsignal(signal.SIGCHLD) == before  # torch's handler would raise an error in the middle of a step


# These scripts run in new processes, because workers left behind end with their process
LEFT = """
from torch.utils.data import DataLoader
from rankup.loop.workers import Workers
loader = DataLoader(range(9), num_workers=1, persistent_workers=True)
print(next(Workers(loader)).item())
"""
KEPT = """
import signal
from torch.utils.data import DataLoader, IterableDataset
from rankup.loop.batches import evaluation_batches

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))

signal.signal(signal.SIGUSR2, lambda *_: None)  # as a rank has, and forks of it
loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
its_own = loader.worker_init_fn, loader.collate_fn
next(iter(loader))  # to learn a shape
print(len([*evaluation_batches(loader, 1, 0, 1, pad=False)]), (loader.worker_init_fn, loader.collate_fn) == its_own)
"""
BROKEN = """
import sys
from torch.utils.data import DataLoader
from rankup.loop.workers import Workers

def broken():
    yield from [[0]] * int(sys.argv[1])
    raise KeyError("no more")

for _ in Workers(DataLoader(range(9), batch_sampler=broken(), num_workers=1)):
    pass
"""


@pytest.mark.parametrize(("script", "words", "code", "ends"), [
    (LEFT, (), 0, ["0"]),  # a script ends although it leaves workers
    (KEPT, (), 0, ["4 True"]),  # also one that has begun its workers without rankup, and leaves others
    # An error in the sampler shows its place, both while the loader draws the first batches and later
    (BROKEN, ("1",), 1, ["in broken", "KeyError: 'no more'"]),
    (BROKEN, ("5",), 1, ["in broken", "KeyError: 'no more'"]),
])
def test_users_loader_works_as_without_rankup(script: str, words: tuple[str, ...], code: int, ends: list[str]) -> None:
    with ended(start(sys.executable, "-c", script, *words)) as job:
        assert job.wait() == [code], job.output
    lines = [line.strip() for line in job.output.splitlines() if line.strip()]
    assert len(lines) == len(ends) or code, lines
    assert all(line.endswith(end) for line, end in zip(lines[-len(ends):], ends, strict=True)), lines


def test_iterable_with_its_own_workers_is_left_alone() -> None:
    class Prefetching:
        num_workers = 2

        def __iter__(self) -> Any:
            return iter([1, 2])

    assert [*Workers(Prefetching())] == [1, 2]
