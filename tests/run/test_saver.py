"""Training continues while rank 0 writes a checkpoint. The files equal those of a save for which training waits."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankup.env.rank_env import RankEnv
from rankup.errors import UserError
from rankup.loop.saving import CommitLock
from rankup.observe.metrics import Position
from rankup.state import saver
from rankup.state.place import Folder
from rankup.state.saver import HostCopies, Options, Saver
from tests.rigs.checkpoints import steps, train
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result

# 8 of the 32 steps end with a save
OFTEN = ("--save-every-steps=4", "--keep=99")
# Save only step 20 and the last step
ONCE = ("--save-every-steps=20", "--evaluate-every-epochs=4", "--keep=99")


def held_save() -> None:
    """Preloaded. Once its weights are written, a save waits for a file. HOLD: {"step", "until", "fails"}.

    `until`: the file. The file `writing` beside it shows that the save waits. `fails`: the errno with which the save
    then ends, or -1 for an unexpected error. The file `failed` shows that it failed.
    """
    from rankup.state import copies

    write, order = copies.write_durably, json.loads(os.environ["HOLD"])
    until = Path(order["until"])

    def held(path: Path, content: Any) -> Any:
        done = write(path, content)
        wanted = path.name in ("model.safetensors", "rank-00001.safetensors")
        wanted = wanted and f"step-{order['step']:08d}" in path.parent.name
        if not wanted or "dev" in path.parts:
            return done
        until.with_name("writing").touch()
        while not until.exists():
            time.sleep(0.01)
        if number := order["fails"]:
            until.with_name("failed").touch()
            raise OSError(number, os.strerror(number)) if number > 0 else LookupError("nobody expected this")
        return done

    copies.write_durably = held


def held_save_and_late_lease() -> None:
    """Preloaded: `held_save`, and each rank sees the lease late once, as over NFS."""
    from rankup.state.run import Run

    held_save()
    sees, late = Run._sees, [False]
    Run._sees = lambda self: late.pop() if late else sees(self)  # type: ignore[method-assign]


HELD = "tests.run.test_saver:held_save"


def hold(until: Path, *, step: int = 8, fails: int = 0) -> dict[str, str]:
    return {"HOLD": json.dumps({"step": step, "until": str(until), "fails": fails})}


def in_step(step: int, **more: Any) -> dict[str, str]:
    """Return a probe for the loss of this step. Step 1 has call 3."""
    return {"PROBE": json.dumps({"where": "loss", "call": step + 2, "sleep_s": 0.0, **more})}


Undisturbed = Callable[..., Path]
ADAMW = ("--optimizer=adamw", "--lr=0.01")
SHARDED = ("--parallel=fsdp", "--checkpoint-format=sharded", "--memory-every-steps=0")


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A function that returns the run directory of an undisturbed run, which waits for each save."""
    known: dict[tuple[str, ...], Path] = {}

    def of(world_size: int, *more: str) -> Path:
        key = (str(world_size), *more)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            forks.ends(*train(known[key], *OFTEN, "--save=sync", *more), world_size=world_size)
        return known[key]

    return of


@pytest.mark.parametrize(("world_size", "more"), [
    (1, ("--parallel=dp", "--device=cpu")), (2, ()), (2, ("--precision=fp16",)), (2, (*SHARDED, *ADAMW)),
], ids=["dp", "ddp", "fp16", "sharded"])
def test_training_continues_during_a_save_whose_files_equal_a_waiting_saves(
    forks: Forks, undisturbed: Undisturbed, tmp_path: Path, world_size: int, more: tuple[str, ...]
) -> None:
    # Step 11 lets the save of step 8 continue, so training that waited for the save would wait until the deadline
    env = hold(tmp_path / "go") | in_step(11, tell=str(tmp_path / "go"), rank=0)
    line = train(tmp_path / "run", *OFTEN, "--save-timeout-s=60", *more)
    forks.ends(*line, world_size=world_size, env=env, preload=f"{HELD}_and_late_lease" if SHARDED[0] in more else HELD)
    assert (tmp_path / "writing").exists()
    whole, found = undisturbed(world_size, *more), tmp_path / "run" / "checkpoints"
    assert result(tmp_path / "run")["digest"] == result(whole)["digest"]
    assert steps(found) == steps(whole / "checkpoints") == list(range(4, 33, 4))
    for file in (whole / "checkpoints").glob("*/*"):
        other = found / file.parent.name / file.name
        assert other.exists()
        if file.name not in ("state.json", "manifest.json"):  # these name the run
            assert other.read_bytes() == file.read_bytes(), other


