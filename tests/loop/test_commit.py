"""The state of a finished step can be saved at any moment but in the middle of a change."""

import threading

import pytest
import torch

from rankup.loop import saving
from rankup.loop.record import Position
from rankup.loop.saving import Changing

CPU = torch.device("cpu")


def test_stop_between_two_changes_says_where_the_run_stands() -> None:
    guard = Changing(Position(), CPU)
    with guard:
        guard.progress.step = 1
    stopped = guard.stop()
    assert stopped is not None
    assert stopped.step == 1
    assert guard.unchanged()


def test_stop_waits_for_the_end_of_a_change_and_lets_no_other_begin() -> None:
    guard = Changing(Position(), CPU)
    inside, go_on, stopped_now, began_again = (threading.Event() for _ in range(4))

    def train() -> None:
        with guard:
            inside.set()
            go_on.wait()
            guard.progress.step = 1
        stopped_now.wait()
        with guard:
            began_again.set()

    threading.Thread(target=train, daemon=True).start()
    inside.wait()
    threading.Timer(0.1, go_on.set).start()
    stopped = guard.stop()
    stopped_now.set()
    assert stopped is not None
    assert stopped.step == 1
    assert not began_again.wait(0.2)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_change_that_never_ended_leaves_nothing_to_save(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    # Nobody waits for a change that has failed: the thread that made it is waiting for the rescue to be over
    monkeypatch.setattr(saving, "CHANGE_S", 0.1 if how == "hangs" else 3600.0)
    guard = Changing(Position(), CPU)
    if how == "fails":
        with pytest.raises(ValueError, match="half-way"), guard:
            raise ValueError("half-way")
    else:
        guard.__enter__()
    assert guard.stop() is None


# On a GPU the host runs ahead: what counts is what the device has done ------------------------------------------


class Stream:
    """A GPU's queue without a GPU: `done` pieces of what was queued are done."""

    queued, done = 0, 0


class Event:
    def __init__(self, device: torch.device) -> None:
        self.place = 0

    def record(self) -> None:
        Stream.queued += 1
        self.place = Stream.queued

    def query(self) -> bool:
        return self.place <= Stream.done  # as torch's: one that was not recorded is done


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> type[Stream]:
    monkeypatch.setattr(saving.torch, "Event", Event)
    monkeypatch.setattr(saving, "SETTLE_S", 0.1)
    monkeypatch.setattr(saving, "CHANGE_S", 0.1)
    monkeypatch.setattr(Stream, "queued", 0)
    monkeypatch.setattr(Stream, "done", 0)
    return Stream


@pytest.mark.parametrize(
    ("done", "step"),
    [(6, 3), (4, 2), (2, 1), (0, None), (5, None), (3, None)],  # odd: in the middle of a change
)
def test_the_last_step_that_the_gpu_has_done_counts(queue: type[Stream], done: int, step: int | None) -> None:
    guard = Changing(Position(), torch.device("cuda"))
    for _ in range(3):  # each queues its beginning and its end
        with guard:
            guard.progress.step += 1
    queue.done = done
    stopped = guard.stop()
    assert (None if stopped is None else stopped.step) == step


@pytest.mark.parametrize(("done", "step"), [(4, 2), (5, None)])
def test_host_that_waits_for_the_gpu_in_a_change_can_be_rescued_until_the_gpu_begins_it(
    queue: type[Stream], done: int, step: int | None
) -> None:
    """As with fp16, whose scaler waits to know whether a gradient is infinite."""
    guard = Changing(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            guard.progress.step += 1
    guard.__enter__()
    queue.done = done
    stopped = guard.stop()
    assert (None if stopped is None else stopped.step) == step


def test_gpu_that_goes_on_while_its_weights_are_copied_is_noticed(queue: type[Stream]) -> None:
    guard = Changing(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            guard.progress.step += 1
    queue.done = 2
    assert guard.stop() is not None
    assert guard.unchanged()
    queue.done = 3
    assert not guard.unchanged()


def test_changes_that_are_done_are_forgotten(queue: type[Stream]) -> None:
    guard = Changing(Position(), torch.device("cuda"))
    for _ in range(50):
        with guard:
            guard.progress.step += 1
        queue.done = max(0, queue.queued - 4)
    assert len(guard._queue) <= 4


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def hang() -> None:
    """As a collective of NCCL does when a rank is dead; for a few seconds only."""
    torch.cuda._sleep(int(8e9))


def step(guard: Changing, weights: torch.Tensor) -> None:
    with guard:
        weights += 1
        guard.progress.step += 1


@pytest.mark.gpu
def test_work_that_is_queued_behind_a_hang_does_not_count(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setattr(saving, "SETTLE_S", 0.3)
    guard, weights = Changing(Position(), gpu), torch.zeros(3, device=gpu)
    step(guard, weights)
    step(guard, weights)
    hang()
    step(guard, weights)
    step(guard, weights)
    stopped = guard.stop()
    assert stopped is not None
    assert (stopped.step, guard.progress.step) == (2, 4)
    with torch.cuda.stream(torch.cuda.Stream(gpu)):  # type: ignore[no-untyped-call]
        assert weights.cpu().tolist() == [2.0] * 3
    assert guard.unchanged()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_change_that_began_on_the_gpu_and_did_not_end_leaves_nothing_to_save(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device
) -> None:
    monkeypatch.setattr(saving, "SETTLE_S", 0.3)
    guard, weights = Changing(Position(), gpu), torch.zeros(3, device=gpu)
    step(guard, weights)
    with guard:
        hang()
        weights += 1
    assert guard.stop() is None
    torch.cuda.synchronize()
