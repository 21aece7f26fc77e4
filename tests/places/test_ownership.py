"""One owner: a writer may freeze before any operation and wake at any later time, and its successor loses nothing."""

import contextlib
import json
import random
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankup.agent.status_files import StatusFile
from rankup.env.rank_env import RankEnv
from rankup.errors import PeerLost, UserError
from rankup.observe.metrics import Metrics, Position, entry
from rankup.places.files import discard, remove_unfinished, write_json
from rankup.places.lease import Lease, Lineage, StoreLease
from rankup.state.choice import in_order
from rankup.state.copies import Damaged, list_copies, step_of
from rankup.state.saver import Options
from rankup.state.second_place import SecondPlace
from tests.rigs.checkpoints import fetch, find_problem, load_checkpoint, save, second_place, steps
from tests.rigs.object_store import BUCKET, S3

SEED = 20261124
WAITS_S = 100  # seconds, for a busy machine
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.listdir"}


def newest_good_step(directory: Path) -> int:
    return max((step_of(path) for path in list_copies(directory) if not find_problem(path)), default=0)


class Writer:
    """An attempt in its own thread. It freezes before its operation `number`, counted from 1, until `wake`.

    `before` is called with the number of each operation. `ended` is None after success, or the error."""

    def __init__(self, work: Callable[["Writer"], None], number: int = 0) -> None:
        self.number, self.count, self.before = number, 0, lambda count: None
        self.counts = False  # true once it has checked the owner: before that it is no owner, and cannot be late
        self.owns = True  # False while it takes a folder: if two do so at once, either may get it
        self.frozen_or_over, self._go_on = threading.Event(), threading.Event()
        self.ended: BaseException | None = None

        def run() -> None:
            writers[threading.get_ident()] = self
            try:
                work(self)
            except (PeerLost, UserError, OSError) as error:
                self.ended = error
            finally:
                del writers[threading.get_ident()]
                self.frozen_or_over.set()

        self._thread = threading.Thread(target=run, daemon=True)

    def start(self) -> None:
        """Return once the attempt is frozen or has ended."""
        self._thread.start()
        assert self.frozen_or_over.wait(WAITS_S)

    def wake(self) -> None:
        self._go_on.set()

    def join(self) -> None:
        self._thread.join(WAITS_S)
        assert not self._thread.is_alive()

    def operation(self) -> None:
        self.count += self.counts
        self.before(self.count)
        if self.counts and self.count == self.number:
            self.frozen_or_over.set()
            assert self._go_on.wait(WAITS_S)

    def hold(self, place: SecondPlace, timeout_s: float) -> None:
        """Count the requests of `place` as operations."""
        place.retry_for(timeout_s)
        # If two find a mirror at the same time, the first to copy owns it
        is_owner = (lambda: True) if place.required else (lambda: place.lease.number > 0)
        place.place = replace(place.place, fs=_Held(place.place.fs, self, is_owner))


class _Held:
    def __init__(self, fs: Any, writer: Writer, is_owner: Callable[[], bool]) -> None:
        self._fs, self._writer, self._is_owner = fs, writer, is_owner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fs, name)
        if not callable(value):
            return value

        def request(*values: Any, **more: Any) -> Any:
            self._writer.operation()
            found = value(*values, **more)
            self._writer.counts = self._is_owner()
            return found

        return request


writers: dict[int, Writer] = {}


def _audit(event: str, values: tuple[Any, ...]) -> None:
    writer = writers.get(threading.get_ident())
    if writer is not None and event in OPERATIONS and "/run" in str(values[0]):
        writer.operation()


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_audit)  # for the rest of the process: it costs one lookup in an empty dict


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda number: None)
    monkeypatch.setitem(StoreLease.__init__.__kwdefaults__ or {}, "life_s", 0.02)
    for kind in (Lease, StoreLease):
        monkeypatch.setattr(kind, "_beat", lambda self: None)  # the attempts send their heartbeats themselves
    # Each attempt is on a machine of its own: the kernel does not know whether another one is dead
    monkeypatch.setattr("rankup.places.lease.kernel_id", lambda: secrets.token_hex(4))


class _Counting(Lease):
    def _take(self) -> None:
        writer = writers[threading.get_ident()]
        writer.counts, writer.owns = True, False
        super()._take()
        writer.owns = True