def test_step_that_is_saved_again_is_written_to_another_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again after its evaluation. On NFS another node may still see the first staging folder."""
    create, names = Folder.stage, list[str]()

    def noted(folder: Folder, staging: Path) -> Path:
        names.append(staging.name)
        return create(folder, staging)

    monkeypatch.setattr(Folder, "stage", noted)
    group: Any = SimpleNamespace(rank=0, is_rank0=True, world_size=1, device=torch.device("cpu"), max=int,
                                 rank_env=RankEnv(), gather=lambda value: [value], on_rank0=lambda call: call(),
                                 watch=SimpleNamespace(enter=lambda *_, **__: None), log=SimpleNamespace(info=print))
    saver = Saver(
        group, Folder(tmp_path), Options(), token="it", saved=lambda step: None, second=None
    )
    for _ in range(2):
        saver.save(8, lambda: b'{"step": 8}', {"count": {"n": 1}})
        saver.look(wait=True)
    assert (len({*names}), steps(tmp_path)) == (2, [8])


def test_memory_of_a_copy_is_reused_even_if_the_state_has_grown() -> None:
    copies = HostCopies(torch.device("cpu"))
    weights, momentum = torch.ones(1000), torch.ones(500)
    first = copies.take({"weights": weights})["weights"].data_ptr()
    for _ in range(3):
        assert copies.take({"momentum": momentum, "weights": weights})["weights"].data_ptr() == first


def test_copy_from_a_gpu_is_made_beside_the_computing_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, this shows the order of calls: the copy begins after the work that is queued now, on a stream of
    its own, between the two events that measure it. What it reads stays alive until it is done."""
    calls, copy = list[str](), torch._foreach_copy_

    class Stream:
        def wait_stream(self, other: object) -> None:
            calls.append(f"wait for {other}")

        def __enter__(self) -> None:
            calls.append("begin")

        def __exit__(self, *_: object) -> None:
            calls.append("end")

    class Event:
        record, synchronize, elapsed_time = (lambda self: calls.append("event"), lambda self: calls.append("done"),
                                             lambda self, other: 2000.0)

    def copied(to: Any, live: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        calls.append("copy")
        copy(to, live)

    streams = {}
    monkeypatch.setattr(saver.torch, "Event", lambda device, enable_timing: Event())
    monkeypatch.setattr(saver.torch.cuda, "current_stream", lambda device: "computing")
    monkeypatch.setattr(saver.torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(saver, "copy_stream", lambda device: streams.setdefault(device, Stream()))
    monkeypatch.setattr(saver.torch, "_foreach_copy_", copied)
    monkeypatch.setattr(HostCopies, "_buffer_for", lambda self, name, tensor: torch.empty_like(tensor))
    copies = HostCopies(torch.device("cuda:1"))
    live = torch.ones(3)
    assert copies.take({"weights": live})["weights"].tolist() == [1.0] * 3
    assert copies._held == [live]
    assert copies.wait() == 2.0
    assert calls == ["wait for computing", "begin", "event", "copy", "event", "end", "done"]
    assert (copies._held, [*streams]) == ([], [torch.device("cuda:1")])


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_state_that_has_grown_onto_another_device_is_refused_when_it_is_copied(device: str) -> None:
    copies = HostCopies(torch.device("cpu"))
    copies._device = torch.device(device)
    grown: Any = {"best/weights": SimpleNamespace(device=torch.device("cuda:0"))}
    with pytest.raises(UserError, match=f"track: best/weights must be on this rank's device, {device}, .* got cuda:0"):
        copies.take(grown)


@pytest.mark.gpu
def test_copy_from_a_gpu_has_the_state_at_the_time_of_the_request() -> None:
    device = torch.device("cuda", 0)
    weights, copies = torch.ones(50_000_000, device=device), HostCopies(device)
    guard = CommitLock(Position(), device, alone=True)
    assert copies.wait() == 0.0
    for _ in range(2):
        with guard:
            weights.fill_(1.0)
        copied = copies.take({"weights": weights, "made for it": weights + 1})["weights"]
        others = [torch.zeros_like(weights) for _ in range(3)]  # they may not get the memory of what is being copied
        with guard:
            weights.fill_(2.0)
        assert copies.wait() > 0.0
        assert (copies._buffers["made for it"] == 2.0).all(), others
        assert copied.is_pinned()
        assert bool((copied == 1.0).all())


def test_evaluation_with_workers_continues_during_a_save(forks: Forks, tmp_path: Path) -> None:
    # An evaluation has three batches, and rank 1 repeats the last one, so its third call is in the second evaluation
    order = {"where": "evaluate", "call": 3, "rank": 1, "tell": str(tmp_path / "go")}
    env = hold(tmp_path / "go") | {"PROBE": json.dumps(order)}
    line = train(tmp_path / "run", "--num-workers=2", "--eval-batch-size=7", "--save-timeout-s=60")
    forks.ends(*line, world_size=2, env=env, preload=HELD)
    assert (tmp_path / "writing").exists()


def counted_saves() -> None:
    """Preloaded. A save takes a while, and records its begin, end and thread in the file SAVES."""
    from rankup.state import saver
    from rankup.state.place import Folder

    save, file = Folder.write, Path(os.environ["SAVES"])

    def counted(folder: Folder, step: int, files: Any) -> Any:
        with file.open("a") as lines:
            print("begin", step, threading.current_thread().name, file=lines, flush=True)
            time.sleep(0.1)
            done = save(folder, step, files)
            print("end", step, threading.current_thread().name, file=lines, flush=True)
        return done

    Folder.write = counted
    if "FREE" in os.environ:
        saver.memory_available = lambda: int(os.environ["FREE"])


@pytest.mark.parametrize(("how", "free", "thread"), [
    ("auto", "", "save"), ("sync", "", "MainThread"), ("auto", "1000", "MainThread"),
])
def test_saves_run_one_at_a_time_and_in_the_background_if_memory_allows(
    forks: Forks, tmp_path: Path, how: str, free: str, thread: str
) -> None:
    env = {"SAVES": str(tmp_path / "saves")} | ({"FREE": free} if free else {})
    line = train(tmp_path / "run", *OFTEN, f"--save={how}")
    output = forks.ends(*line, world_size=2, env=env, preload="tests.run.test_saver:counted_saves")
    expected = [f"{word} {step} {thread}" for step in range(4, 33, 4) for word in ("begin", "end")]
    assert (tmp_path / "saves").read_text().splitlines() == expected
    assert steps(tmp_path / "run" / "checkpoints") == list(range(4, 33, 4))
    too_little = how == "auto" and free != ""
    assert output.count("save   the training waits for each save: ") == too_little, output


# Ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "what", "own"), [
    (143, in_step(9, signal="SIGTERM", rank=1), [10]), (2, in_step(10, rank=0, **{"raise": "UserError"}), []),
], ids=["stop, which saves its own step", "mistake"])
def test_end_of_a_job_finishes_the_running_save(
    forks: Forks, tmp_path: Path, code: int, what: dict[str, str], own: list[int]
) -> None:
    run, asked = tmp_path / "run", tmp_path / "asked"
    what = {"PROBE": json.dumps({**json.loads(what["PROBE"]), "tell": str(asked)})}
    with forks.running(*train(run, *OFTEN), world_size=2, env=hold(tmp_path / "go") | what, preload=HELD) as job:
        job.wait_until(asked.exists, "the reason to end")
        (tmp_path / "go").touch()
        assert job.wait() == [code, code], job.output
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (4, 8, *own)
    ]
    assert ("saved at step 10 of 32" in job.output) == (own == [10])


