"""The state of a finished step can be saved at any moment but in the middle of a change."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from rankup.loop import saving
from rankup.loop.saving import CommitLock
from rankup.observe.metrics import Position

CPU = torch.device("cpu")


def test_stop_waits_for_the_end_of_a_change_and_lets_no_other_begin() -> None:
    guard = CommitLock(Position(), CPU)
    steps: list[int] = []
    stop = threading.Thread(target=lambda: steps.append(getattr(guard.stop(), "step", -1)))
    with guard:
        stop.start()
        stop.join(0.1)
        guard.progress.step = 1
    stop.join()
    assert steps == [1]
    assert guard._lock.locked()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_change_that_never_ended_leaves_nothing_to_save(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    # Nobody waits for a change that has failed: the thread that made it is waiting for the rescue to be over
    monkeypatch.setattr(saving, "CHANGE_S", 0.1 if how == "hangs" else 3600.0)
    guard = CommitLock(Position(), CPU)
    if how == "fails":
        with pytest.raises(ValueError, match="half-way"), guard:
            raise ValueError("half-way")
    else:
        guard.__enter__()
    assert guard.stop() is None


# On a GPU the host runs ahead: what counts is what the device has done ------------------------------------------


class Stream:
    """A GPU's queue without a GPU: `done` pieces of what was queued are done."""

    queued, done, works = 0, 0.0, 0.0


class Event:
    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        self.place = 0

    def record(self) -> None:
        Stream.queued += 1
        self.place = Stream.queued

    def query(self) -> bool:
        Stream.done += Stream.works
        return self.place <= Stream.done  # as torch's: one that was not recorded is done

    def synchronize(self) -> None:
        """Nobody waits here, so that a test may have the host further ahead than it gets."""

    def elapsed_time(self, later: "Event") -> float:
        assert max(self.place, later.place) <= Stream.done  # as torch's, which raises RuntimeError
        return 1.0


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> type[Stream]:
    monkeypatch.setattr(saving.torch, "Event", Event)
    # torch has 32 streams of each priority, and gives them out in turn
    numbers = {priority: itertools.cycle(range(32)) for priority in (0, -1)}
    monkeypatch.setattr(saving.torch.cuda, "Stream", lambda device, priority=0: (priority, next(numbers[priority])))
    monkeypatch.setattr(saving, "QUICK_S", 0.1)
    monkeypatch.setattr(saving, "SETTLE_S", 0.1)
    monkeypatch.setattr(saving, "CHANGE_S", 0.1)
    monkeypatch.setattr(Stream, "queued", 0)
    monkeypatch.setattr(Stream, "done", 0)
    monkeypatch.setattr(Stream, "works", 0.0)
    return Stream


@pytest.mark.parametrize(("changes", "inside", "done", "step"), [
    (3, False, 6, 3), (3, False, 4, 2), (3, False, 2, 1), (3, False, 0, None),
    (3, False, 5, None), (3, False, 3, None),  # in the middle of a change
    # The host waits for the GPU in a change, as fp16's scaler does: until the GPU begins it, it can be rescued
    (2, True, 4, 2), (2, True, 5, None),
])
def test_the_last_step_that_the_gpu_has_done_counts(
    queue: type[Stream], changes: int, inside: bool, done: int, step: int | None
) -> None:
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(changes):  # each queues its beginning and its end
        with guard:
            guard.progress.step += 1
    if inside:
        guard.__enter__()
    queue.done = done
    stopped = guard.stop()
    assert (None if stopped is None else stopped.step) == step
    for _ in range(2):  # it goes on while its weights are copied, maybe to the end of the next change
        queue.done += 1
        assert step in (None, 3) or not guard.unchanged()


def test_gpu_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch, queue: type[Stream]) -> None:
    monkeypatch.setattr(saving, "QUICK_S", 0.0)
    monkeypatch.setattr(saving, "SETTLE_S", 0.0)
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(9):
        with guard:
            guard.progress.step += 1
    queue.works = 0.1  # pieces, each time somebody asks: more than one in each look at all 18
    stopped = guard.stop()
    assert stopped is not None
    assert stopped.step == 9