class InFolder:
    """Attempts with the same run directory."""

    looks = 0  # operations of an attempt before it owns the run

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True)

    def attempt(self, name: str, num_saves: int, writer: Writer) -> None:
        checkpoints = self.run_dir / "checkpoints"
        with _Counting(self.run_dir, name, life_s=0.02, beat_s=0.02) as lease:
            remove_unfinished(checkpoints)
            lineage = Lineage.read(self.run_dir) or Lineage.new(name, "")
            step = newest_good_step(checkpoints)
            lineage.add_attempt(name, step=step, writer=lineage.attempts[-1][0] if lineage.attempts else None)
            lineage.write(self.run_dir, check=lease.check)
            discard(self.run_dir / "result.json", check=lease.check)

            def check() -> None:
                lease.check()
                writer.operation()  # it may also freeze between the owner's check and the write of the line

            status = StatusFile(self.run_dir, RankEnv())
            status.attempt = name
            status.claim(lease)
            at = Position(step)
            metrics = Metrics(self.run_dir, at, saved=at, tensorboard=False, check_owner=check)
            with contextlib.closing(metrics):
                for number in range(1, num_saves + 1):
                    metrics.write(entry(step + number, {name: 1.0}))
            for number in (*range(1, num_saves + 1), num_saves):  # one step twice, as after a stop in evaluation
                save(checkpoints, step + number, keep=2, attempt=name, check_owner=lease.check)
                lease._write(number)
            write_json(self.run_dir / "result.json", name, check=lease.check)

    def look(self, name: str, num_saves: int) -> None:
        lineage, checkpoints = Lineage.read(self.run_dir), self.run_dir / "checkpoints"
        assert lineage is not None
        assert lineage.attempts[-1][0] == name
        assert json.loads((self.run_dir / "result.json").read_text()) == name
        for file in ("lease.json", "status.json"):
            assert json.loads((self.run_dir / file).read_text())["attempt"] == name
        began = lineage.attempts[-1][1]
        lines = list(map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines()))
        assert [line["step"] for line in lines if name in line] == [*range(began + 1, began + num_saves + 1)]
        assert [line["step"] for line in lines] == [*range(1, began + num_saves + 1)]
        last = lineage.attempts[-1][1] + num_saves
        for step in {last, max(last - 1, lineage.attempts[-1][1] + 1)}:
            found = load_checkpoint(checkpoints / f"step-{step:08d}")
            assert (found.step, found.record["attempt"]) == (step, name)
        for path in checkpoints.glob("step-*"):  # a late attempt may have published some; the lineage ignores them
            found = load_checkpoint(path)
            assert found.step <= last or not lineage.has(found.step, found.record["attempt"])


class AtSecondPlace:
    """Attempts on separate machines with the same address."""

    def __init__(self, folder: Path, url: str, *, required: bool) -> None:
        self.folder, self.url, self.required = folder, url, required
        self.stack = contextlib.ExitStack()  # of the attempt that began last
        self.looks = 2 if required else 0  # the run's owner, and a heartbeat of that owner

    def open(self, name: str, run_dir: Path) -> SecondPlace:
        return second_place(self.url, run_dir, name, Options(keep=1, save_timeout_s=60.0), required=self.required)

    def attempt(self, name: str, num_saves: int, writer: Writer | None) -> None:
        run_dir = self.folder / name / "run"
        run_dir.mkdir(parents=True)
        place = self.open(name, run_dir)
        with contextlib.ExitStack() as self.stack:
            if writer:
                writer.hold(place, 60.0)
            place.adopt(self.stack, wanted=lambda there: True)
            lineage = Lineage.read(run_dir) or Lineage("run", name, "", [])
            group: Any = SimpleNamespace(hosts=["host"])
            for _, one in in_order(place.list(), lineage, lambda other: True, group):
                with contextlib.suppress(Damaged):
                    fetch(place, one.where)
                    break
            step = newest_good_step(run_dir / "checkpoints")
            if not num_saves:
                return
            lineage.add_attempt(name, step=step, writer=lineage.attempts[-1][0] if lineage.attempts else None)
            lineage.write(run_dir)
            place.run = lineage.run
            for number in range(1, num_saves + 1):
                with (run_dir / "metrics.jsonl").open("a") as file:
                    file.write(f"{name} {step + number}\n")
                path = save(run_dir / "checkpoints", step + number, keep=1, attempt=name, run=lineage.run)
                if number == num_saves:
                    write_json(run_dir / "result.json", name)
                place.upload(path)
                if self.required and not place.lease._released.is_set():
                    place.lease._write(number)
            if self.required:
                place.finish(stopped=False)

    def look(self, name: str, num_saves: int) -> None:
        self.attempt("reader", 0, None)
        written, read = self.folder / name / "run", self.folder / "reader" / "run"
        (newest,) = steps(read / "checkpoints")
        for file in ("run.json", "result.json", "metrics.jsonl", f"checkpoints/step-{newest:08d}/manifest.json"):
            assert (written / file).read_bytes() == (read / file).read_bytes(), file
        assert steps(written / "checkpoints") == [newest]


