"""A copy reaches every node whole, whatever the nodes have of it, and a damaged one is never loaded."""

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.places.files import is_local
from rankup.state import copies, reading, shipping
from rankup.state.copies import Damaged
from rankup.state.place import Candidate, Folder
from rankup.state.tree import encode
from rankup.state.tree import files_of as files_of_tree
from tests.rigs.checkpoints import damage, training_state
from tests.rigs.thread_ranks import Ranks

TRIES = 250  # of up to five copies each


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what nodes have in memory. Pieces are small, so that a part has many."""
    monkeypatch.setattr(copies, "PIECE", 96)
    monkeypatch.setattr("rankup.state.memory.homes", lambda: [tmp_path / "memory"])
    return tmp_path / "memory"


def save(folder: Path, *, weight: torch.Tensor, number: int = 0) -> Path:
    """Save a copy. Its tensors are equal for each `number`, and its tree differs, like those of two ranks' rescues."""
    tracked = {"model": {"weight": weight}, "empty": {}, "loaders": {f"rank {number}": number}}
    content = files_of_tree(*encode(tracked)) | {copies.STATE: copies.to_json(training_state(7))}
    return Folder(folder, keep=9).write(7, content)


def load(
    ranks: Ranks, nodes: list[int], paths: list[list[Path]], source: int, patch: pytest.MonkeyPatch, **more: Any
) -> list[Any]:
    """Load the copy of rank `source`, `paths[source][0]`, on all ranks. Return for each rank its weight and tree, or
    the reason. Other nodes see nothing of the source's files."""
    patch.setattr(shipping, "node_id", lambda: f"node {nodes[ranks.rank]}")
    patch.setattr(shipping, "dist", ranks.dist())
    folders = [[path.absolute() for path in own] for own in paths]
    patch.setattr(reading, "Path", lambda where: (
        Path("nowhere") if nodes[ranks.rank] != nodes[source] and Path(where) == folders[source][0] else Path(where)
    ))

    def work(group: Any) -> Any:
        try:
            one = Candidate(source, where=str(folders[source][0]))
            copy = reading.load(group, one, others=folders[group.rank], **more)
        except Damaged as error:
            return error.why
        return copy.tracked["model"]["weight"], copy.tracked["loaders"]

    return ranks.each(work)


def same(found: list[Any], weight: torch.Tensor, number: int = 0) -> bool:
    return all(torch.equal(each, weight) and tree == {f"rank {number}": number} for each, tree in found)


