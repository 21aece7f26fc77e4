"""Parts in memory: which ones are taken, and that no damaged part ever is."""

import contextlib
import json
import os
import random
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.state import parts as state_parts
from rankup.state.choice import NodeMemory, distinct
from rankup.state.copies import Damaged, list_copies, to_json
from rankup.state.memory import node_id
from rankup.state.parts import Parts, peers_of
from rankup.state.place import Candidate, Folder
from rankup.state.reading import Copy, load
from rankup.state.saver import HostCopies, Options
from tests.rigs.checkpoints import damage, training_state
from tests.rigs.thread_ranks import Ranks

TRIES = 1000
RANKS, STEPS, RUN = 2, (10, 20), "0123456789abcdef"


def weight(rank: int, step: int) -> torch.Tensor:
    return torch.arange(64.0) + 1000 * rank + step


def keep(ranks: Ranks, *steps: int, world_size: int = RANKS) -> None:
    def work(group: Any) -> None:
        kept = Parts(group, RUN, 1)
        kept.wanted = True
        for step in steps:
            record = to_json(training_state(step, world_size=world_size, attempt="first"))
            # The state of a rank's own loader makes its part differ from all others
            own = {f"{group.rank} of {RANKS}": None}
            state = {"model": {"weight": weight(group.rank, step)}, "step": {"n": step}, "loaders": own}
            kept.take(step, lambda record=record, state=state: (record, state))  # type: ignore[misc]
        kept.wait()
        assert kept._writing.failure is None

    ranks.each(work)


def go_on(ranks: Ranks) -> tuple[int, list[torch.Tensor]] | None:
    """Return the newest step that all ranks resume, and their weights."""

    def work(group: Any) -> Copy | None:
        own = [replace(one, rank=group.rank, node=node_id()) for one in NodeMemory(group, Options()).list()]
        found = [Candidate(**values) for each in group.gather([asdict(one) for one in own]) for values in each]
        for one in sorted(distinct(found, RANKS), key=lambda one: -one.step):
            with contextlib.suppress(Damaged):
                return load(group, one)
        return None

    copies = ranks.each(work)
    if None in copies:
        assert copies == [None, None]
        return None
    weights, steps = [], set()
    for copy in copies:
        tracked = copy.tracked
        weights.append(tracked["model"]["weight"])
        steps |= {copy.step, tracked["step"]["n"]}
    (step,) = steps
    return step, weights


def is_right(found: tuple[int, list[torch.Tensor]]) -> bool:
    step, weights = found
    return all(torch.equal(each, weight(rank, step)) for rank, each in enumerate(weights))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory").mkdir()
    home = tmp_path / "memory" / f"rankup-{os.getuid()}"
    monkeypatch.setattr("rankup.state.memory.homes", lambda: [home])
    return tmp_path / "memory"


def harm(folder: Path, draw: random.Random) -> str:
    """Damage files in memory in one random way, and return a description."""
    rank, step = draw.randrange(RANKS), draw.choice(STEPS)
    other = STEPS[1 - STEPS.index(step)]
    path = folder / f"{RUN}.rank-{rank:05d}" / f"step-{step:08d}"
    twin = folder / f"{RUN}.rank-{1 - rank:05d}" / path.name
    file = draw.choice(sorted(path.iterdir()))
    what = draw.choice(("damaged",) * 5 + ("of another step", "step renamed", "of another rank", "ranks swapped",
                                           "ranks renamed"))
    match what:
        case "damaged":
            damage(file, draw)
        case "of another step":
            shutil.copy(path.with_name(f"step-{other:08d}") / file.name, file)
        case "step renamed":
            shutil.rmtree(path)
            path.with_name(f"step-{other:08d}").rename(path)
        case "of another rank":
            shutil.copy(twin / file.name.replace(f"{rank:05d}", f"{1 - rank:05d}"), file)
        case "ranks swapped":
            for name in ("state.json", "tree.json", "manifest.json"):
                mine, its = (path / name).read_bytes(), (twin / name).read_bytes()
                (path / name).write_bytes(its)
                (twin / name).write_bytes(mine)
        case "ranks renamed":
            shutil.move(path, folder / "aside")
            shutil.move(twin, path)
            shutil.move(folder / "aside", twin)
    return f"{what}: {file.relative_to(folder)}"


def test_no_damaged_part_is_ever_loaded(memory: Path, tmp_path: Path) -> None:
    """Of two steps one is damaged. All ranks then resume the other."""
    ranks, draw = Ranks(RANKS), random.Random()
    keep(ranks, *STEPS)
    assert (found := go_on(ranks)) is not None
    assert found[0] == 20
    assert is_right(found)
    whole = tmp_path / "whole"
    shutil.copytree(memory, whole)
    came_to = dict.fromkeys((10, 20), 0)
    for _ in range(TRIES):
        shutil.rmtree(memory)
        shutil.copytree(whole, memory)
        what = harm(memory / f"rankup-{os.getuid()}", draw)
        found = go_on(ranks)
        assert found is not None or what.startswith("step renamed"), what
        assert found is None or is_right(found), what
        if found is not None:
            came_to[found[0]] += 1
    assert min(came_to.values()) > TRIES // 10, came_to


def test_parts_for_another_number_of_ranks_are_not_taken(memory: Path) -> None:
    ranks = Ranks(RANKS)
    keep(ranks, 10)
    keep(ranks, 20, world_size=RANKS + 1)
    assert (found := go_on(ranks)) is not None
    assert found[0] == 10