def schedule(runs: InFolder | AtSecondPlace, num_operations: int, rng: random.Random) -> None:
    """Freeze one or two attempts, one after the other. Wake them in any order during the last one, or after it.

    Some have failed: they release the run while their thread still uploads."""
    sleepers = []
    for name in ["first", "second"][: rng.randint(1, 2)]:
        work = lambda writer, name=name: runs.attempt(name, 2, writer)  # noqa: E731
        sleepers.append(Writer(work, rng.randint(1, num_operations)))
        sleepers[-1].start()
        if isinstance(runs, AtSecondPlace) and rng.random() < 0.5:
            runs.stack.close()
    last = Writer(lambda writer: runs.attempt("last", 3, writer))
    # Or after the end. An attempt that wakes while the last one still checks the owner is alive, and keeps the run
    at = {sleeper: rng.randint(runs.looks + 1, 2 * num_operations) for sleeper in sleepers}

    def wake(count: int) -> None:
        for sleeper, moment in at.items():
            if moment <= count and last.owns:
                sleeper.wake()

    last.before = wake
    last.start()
    for sleeper in sleepers:
        sleeper.wake()
        sleeper.join()
    last.join()
    assert last.ended is None, last.ended
    runs.look("last", 3)


def count_operations(runs: InFolder | AtSecondPlace) -> int:
    whole = Writer(lambda writer: runs.attempt("whole", 2, writer))
    whole.start()
    whole.join()
    assert whole.ended is None, whole.ended
    return whole.count


def test_owner_of_a_folder_that_freezes_anywhere_harms_no_successor(tmp_path: Path) -> None:
    count = count_operations(InFolder(tmp_path / "whole"))
    assert count > 40
    for seed in range(SEED, SEED + 100):
        print("schedule", seed)
        schedule(InFolder(tmp_path / str(seed)), count, random.Random(seed))


@pytest.mark.parametrize(("where", "num"), [("folder", 35), ("s3", 15)])
@pytest.mark.parametrize("required", [True, False])
def test_owner_of_a_second_place_that_freezes_anywhere_harms_no_successor(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, where: str, num: int, required: bool
) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    base = f"s3://{BUCKET}/{tmp_path.name}" if where == "s3" else str(tmp_path / "there")
    runs = AtSecondPlace(tmp_path / "whole", f"{base}/whole", required=required)
    count = count_operations(runs)
    assert count > 20
    for seed in range(SEED, SEED + num):
        print("schedule", seed)
        schedule(AtSecondPlace(tmp_path / str(seed), f"{base}/{seed}", required=required), count, random.Random(seed))


def test_mirror_that_failed_at_the_opening_stays_with_its_newer_owner(tmp_path: Path) -> None:
    runs = AtSecondPlace(tmp_path, str(tmp_path / "mirror"), required=False)
    runs.attempt("first", 1, None)
    run_dir = tmp_path / "first" / "run"
    late, lineage = runs.open("late", run_dir), Lineage.read(run_dir)  # it asked the mirror in vain
    assert lineage is not None
    runs.attempt("other", 2, None)
    lineage.add_attempt("late", step=1, writer="first")
    lineage.write(run_dir)
    late.run = lineage.run
    path = save(run_dir / "checkpoints", 2, keep=1, attempt="late", run=lineage.run)
    with pytest.raises(PeerLost, match="another attempt has continued"):
        late.upload(path)
    runs.look("other", 2)


def test_damaged_copy_on_a_mirror_is_not_a_failing_mirror(tmp_path: Path) -> None:
    runs = AtSecondPlace(tmp_path, str(tmp_path / "mirror"), required=False)
    runs.attempt("first", 1, None)
    (manifest,) = (tmp_path / "mirror").glob("run/*/checkpoints/*/*/manifest.json")
    manifest.write_text("{}")
    mirror = runs.open("next", tmp_path / "first" / "run")  # its disk has a copy too
    with contextlib.ExitStack() as stack:
        mirror.adopt(stack, wanted=lambda there: True)
    (one,) = mirror.list()
    with pytest.raises(Damaged, match="does not match the digest"):
        fetch(mirror, one.where)