def test_stop_on_a_full_disk_is_kept_in_memory(forks: Forks, tmp_path: Path) -> None:
    line = train(tmp_path / "run", *ONCE)
    env = hold(tmp_path / "run", fails=errno.ENOSPC) | in_step(9, signal="SIGTERM", sleep_s=600)
    assert "no checkpoint of step 8, trying this node's memory" in forks.ends(*line, env=env, preload=HELD, code=143)
    assert "resumed from step 8, rescued by rank 0 on " in forks.ends(*line)


@pytest.mark.parametrize(("more", "fails", "code", "line"), [
    ((), errno.ENOSPC, 2, "has no space left"), ((), errno.EIO, 2, "must be writable, got Input/output error"),
    ((), -1, 1, "LookupError: nobody expected this"), (SHARDED, errno.ENOSPC, 2, "has no space left"),
])
def test_failed_save_ends_all_ranks_at_the_next_step(
    forks: Forks, tmp_path: Path, more: tuple[str, ...], fails: int, code: int, line: str
) -> None:
    run, failed = tmp_path / "run", tmp_path / "failed"
    env = hold(tmp_path / "go", step=20, fails=fails)
    env |= in_step(22, rank=0, tell=str(tmp_path / "go"), until=str(failed), sleep_s=0.3)
    output = forks.ends(*train(run, *ONCE, *more), world_size=2, env=env, preload=HELD, code=code)
    assert line in output
    if code == 2:
        assert output.count(line) == 1
        assert list((run / "checkpoints").iterdir()) == []
    assert 22 <= max(entry["step"] for entry in metrics(run)) < 32
    assert steps(run / "checkpoints") == []


