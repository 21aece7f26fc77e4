"""Which rank is called slow, and when: tested with made-up and recorded numbers, and in real runs with a slow rank."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional

from rankup.loop.order import part_of
from rankup.observe import stragglers
from rankup.observe.stragglers import COMPUTE, ROW, WAITING, RankReports, StepClock
from tests.rigs.fork_server import Forks
from train.config import Config
from train.data.samples import TensorSamples
from train.workloads import Workload

STEPS = 50  # of a window
RECORDED = Path(__file__).parent / "recorded_windows.jsonl"
HOSTS = ["node0", "node0", "node1", "node1"]


Window = tuple[int, torch.Tensor]  # first step, and the seconds of data, compute and waiting by rank


def windows(*ranks: tuple[float, float], first: int = 1, count: int = 20) -> list[Window]:
    """Return windows of steps in which each rank takes (data, compute) seconds, and waits for the slowest rank."""
    longest = max(sum(rank) for rank in ranks)
    seconds = torch.tensor([[data, compute, longest - data - compute] for data, compute in ranks], dtype=torch.float64)
    return [(first + number * STEPS, seconds) for number in range(count)]


def compared(hosts: list[str]) -> RankReports:
    group: Any = SimpleNamespace(world_size=len(hosts), hosts=hosts)
    return RankReports(group, StepClock(torch.device("cpu"), world_size=1), step=0)


def said(ranks: RankReports, found: list[Window]) -> list[str]:
    return [line for window in found for line in ranks.look(*window)]


USUAL = (0.002, 0.05)


def test_lasting_slowness_is_reported_once_with_its_reason_and_start() -> None:
    ranks = compared(HOSTS)
    assert said(ranks, windows(*[USUAL] * 4, count=10)) == []
    slow = windows(USUAL, USUAL, USUAL, (0.002, 0.0594), first=501, count=50)
    assert said(ranks, slow[: ROW - 1]) == []
    assert said(ranks, slow[ROW - 1 :]) == [
        "rank 3 (node1) is 18 % slower than the median, since step 501: compute takes 59.4 ms of a step, median 50"
    ]
    assert said(ranks, [*windows(*[USUAL] * 4), *slow]) == []


def test_rank_that_does_not_delay_the_others_is_not_slow() -> None:
    """On a GPU slow data may still come in time, because the host is ahead of the GPU."""
    late = torch.tensor([[0.002, 0.05, 0.01], [0.03, 0.05, 0.01], [0.002, 0.05, 0.01]])
    assert said(compared(HOSTS[:3]), [(1, late)] * 20) == []


def test_rank_with_one_more_sample_is_not_slow() -> None:
    """Three ranks share 4 samples. Then the rank with two of them is slow as well."""
    load = [part_of([0, 0, 0, 0], rank, 3)[1] for rank in range(3)]
    assert load == [1.5, 0.75, 0.75]

    def of(first: float) -> list[str]:
        ranks = compared(HOSTS[:3])
        ranks.load = load
        return said(ranks, windows((0.0, first), (0.0, 0.05), (0.0, 0.05)))

    assert of(0.1) == []
    (line,) = of(0.13)
    assert line.startswith("rank 0 (node0) is 30 % slower than the median")


def recorded(number: int) -> tuple[str, list[Window]]:
    """Return the slow part, and windows of a second each. They were recorded on two CPUs with twice the work."""
    case = json.loads(RECORDED.read_text().splitlines()[number])
    steps = [0, *(last for last, *_ in case["windows"])]
    pairs = zip(steps, case["windows"], strict=False)
    return case["case"], [(before + 1, torch.tensor(ranks)) for before, (_, *ranks) in pairs][1:]


@pytest.mark.parametrize("number", range(4))
def test_recorded_windows_of_busy_machines_name_only_the_slow_rank(number: int) -> None:
    """Two jobs are healthy. In the others the last of two ranks is 10 % slower, or the last of three is 20 % slower."""
    part, found = recorded(number)
    assert len(found) > 80 or part != "healthy"
    slow = len(found[0][1]) - 1
    lines = said(compared(HOSTS[: slow + 1]), found)
    assert len(lines) == (part != "healthy")
    for line in lines:
        assert re.match(rf"rank {slow} \({HOSTS[slow]}\) is \d+ % slower .*, since step \d+: {part} takes ", line)


USUAL_S, SLOW_S = 0.005, 0.1


def short_windows() -> None:
    """Preloaded. Make a window as long as two steps of the slow rank."""
    stragglers.WINDOW_S = 2 * SLOW_S


class Samples(TensorSamples):
    wait_s = 0.0

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        time.sleep(self.wait_s)
        return super().batch(indices, epoch)


def build(config: Config) -> Workload:
    """Build a workload whose one rank is slower in one part. Ranks sleep instead of using CPU time that others need."""
    slow = os.environ.get("RANK") == str(config.options["rank"])
    waits_s = {part: SLOW_S if slow and part == config.options["part"] else USUAL_S for part in ("data", "compute")}

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(waits_s["compute"])
        return functional.cross_entropy(model(batch[0]), batch[1])

    train, evaluation = (Samples(torch.ones(count, 8), torch.zeros(count, dtype=torch.int64)) for count in (600, 12))
    train.wait_s = waits_s["data"]
    return Workload(model=nn.Linear(8, 4), train=train, evaluation=evaluation, loss=loss, data_name="ones")


@pytest.mark.parametrize(("world_size", "part"), [(3, "data"), (2, "compute")])
def test_slow_rank_of_a_run_is_named(forks: Forks, tmp_path: Path, world_size: int, part: str) -> None:
    """Three ranks exchange gradients by gloo, two of one host by shared memory. A step lasts equally long on each."""
    train = ("train", "--workload", f"{__name__}:build", "--options.part", part, "--options.rank", "1", "--batch-size",
             "12", "--epochs", "1000", "--log-every-steps", "2", "--run-dir", tmp_path, "--name", "run",
             "--tensorboard=false")
    with forks.running(*train, world_size=world_size, preload=f"{__name__}:short_windows") as job:
        job.wait_for("slower than")
        (line,) = re.findall(r"rank \d \(.*slower than .*", job.output)
    others = "the median" if world_size > 2 else "the other"
    assert re.match(rf"rank 1 \(\S+\) is \d+ % slower than {others}, since step \d+: {part} takes ", line)


def test_saves_of_rank_0_hide_no_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one report for each window. Rank 0 writes a copy in the background in every other window."""
    now, own, spoken = SimpleNamespace(s=0.0), SimpleNamespace(), list[str]()
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(monotonic=lambda: now.s))

    def add(numbers: torch.Tensor) -> torch.Tensor:
        numbers[-3:] = torch.tensor([0.0, 0.6, max(0.0, own.s - 0.6)])
        return numbers

    log = SimpleNamespace(info=spoken.append)
    group: Any = SimpleNamespace(rank=0, world_size=2, is_rank0=True, hosts=HOSTS, sum=add, log=log)
    clock: Any = SimpleNamespace(take=lambda: [0.0, own.s, max(0.0, 0.6 - own.s)])
    reports = RankReports(group, clock, step=0)
    for number in range(1, 4 * ROW):
        saving = number % 4 == 1  # the save ends in the next window
        own.s = 0.8 if number % 4 in (1, 2) else 0.5
        now.s += 5.0
        reports.exchange({}, step=10 * number, saving=saving)
    (line,) = spoken
    assert line.startswith("rank 1 (node0) is 20 % slower than the other, since step ")


