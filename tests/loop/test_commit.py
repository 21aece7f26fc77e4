"""The state of a finished step can be saved at any moment, except in the middle of a change."""

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


def step_at(guard: CommitLock) -> int | None:
    return getattr(guard.stop(), "step", None)


def test_stop_waits_for_a_change_and_prevents_the_next() -> None:
    guard = CommitLock(Position(), CPU)
    steps: list[int | None] = []
    stop = threading.Thread(target=lambda: steps.append(step_at(guard)))
    with guard:
        stop.start()
        stop.join(0.1)
        guard.position.step = 1
    stop.join()
    assert steps == [1]
    assert guard._lock.locked()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_change_that_never_ends_leaves_nothing_to_save(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    # `stop` must not wait for a change that failed, because the thread of that change waits for the end of the rescue
    monkeypatch.setattr(saving, "CHANGE_S", 0.1 if how == "hangs" else 3600.0)
    guard = CommitLock(Position(), CPU)
    if how == "fails":
        with pytest.raises(ValueError, match="half-way"), guard:
            raise ValueError("half-way")
    else:
        guard.__enter__()
    assert guard.stop() is None


# On a GPU, whose queue is simulated here ------------------------------------------------------------------------------


class Queue:
    """A GPU's queue of work. `behind`: the newest change is not done yet. `synchronize` waits until `empty` is set.
    `calls`: what the host has asked for, in order."""

    def __init__(self) -> None:
        self.behind, self.empty, self.calls = False, threading.Event(), list[object]()
        self.empty.set()

    def wait_stream(self, other: object) -> None:
        self.calls.append(("computing waits for", other))

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return not self.behind

    def synchronize(self) -> None:
        self.empty.wait()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(saving.torch, "Event", lambda device: made)
    monkeypatch.setattr(saving.torch.cuda, "current_stream", lambda device: made)
    # torch has 32 streams of each priority, and reuses them in turn
    numbers = {priority: itertools.cycle(range(32)) for priority in (0, -1)}
    monkeypatch.setattr(saving.torch.cuda, "Stream", lambda device, priority=0: (priority, next(numbers[priority])))
    monkeypatch.setattr(saving, "copy_stream", lambda device: "copies")
    return made


def test_change_begins_only_after_the_gpus_earlier_work_is_done(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> None:
    """The GPU hangs after a peer loss. State on the host stays at the step of the weights, and `stop` returns."""
    monkeypatch.setattr(saving, "CHANGE_S", 1.0)
    guard = CommitLock(Position(), torch.device("cuda"))

    def change() -> None:
        with guard:
            guard.position.step += 1

    step = threading.Thread(target=change, daemon=True)  # it waits forever for the lock
    with guard:
        guard.position.step = 1
    queue.empty.clear()
    step.start()
    step.join(0.2)
    assert step_at(guard) == 1
    queue.empty.set()
    step.join(0.2)
    assert guard.position.step == 1


def test_single_process_does_not_wait_for_its_gpu(queue: Queue) -> None:
    guard = CommitLock(Position(), torch.device("cuda"), alone=True)
    queue.empty.clear()
    with guard:
        guard.position.step = 1
    assert step_at(guard) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_change_waits_on_the_gpu_for_the_copy_of_a_save(queue: Queue, alone: bool) -> None:
    """Without a GPU this shows only that the computing stream is told before the change."""
    guard = CommitLock(Position(), torch.device("cuda"), alone=alone)
    with guard:
        queue.calls.append("change")
    assert queue.calls == [("computing waits for", "copies"), "change"]


@pytest.mark.parametrize("ever", [True, False])
def test_stop_waits_for_a_change_that_the_gpu_has_not_finished(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, ever: bool
) -> None:
    monkeypatch.setattr(saving, "CHANGE_S", 3600.0 if ever else 0.1)
    guard = CommitLock(Position(), torch.device("cuda"))
    with guard:
        guard.position.step = 1
    queue.behind = True
    if ever:
        threading.Timer(0.1, setattr, (queue, "behind", False)).start()
    assert step_at(guard) == (1 if ever else None)
    assert queue.behind == (not ever)


def test_rescue_has_its_own_stream_on_the_gpu_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, queue: Queue
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
        with guard.own_stream():
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
    """Block the GPU for a few seconds, as a collective of NCCL does forever when a rank is dead."""
    torch.cuda._sleep(int(8e9))


def step(guard: CommitLock, weights: torch.Tensor) -> None:
    with guard:
        weights += 1
        guard.position.step += 1


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
def test_change_queued_behind_a_hang_does_not_count(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device, inside: bool
) -> None:
    """If the hang is inside a change that began on the GPU before it, there is nothing to save."""
    monkeypatch.setattr(saving, "CHANGE_S", 0.3)
    guard, weights = CommitLock(Position(), gpu), torch.zeros(3, device=gpu)
    step(guard, weights)
    step(guard, weights)
    with guard if inside else contextlib.nullcontext():
        hang()
    threading.Thread(target=step, args=(guard, weights), daemon=True).start()
    assert step_at(guard) == (None if inside else 2)
    assert guard.position.step == 2
    if not inside:
        with guard.own_stream():
            assert weights.cpu().tolist() == [2.0] * 3
    torch.cuda.synchronize()
