"""Which of several copies a run resumes from, and which copies it never uses."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.loop.settings import FORMAT, check_record
from rankup.places.files import STAGING
from rankup.places.lease import Lineage
from rankup.state.choice import NodeMemory, in_order
from rankup.state.copies import to_json
from rankup.state.memory import keep_on_disk, list_held, write_rescue
from rankup.state.place import CHECKPOINT, MIRROR, PEER, RESCUE, SECOND, Candidate, Folder
from rankup.state.run import Run
from rankup.state.saver import Options
from rankup.state.second_place import SecondPlace
from tests.rigs.checkpoints import files_of, flip, save, second_place, training_state
from train.config import Config
from train.run.run_directory import _check_settings

RUN = "0123456789abcdef"


def line(number: int, *attempts: tuple[str, int], run: str = RUN) -> Lineage:
    return Lineage(run, "first", "", [list(attempt) for attempt in attempts], number)


A = line(1, ("a", 0))
B = line(2, ("a", 0), ("b", 4))  # resumed from step 4 of `a`
NODES = ["one", "one", "other"]  # by rank


class Node:
    """One rank, with the copies on its disk and in its memory, and the warnings that it has logged."""

    on_rank0 = Group.on_rank0

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.said = folder / "run", list[str]()
        self.run_dir.mkdir()
        self.rank, self.local_rank, self.world_size, self.hosts, self.is_rank0 = 0, 0, 1, ["node0"], True
        self.log = SimpleNamespace(warning=self.said.append, info=self.said.append)
        self.rank_env, self.restarted, self.attempt = SimpleNamespace(start="", agent=None), False, "next"
        self.jobs: set[str] = set()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        return value

    def copy(self, step: int, attempt: str, lineage: Lineage) -> Path:
        """Write a second copy of this step."""
        directory = self.run_dir / SECOND / lineage.run
        return save(directory, step, attempt=attempt, run=lineage.run, lineage=lineage.values())

    def rescue(self, step: int, writer: str, **fields: Any) -> None:
        state = training_state(step, **{"attempt": writer} | fields)
        write_rescue(state["run"], step, writer, lambda: files_of(state, {"weight": torch.ones(3)}))

    def go_on(
        self, known: Lineage | None, newest: tuple[int, str] | None = None, *, damaged: bool = False, of: str = RUN,
        replaced: bool = False, fresh: bool = False, mirror: SecondPlace | None = None,
    ) -> Run:
        """Resume. `newest`: step and attempt of rank 0's checkpoint of the run `of`. `replaced`: it is there twice."""
        shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)
        if newest:
            path = save(self.run_dir / "checkpoints", newest[0], attempt=newest[1], run=of)
            if replaced:
                shutil.copytree(path, f"{path}.replaced")
            if damaged:
                flip(path / "model.safetensors", 99)

        group: Any = self
        check = partial(_check_settings, config=Config(), group=group)
        run = Run(group, Options(check=partial(check_record, more=check), fresh=fresh))
        run.token, run.lineage = "", known or line(0, run="new")
        run.places = {MIRROR: mirror} if mirror else {}
        run._found = [*(mirror.list() if mirror else ()), *run.checkpoints.list()]
        run._choose()
        return run


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("rankup.state.memory.SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return Node(tmp_path)


@pytest.mark.parametrize(("newest", "known", "copy", "expected"), [
    (None, None, (4, "a", A), (4, "a")),  # node 0 came back with an empty disk
    ((4, "a"), None, (8, "a", A), (4, "a")),  # it has checkpoints, but does not know their run
    (None, line(2, ("b", 0)), (4, "a", A), (4, "a")),  # its checkpoints are gone, and the copy is better than nothing
    (None, B, (4, "a", line(1, ("a", 0), run="other")), None),
    ((4, "a"), A, (8, "a", A), (8, "a")),
    ((8, "a"), A, (8, "a", A), (8, "a")),  # its own checkpoint is as new
    ((4, "a"), B, (8, "a", A), (4, "a")),  # the run left this step 8 behind
    ((4, "a"), A, (8, "b", B), (8, "b")),  # meanwhile another node was node 0
    ((9, "a"), A, (8, "b", B), (8, "b")),  # the run left this step 9 behind
    ((9, "x"), A, (2, "x", A), (9, "x")),  # no node knows a newer lineage
])
def test_newest_copy_of_the_newest_lineage_is_used(
    node: Node, newest: tuple[int, str] | None, known: Lineage | None, copy: tuple[int, str, Lineage],
    expected: tuple[int, str] | None,
) -> None:
    node.copy(*copy)
    run = node.go_on(known, newest)
    found = run.newest
    assert (found and (found.step, found.record["attempt"])) == expected
    if expected is None:
        assert not run.words
    elif newest == expected:
        assert run.words == f"step-{expected[0]:08d}"
    else:
        assert run.words == f"step {expected[0]}, the second copy on node0 (rank 0)"


def test_checkpoint_of_another_run_gives_its_id_only_to_a_folder_without_one(node: Node) -> None:
    """Otherwise this run would remove the other run's copies in memory."""
    assert node.go_on(A, (9, "x"), of="other").lineage.run == RUN
    assert node.go_on(None, (9, "x"), of="other").lineage.run == "other"


def test_copy_of_a_mirror_that_is_refused_is_named_where_it_is(node: Node, tmp_path: Path) -> None:
    """The folder into which it was fetched is gone."""
    mirror = second_place(str(tmp_path / "mirror"), node.run_dir, "it", Options(), required=False)
    state = training_state(8, format=FORMAT + 1, attempt="a")
    mirror.run, mirror.lease.number = RUN, 1
    mirror.put(Folder(tmp_path / "elsewhere").write(8, files_of(state, {"weight": torch.ones(3)})))
    (path,) = tmp_path.glob("mirror/run/*/checkpoints/*/*")
    where = path.relative_to(tmp_path / "mirror/run")
    mirror._listed = [replace(Candidate.of(where, state), kind=MIRROR, step=8, attempt="a", run=RUN)]
    with pytest.raises(UserError, match=f"^checkpoint: {path} must be of format {FORMAT}, got format "):
        node.go_on(A, mirror=mirror)


def test_later_checkpoint_that_is_not_used_and_a_start_without_one_are_reported(node: Node) -> None:
    """The user may have put the checkpoint back, or lost the disk that had them all."""
    node.copy(4, "a", A)
    node.go_on(B, (8, "a"))
    assert node.said == [
        "checkpoint step-00000008 was skipped: this run does not continue from the attempt that wrote it"]
    node.go_on(A, (3, "a"))
    assert len(node.said) == 1  # it is older than the one that is used
    shutil.rmtree(node.run_dir / SECOND)
    node.go_on(None)
    assert len(node.said) == 1  # a new run
    node.go_on(A)
    assert node.said[1:] == ["the run has no checkpoint yet, or lost all: it begins again at step 0"]


def test_damaged_checkpoint_does_not_count_as_saved(node: Node) -> None:
    """Otherwise the run would not save that step again, and would write no rescue before it."""
    node.copy(4, "a", A)
    run = node.go_on(A, (8, "a"), damaged=True)
    assert run.newest is not None
    assert (run.newest.step, run.saved) == (4, None)


def test_newer_of_two_checkpoints_of_a_step_is_used_unless_it_is_damaged(node: Node) -> None:
    """A kill between the renames of a save leaves both."""
    for damaged in (False, True):
        run = node.go_on(A, (8, "a"), damaged=damaged, replaced=True)
        assert run.newest is not None
        assert run.newest.path.suffix == (".replaced" if damaged else "")
        assert run._newest_here == run.newest.path


def test_renamed_rescue_of_another_run_is_no_damaged_copy_of_this_one(node: Node) -> None:
    """Then this run could not begin anew."""
    node.rescue(8, "x", run="other")
    (path,) = list_held()
    path.rename(path.with_name("step-00000009"))
    assert (node.go_on(None).newest, node.said) == (None, [])


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_node_0_with_an_empty_disk_learns_the_run_from_the_memory_of_its_own_job_alone(
    node: Node, part: bool, fresh: bool
) -> None:
    """The run has no checkpoint yet. Node 0's new agent gives the job a new id; that of another node knows the old. To
    start node 0 again with --fresh, as the whole job was started, is no new launch."""
    lineage, group = Lineage(RUN, "job-1-0", "job-1", [["job-1-0-mark", 0]], 1), cast("Any", node)
    node.rescue(7, "job-1-0-mark", lineage=lineage.values(), ranks=[0], world_size=1)
    if part:
        (path,) = list_held()
        path.parent.rename(path.parent.with_name(f"{RUN}.rank-00000"))
    for jobs, known in (([], None), (["job-2", "job-11", "job"], None), (["job-1", "job-2"], lineage.values())):
        node.rank_env, node.jobs = SimpleNamespace(start="job-2", agent={}), {*jobs}
        assert [one.lineage for one in NodeMemory(group, Options()).list()] == [known]
        if not part:
            words = "step 7, rescued by rank 0 on node0; no finished step was lost" if known else ""
            node.said.clear()
            node.rank, node.hosts = (0, ["node0"]) if known else (1, ["empty", "node0"])
            assert node.go_on(None, fresh=fresh).words == words
            unused = "begins anew: step 7, rescued by rank 0 on node0, is of another run and not used"
            assert node.said == ([] if known else [unused])


def test_rescue_that_an_agent_keeps_on_disk_is_found_there(node: Node) -> None:
    """The disk of node 1 does not have the run, and that of node 0 may belong to another attempt by now."""
    lineage = Lineage(RUN, "job-1-0", "job-1", [["job-1-0-mark", 0]], 1)
    node.rescue(7, "job-1-0-mark", lineage=lineage.values())
    assert keep_on_disk(node.run_dir, {"job-2"}) is None
    lineage.write(node.run_dir)
    (node.run_dir / "lease.json").write_text('{"attempt": "job-2-0"}')
    assert keep_on_disk(node.run_dir, {"job-1"}) is None
    (node.run_dir / "lease.json").write_text('{"attempt": "job-1-1"}')
    kept = keep_on_disk(node.run_dir, {"job-1"})
    assert kept == node.run_dir / "checkpoints/step-00000007"
    assert keep_on_disk(node.run_dir, {"job-1"}) is None
    shutil.rmtree(kept)
    (node.run_dir / "run.json").unlink()
    assert keep_on_disk(node.run_dir, {"job-1"}) == node.run_dir / SECOND / RUN / "step-00000007"
    assert not list(node.run_dir.rglob(f"{STAGING}*"))
    shutil.rmtree(next(list_held()))
    assert node.go_on(None).words == "step 7, the second copy on node0 (rank 0)"
    assert node.said == []


def test_copies_of_several_runs_are_refused_if_node_0_knows_no_run(node: Node) -> None:
    for name in ("one", "other"):
        node.copy(4, "a", line(1, ("a", 0), run=name))
    with pytest.raises(UserError, match=r"got no run and copies of 2 runs: .* and .* Move away"):
        node.go_on(None)


@pytest.mark.parametrize(("known", "listed", "expected"), [
    # The agent of rank 0 is new, and does not know that the rescue is of this job; that of rank 1 shares its memory
    (None, [Candidate(0, "one", RESCUE, "/8", "", 8, "a", RUN),
            Candidate(1, "one", RESCUE, "/8", "", 8, "a", RUN, A.values())], [(1, 8)]),
    # Two ranks share a disk, and another node has the same path
    (A, [Candidate(rank, NODES[rank], PEER, "/8", "", 8, "a", RUN, A.values()) for rank in range(3)], [(0, 8), (2, 8)]),
    # An unreadable copy is tried, so that it is reported
    (A, [Candidate(0, "one", CHECKPOINT, f"/{step}", "", step, "a" * (step < 9), RUN) for step in (8, 9)],
     [(0, 9), (0, 8)]),
    # The newest lineage resumed from step 4
    (None, [Candidate(1, "one", PEER, "/8", "", 8, "a", RUN, A.values()),
            Candidate(2, "other", PEER, "/6", "", 6, "b", RUN, B.values())], [(2, 6), (1, 8)]),
])
def test_copies_are_tried_in_this_order(
    known: Lineage | None, listed: list[Candidate], expected: list[tuple[int, int]]
) -> None:
    group: Any = SimpleNamespace(hosts=NODES)
    found = in_order(listed, known, lambda line: True, group)
    assert [(one.rank, one.step) for _, one in found] == expected


@pytest.mark.parametrize("fields", [
    {"run": "fedcba9876543210"}, {"attempt": "another"}, {"config": Config(lr=0.5).model_dump()},
    {"format": 1},
])
def test_rescue_of_another_run_attempt_or_setting_is_never_used(node: Node, fields: dict[str, Any]) -> None:
    node.rescue(7, "a", **fields)
    assert node.go_on(A, (6, "a")).words == "step-00000006"
    assert len(node.said) == ("format" in fields or "config" in fields)
    assert all(text.startswith("skipped the rescue in the memory of node0: ") for text in node.said)


@pytest.mark.parametrize(("content", "why"), [
    (b"", "its state.json is missing or damaged"), (b'{"step": 7', "its state.json is missing or damaged"),
    (None, "its state.json is missing or damaged"),
    (to_json(training_state(7, format=FORMAT + 1, attempt="a")), f"must be of format {FORMAT}, got format "),
    (to_json(training_state(7, attempt="a") | {"epoch": "1"}), "state.json: epoch is '1'"),
], ids=["empty", "cut", "missing", "later format", "wrong type"])
@pytest.mark.parametrize("part", [False, True])
def test_copy_in_memory_that_cannot_be_used_is_named_if_the_run_has_none_as_new(
    node: Node, content: bytes | None, why: str, part: bool
) -> None:
    node.rescue(7, "a", world_size=1, ranks=[0])
    (path,) = list_held()
    (path / "state.json").unlink()
    if content is not None:
        (path / "state.json").write_bytes(content)
    if part:
        path.parent.rename(path.parent.with_name(f"{RUN}.rank-00000"))
    node.go_on(A, (6, "a"))
    (said,) = node.said
    assert said.startswith(f"skipped {'a part' if part else 'the rescue'} in the memory of node0: ")
    assert why in said
    node.go_on(A, (7, "a"))
    node.go_on(line(1, ("a", 0), run="other"), (6, "a"), of="other")  # the memory also holds copies of other runs
    assert len(node.said) == 1


def test_parts_of_another_number_of_ranks_are_named(node: Node) -> None:
    node.rescue(7, "a", world_size=3, ranks=[0])
    (path,) = list_held()
    path.parent.rename(path.parent.with_name(f"{RUN}.rank-00000"))
    node.go_on(A, (6, "a"))
    (said,) = node.said
    assert said == "skipped parts in memory: they are of step 7 of 3 ranks, got 1"


def test_rescue_with_other_settings_without_effect_on_weights_is_used(node: Node) -> None:
    node.rescue(7, "a", config=Config(keep=9, epochs=99).model_dump())
    assert node.go_on(A).words.startswith("step 7, rescued")
    assert node.go_on(A, (7, "a")).words == "step-00000007"


def test_lineage_has_only_attempts_from_which_the_run_resumed(tmp_path: Path) -> None:
    lineage = Lineage.new("first", "start")
    assert (lineage.attempts, lineage.begun_by) == ([], "first")
    lineage.add_attempt("first", step=0, writer=None)
    lineage.add_attempt("second", step=8, writer="first")
    lineage.write(tmp_path)
    again = Lineage.read(tmp_path)
    assert again == lineage
    assert again.has(8, "first")
    assert not again.has(9, "first"), "the run resumed from an earlier step"
    assert again.has(99, "second")
    assert not again.has(8, "third")
    again.add_attempt("third", step=4, writer="first")  # the second attempt's steps are repeated
    assert (again.attempts, again.number) == ([["first", 0], ["third", 4]], 3)
    assert again.has(4, "first")
    assert not again.has(8, "first")
    assert not again.has(9, "second")
    again.add_attempt("fourth", step=6, writer="of a line that nobody knows")
    assert again.has(6, "of a line that nobody knows")
    again.add_attempt("fifth", step=0, writer=None)
    assert again.attempts == [["fifth", 0]]