# Where the time of a step goes, on a clock that the test sets ---------------------------------------------------------

@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock whose time is `clock.s`."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


class Backward(torch.autograd.Function):
    """A backward pass that computes for 5 seconds, and an exchange of 7 seconds after it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, later: Callable[[float], None]) -> torch.Tensor:
        ctx.later = later
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.later(2.0)
        Variable._execution_engine.queue_callback(lambda: ctx.later(7.0))  # as DDP does
        ctx.later(3.0)
        return gradients[0] * 2, None


def a_step(steps: StepClock, later: Callable[[float], None]) -> None:
    steps.start()
    later(1.0)
    steps.has_batch()
    later(4.0)
    loss = Backward.apply(torch.ones(1, requires_grad=True), later)  # type: ignore[no-untyped-call]
    steps.split_backward(loss)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    steps.mark(WAITING)
    later(6.0)
    steps.mark(COMPUTE)


def test_step_clock_separates_the_exchange_from_the_backward_pass(clock: SimpleNamespace) -> None:
    def later(seconds: float) -> None:
        clock.s += seconds

    steps = StepClock(torch.device("cpu"), world_size=2)
    a_step(steps, later)
    later(50.0)  # an evaluation
    a_step(steps, later)
    assert steps.take() == [2 * 1.0, 2 * (4 + 5 + 6.0), 2 * 7.0]
    assert steps.take() == [0.0, 0.0, 0.0]


def test_gpu_events_are_read_only_after_the_gpu_has_reached_them(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host only queues work, and the GPU does the work later."""
    gpu = SimpleNamespace(queued_s=0.0, done_s=0.0)

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_s = gpu.queued_s

        def query(self) -> bool:
            return bool(self.at_s <= gpu.done_s)

        def elapsed_time(self, end: "Event") -> float:
            return float(1000 * (end.at_s - self.at_s))

    def later(seconds: float) -> None:
        if seconds == 1.0:
            clock.s += seconds
        else:
            gpu.queued_s += seconds

    monkeypatch.setattr(torch, "Event", Event)
    steps = StepClock(torch.device("cuda"), world_size=2)
    a_step(steps, later)
    a_step(steps, later)
    gpu.done_s = 4 + 5 + 7 + 6.0  # of the first step
    assert steps.take() == [2 * 1.0, 4 + 5 + 6.0, 7.0]
    gpu.done_s *= 2
    assert steps.take() == [0.0, 4 + 5 + 6.0, 7.0]