def test_node_without_the_copy_gets_it_and_a_node_with_another_rescue_only_what_differs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, ranks, nowhere = torch.arange(500.0), Ranks(5), tmp_path / "nowhere"
    first, other = save(home / "a", weight=weight), save(home / "b", weight=weight, number=1)
    sent: list[int] = []
    messages = ranks.dist()
    send = messages.isend
    monkeypatch.setattr(ranks, "dist", lambda: messages)
    messages.isend = lambda tensor, to: (sent.append(to), send(tensor, to))[1]
    # Two ranks on the node of the source, two on one that has another rank's rescue, and one on an empty node
    found = load(ranks, [0, 0, 1, 1, 2], [[first], [first], [other], [other], [nowhere]], 0, monkeypatch)
    assert same(found, weight)
    sizes = {name: (first / name).stat().st_size for name in ("model.safetensors", "tree.json")}
    pieces = {name: -(-size // copies.PIECE) for name, size in sizes.items()}
    assert sent.count(4) == sum(pieces.values()), "the empty node gets every piece once"
    assert sent.count(2) + sent.count(3) == pieces["tree.json"], "the other one has the weights"


def test_no_damaged_copy_is_ever_loaded(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is damaged: a copy in memory or on a disk, of the node with the copy or of another."""
    draw, came_to = random.Random(), {True: 0, False: 0}
    for number in range(TRIES):
        nodes = sorted(draw.randrange(3) for _ in range(draw.randrange(1, 6)))
        ranks, weight = Ranks(len(nodes)), torch.rand(draw.randrange(1, 300))
        source = draw.randrange(len(nodes))
        where = {node: (home if draw.random() < 0.5 else tmp_path) / f"{number}-{node}" for node in {*nodes}}
        own = {node: save(folder, weight=weight, number=node) for node, folder in where.items()}
        harmed = {node: damage(draw.choice(sorted(path.iterdir())), draw)
                  for node, path in own.items() if draw.random() < 0.4}
        on_disk = draw.random() < 0.5
        found = load(ranks, nodes, [[own[node]] for node in nodes], source, monkeypatch, on_disk=on_disk)
        if harmed.get(nodes[source]):
            assert len({*map(str, found)}) == 1, found
            assert all(isinstance(why, str) for why in found), found
        else:
            assert same(found, weight, nodes[source]), (nodes, source, harmed)
        came_to[not harmed.get(nodes[source])] += 1
        for folder in where.values():
            shutil.rmtree(folder)
    assert min(came_to.values()) > TRIES // 10, came_to


def test_piece_that_arrives_otherwise_than_it_was_sent_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, path = Ranks(2), save(tmp_path, weight=torch.arange(500.0))
    messages = ranks.dist()
    monkeypatch.setattr(ranks, "dist", lambda: messages)
    send = messages.isend
    messages.isend = lambda tensor, to: send(tensor ^ 1, to)
    found = load(ranks, [0, 1], [[path], [tmp_path / "nowhere"]], 0, monkeypatch)
    assert [str(why).endswith("did not arrive whole") for why in found] == [True, True]


def test_copy_of_an_earlier_version_with_one_digest_for_a_file_is_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(500.0)
    with monkeypatch.context() as patch:
        patch.setattr(copies, "PIECE", 2**30)
        path = save(tmp_path, weight=weight)
    manifest = (path / copies.MANIFEST).read_text()
    assert manifest.count("[") == manifest.count('"sha256"'), "one digest for each file"
    (path / copies.MANIFEST).write_text(manifest.replace("[", "").replace("]", ""))
    assert torch.equal(reading.read(path).tracked["model"]["weight"], weight)
    os.truncate(path / "model.safetensors", 99)
    with pytest.raises(Damaged, match="has 99 bytes instead of"):
        reading.read(path)


def test_ranks_that_change_what_they_read_change_it_for_nobody_else(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, ranks = torch.arange(500.0), Ranks(3)
    for folder in (home, tmp_path):
        path = save(folder, weight=weight)
        found = load(ranks, [0, 0, 0], [[path]] * 3, 0, monkeypatch)
        for rank, (each, _) in enumerate(found):
            assert torch.equal(each, weight)
            each += rank + 1
        assert torch.equal(reading.read(path).tracked["model"]["weight"], weight)


@pytest.mark.parametrize("in_memory", [True, False])
def test_file_in_use_may_go_as_soon_as_one_rank_is_done(
    in_memory: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 moves a fetched copy to its final name, and removes a rescue, before rank 1 has left the last exchange."""
    weight, ranks, gone = torch.arange(500.0), Ranks(2), threading.Event()
    path = save(home if in_memory else tmp_path, weight=weight)
    monkeypatch.setattr(shipping, "dist", ranks.dist())
    parts = [part for part in copies.read_manifest(path)[1] if part.name == "model.safetensors"]

    def work(group: Any) -> bytes:
        if group.rank == 0:
            memory = shipping.Memory(group, os.memfd_create("own"), [[0], [1]])
            found, problems = shipping.Shipping(group, shipments, memory).result()
            shutil.rmtree(path)
            gone.set()
        else:
            gather, left = group.gather, iter(range(exchanges))
            group.gather = lambda value: (gather(value), next(left, None) is None and gone.wait(60))[0]
            memory = shipping.Memory(group, os.memfd_create("own"), [[0], [1]])
            found, problems = shipping.Shipping(group, shipments, memory).result()
        memory.close()
        return bytes(found[0]) if not problems else repr(problems).encode()

    exchanges = 1  # of `ship`: all but the last
    shipments = [shipping.Shipment(part, [[0, 1]], [path / part.name], in_place=not in_memory) for part in parts]
    expected = (path / "model.safetensors").read_bytes()
    assert ranks.each(work) == [expected, expected]


@pytest.mark.parametrize("local", [True, False])
def test_checkpoint_on_a_disk_of_this_machine_takes_no_second_memory_and_must_stay_as_it_is(
    local: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, ranks, copied = torch.arange(500.0), Ranks(2), list[int]()
    path = save(tmp_path, weight=weight)
    put = shipping.Memory.put
    monkeypatch.setattr(shipping.Memory, "put", lambda *given: (copied.append(given[1]), put(*given)))
    monkeypatch.setattr(shipping, "dist", ranks.dist())
    monkeypatch.setattr(shipping, "is_local", lambda _: local)
    found = ranks.each(lambda group: reading.load(group, Candidate(0, where=str(path)), on_disk=True))
    assert bool(copied) is not local
    for copy in found:
        copy.check_unchanged()
        assert torch.equal(copy.files.read_all("model")["model"]["weight"], weight)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    if local:
        with pytest.raises(UserError, match="must stay as it is while a run resumes from it, got a change"):
            found[1].check_unchanged()
    else:
        assert torch.equal(found[1].files.read_all("model")["model"]["weight"], weight)


def test_files_of_this_machines_disks_and_memory_are_local_and_others_are_not(tmp_path: Path) -> None:
    assert is_local(Path("/dev/shm"))
    assert not is_local(Path("/proc/self/status"))
    assert not is_local(tmp_path / "missing")