def test_thread_that_waits_for_the_gpu_in_a_change_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, queue: type[Stream]
) -> None:
    monkeypatch.setattr(saving, "CHANGE_S", 3600.0)
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            guard.progress.step += 1
    guard.__enter__()
    queue.done = 4
    stopped = guard.stop()
    assert stopped is not None
    assert stopped.step == 2
    assert not guard._lock.acquire(blocking=False)


def test_changes_that_are_done_are_forgotten(queue: type[Stream]) -> None:
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(50):
        with guard:
            guard.progress.step += 1
        queue.done = max(0, queue.queued - 4)
    assert len(guard._queue) <= 4


def test_host_begins_a_change_once_the_gpu_has_come_to_it(
    monkeypatch: pytest.MonkeyPatch, queue: type[Stream]
) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda event: setattr(queue, "done", event.place))
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            assert queue.done == queue.queued


def test_change_in_a_stream_that_is_behind_is_not_measured(queue: type[Stream]) -> None:
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            guard.progress.step += 1
    guard._queue[0].began.place = guard._queue[0].ended.place = 99  # type: ignore[attr-defined, union-attr]
    queue.done = 4
    with guard:
        guard.progress.step += 1
    assert len(guard._queue) == 3


def test_thread_may_queue_changes_while_the_gpu_is_asked(
    monkeypatch: pytest.MonkeyPatch, queue: type[Stream]
) -> None:
    guard = CommitLock(Position(), torch.device("cuda"))
    for _ in range(2):
        with guard:
            guard.progress.step += 1
    guard.__enter__()
    queue.done = 4
    ask, left = Event.query, [*range(20)]

    def query(event: Event) -> bool:
        if left:  # as the thread that changes would do now
            left.pop()
            guard._queue.append(saving._Queued(guard._mark()))
        return ask(event)

    monkeypatch.setattr(Event, "query", query)
    stopped = guard.stop()
    assert stopped is not None
    assert stopped.step == 2


def test_stream_of_a_rescue_is_nobody_elses_and_its_thread_uses_no_other_gpu(
    monkeypatch: pytest.MonkeyPatch, queue: type[Stream]
) -> None:
    here, seen = threading.local(), list[tuple[object, object]]()  # CUDA has a current device for each thread

    @contextlib.contextmanager
    def stream(stream: object) -> Iterator[None]:
        seen.append((getattr(here, "device", "cuda:0"), stream))
        yield

    monkeypatch.setattr(saving.torch.cuda, "set_device", lambda device: setattr(here, "device", str(device)))
    monkeypatch.setattr(saving.torch.cuda, "stream", stream)
    guard = CommitLock(Position(), torch.device("cuda:1"))
    others = [saving.torch.cuda.Stream(guard.device) for _ in range(40)]  # type: ignore[no-untyped-call]

    def rescue() -> None:
        with guard.beside():
            pass

    thread = threading.Thread(target=rescue)
    thread.start()
    thread.join()
    [(device, used)] = seen
    assert device == "cuda:1"
    assert used not in others


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def hang() -> None:
    """As a collective of NCCL does when a rank is dead; for a few seconds only."""
    torch.cuda._sleep(int(8e9))


def step(guard: CommitLock, weights: torch.Tensor) -> None:
    with guard:
        weights += 1
        guard.progress.step += 1


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
def test_work_that_is_queued_behind_a_hang_does_not_count(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device, inside: bool
) -> None:
    """Nor does a change that began on the GPU before the hang and did not end: it leaves nothing to save."""
    monkeypatch.setattr(saving, "SETTLE_S", 0.3)
    guard, weights = CommitLock(Position(), gpu), torch.zeros(3, device=gpu)
    step(guard, weights)
    step(guard, weights)
    with guard if inside else contextlib.nullcontext():
        hang()
    threading.Thread(target=step, args=(guard, weights), daemon=True).start()
    stopped = guard.stop()
    assert (None if stopped is None else stopped.step) == (None if inside else 2)
    assert guard.progress.step == 2
    if not inside:
        with guard.beside():
            assert weights.cpu().tolist() == [2.0] * 3
        assert guard.unchanged()
    torch.cuda.synchronize()