def test_survivor_that_writes_a_rescue_does_not_wait_for_the_disk(
    forks: Forks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    env = hold(tmp_path / "never") | in_step(10, rank=1, signal="SIGKILL")
    forks.ends(*train(run, *OFTEN), world_size=2, env=env, preload=HELD, code=[171, -9])
    assert steps(run / "checkpoints") == [4]
    output = forks.ends(*train(run, *OFTEN), world_size=2)
    assert "resumed from step 9, rescued by rank 0 on " in output
    assert result(run)["digest"] == result(undisturbed(2))["digest"]


def held_save_without_rescue() -> None:
    """Preloaded. `held_save` on a node without memory for a rescue."""
    from rankup.state import memory

    def fails(*_: Any) -> None:
        raise UserError("no memory is left")

    held_save()
    memory.write_rescue = fails


def test_survivor_without_a_rescue_finishes_the_running_save(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line, preload = train(run, *OFTEN), "tests.run.test_saver:held_save_without_rescue"
    env = hold(tmp_path / "go") | in_step(10, rank=1, signal="SIGKILL")
    with forks.running(*line, world_size=2, env=env, preload=preload) as job:
        job.wait_until(lambda: job.processes[1].code is not None, "end of rank 1")
        (tmp_path / "go").touch()
        assert job.wait() == [171, -9], job.output
    output = forks.ends(*line, world_size=2)
    assert "resumed from step-00000008" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_during_a_save_have_no_exchange_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    write, done, exchanges, saved = Folder.write, threading.Event(), list[Any](), list[int]()

    def held(*values: Any, **more: Any) -> Any:
        done.wait()
        return write(*values, **more)

    def exchange(value: Any) -> Any:
        exchanges.append(value)
        return 1 if isinstance(value, int) else [value] * 3  # rank 0 is writing

    monkeypatch.setattr(Folder, "write", held)
    group: Any = SimpleNamespace(rank=rank, is_rank0=rank == 0, world_size=3, device=torch.device("cpu"), max=exchange,
                                 gather=exchange, watch=SimpleNamespace(enter=lambda *_, **__: None))
    options = Options(sharded=False)
    saver = Saver(group, Folder(tmp_path), options, token="it", saved=saved.append, second=None)
    saver.save(8, lambda: b'{"step": 8}', {"count": {"n": 1}})
    exchanges.clear()
    for _ in range(5):
        saver.look()
    assert saver.left() == (rank == 0)
    saver.agree(1)
    saver.look()
    assert (exchanges, saved, saver.step) == ([], [], 8)
    done.set()
    saver.writing.join()
    saver.look()
    assert (exchanges, saved) == ([], [8] if rank == 0 else [])
    saver.agree(0)
    saver.look()
    assert (len(exchanges), saved, saver.step) == (1, [8], None)


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_sharded_save_is_published_soon_after_all_ranks_have_written_without_an_exchange_in_each_step(
    tmp_path: Path, steps: int
) -> None:
    others, asked, saved = 2.0, list[float](), list[int]()  # two other ranks write

    def total(own: torch.Tensor) -> torch.Tensor:
        asked.append(own.item())
        return own + others

    group: Any = SimpleNamespace(rank=0, is_rank0=True, world_size=3, device=torch.device("cpu"), sum=total,
                                 max=lambda value: value or int(others > 0), gather=lambda value: [value],
                                 on_rank0=lambda call: call(), watch=SimpleNamespace(enter=lambda *_, **__: None),
                                 rank_env=SimpleNamespace(local_world_size=1), log=SimpleNamespace(info=print))
    saver = Saver(
        group, Folder(tmp_path), Options(), token="it", saved=saved.append, second=None
    )
    saver.save(8, lambda: b'{"step": 8}', {"count": {"n": torch.zeros(1)}})
    saver.writing.join()  # this rank has written its part
    for _ in range(steps):
        saver.look()
    assert (saved, len(asked) <= 30) == ([], True), "published before the others have written, or asked in each step"
    others = 0.0
    for _ in range(1 + steps // 4):
        saver.look()
    assert (saved, saver.step, [path.name for path in tmp_path.iterdir()]) == ([8], None, ["step-00000008"])