@pytest.mark.parametrize(("wanted", "kept"), [(True, True), (True, False), (False, True), (False, False)])
def test_parts_of_earlier_attempts_are_removed_if_ranks_differ(memory: Path, wanted: bool, kept: bool) -> None:
    """`wanted`: it takes parts, perhaps its first ones later. `kept`: it has taken some. With neither, rescued copies
    stay."""
    keep(Ranks(RANKS), 10)
    held = [*memory.glob("*/*/*")]
    parts = Parts(SimpleNamespace(device=torch.device("cpu")), RUN, 1)  # type: ignore[arg-type]
    parts.wanted, parts._folders = wanted, {0: held[0].parent} if kept else {}
    parts.distrust()
    assert [path.exists() for path in held] == [not (wanted or kept)] * RANKS


def test_parts_take_three_times_their_size(memory: Path) -> None:
    size = 32 * 2**20

    def other_memory() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssAnon"].split()[0]) * 1024

    def work(group: Any) -> int:
        kept, live = Parts(group, RUN, 1), torch.ones(size // 4)
        kept.wanted = True
        group.barrier()
        before = other_memory()
        for step in (1, 2, 3):
            record = to_json(training_state(step, world_size=RANKS))
            kept.take(step, lambda record=record: (record, {"model": {"weight": live}}))  # type: ignore[misc]
        kept.wait()
        group.barrier()
        return other_memory() - before

    assert max(Ranks(RANKS).each(work)) < 1.5 * RANKS * size  # of both ranks
    files = [path for path in memory.rglob("*") if path.is_file()]
    assert len([path for path in files if path.stat().st_size >= size]) == 2 * RANKS
    assert sum(path.stat().st_blocks * 512 for path in files) < 2.1 * RANKS * size


def test_failing_parts_leave_the_last_whole_ones_until_the_next_save(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_one(folder: Path, step: int, files: Any) -> Path:
        if step == 30 and folder.name.endswith("rank-00001"):
            raise UserError("this one fails.")
        return kept_one(folder, step, files)

    def work(group: Any) -> list[list[str]]:
        kept, seen, folder = Parts(group, RUN, 1), list[list[str]](), memory / f"rankup-{os.getuid()}"
        kept.wanted = True
        for step in (10, 20, 30, 40):
            record, own = to_json(training_state(step, world_size=RANKS)), {f"{group.rank} of {RANKS}": None}
            state = {"model": {"weight": weight(group.rank, step)}, "step": {"n": step}, "loaders": own}
            kept.take(step, lambda record=record, state=state: (record, state))  # type: ignore[misc]
        group.barrier()
        seen.append(sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")))
        if group.rank == 0:
            assert (found := go_on(Ranks(RANKS))) is not None
            assert (found[0], is_right(found)) == (20, True)
        group.barrier()
        kept.close()
        group.barrier()
        return [*seen, sorted(map(str, folder.glob("*")))]

    kept_one, ranks = state_parts._keep, Ranks(RANKS)
    monkeypatch.setattr(state_parts, "_keep", keep_one)
    first, _ = ranks.each(work)
    assert first == [[f"{RUN}.rank-{name}" for name in ("00000/step-00000020", "00000/step-00000030",
                                                        "00001/step-00000010", "00001/step-00000020")], []]
    assert ranks.said == ["no part of the state is kept in memory from now on: this one fails."]


def test_unwritable_part_of_another_rank_leaves_nobody_waiting(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(source: int, _: Any) -> Any:
        served.append(source)
        return {"step": 10, "files": {}}, {}

    served: list[int] = []
    waits = SimpleNamespace(wait=lambda: served.append(0))
    monkeypatch.setattr("rankup.state.parts._receive", receive)
    monkeypatch.setattr("rankup.state.parts._send", lambda *_: [(waits, None)])
    kept = Parts(Ranks(RANKS).group(0), RUN, 1)
    kept._peer, kept._folders = 1, {rank: memory / f"rank-{rank}" for rank in range(3)}
    for rank in (1, 2):
        (memory / f"rank-{rank}").write_text("in the way")
    with pytest.raises(UserError, match="rank-"):
        kept._write(10, {})
    assert sorted(served) == [0, 1, 2]
    assert [path.name for path in list_copies(memory / "rank-0")] == ["step-00000010"]


def test_part_of_another_rank_that_arrives_damaged_is_not_kept(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = json.loads((Folder(memory / "there").write(10, {"state.json": b"{}"}) / "manifest.json").read_bytes())
    kept = Parts(Ranks(RANKS).group(0), RUN, 1)
    kept._folders = {rank: memory / f"rank-{rank}" for rank in range(2)}
    for content in (b"{}", b"[]"):
        monkeypatch.setattr("rankup.state.parts._receive", lambda *_, content=content: (sent, {"state.json": content}))
        with pytest.raises(Damaged, match="did not arrive whole") if content == b"[]" else contextlib.nullcontext():
            kept._write(10, {})
        assert len(list_copies(memory / "rank-1")) == (content == b"{}")


def test_step_does_not_wait_for_the_devices_copy_of_a_part(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def wait(_: HostCopies) -> float:
        waits.append(threading.current_thread().name)
        return 0.0

    monkeypatch.setattr(HostCopies, "wait", wait)
    keep(Ranks(RANKS), 10, 20)
    assert waits == ["part"] * 4


def test_second_part_is_on_the_next_node_unless_another_node_holds_the_same() -> None:
    split = [(f"node{rank // 2}", f"part {rank}", 1) for rank in range(6)]
    assert peers_of(split) == [2, 3, 4, 5, 0, 1]
    assert peers_of(split[:5]) == [2, 3, 4, 4, 0]
    assert peers_of(split[:2]) == [None, None]
    hybrid = [(f"node{rank // 2}", f"part {rank % 2}", 1) for rank in range(4)]
    assert peers_of(hybrid) == [None] * 4
