"""An agent's ranks without processes: to which membership their ends belong."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankup import timing
from rankup.agent import ranks as ranks_module
from rankup.agent.agent import Agent
from rankup.agent.ends import End
from rankup.agent.leader_files import LeaderFiles, id_of
from rankup.agent.network import encode
from rankup.agent.ranks import Options, Rank, Ranks
from rankup.agent.record import Record
from rankup.agent.script import Script
from rankup.agent.status_files import ScriptStatus
from rankup.env.node_env import Limits, NodeEnv
from rankup.errors import UserError
from tests.rigs.meeting_room import asynchronous


def options(tmp_path: Path, text: str) -> Options:
    (tmp_path / "job.py").write_text(text)
    node, script = NodeEnv(num_nodes=2, limits=Limits(1, 2)), Script.find([str(tmp_path / "job.py")])
    return Options(node=node, script=script, run_dir=tmp_path)


def made(tmp_path: Path, say: Any = print, text: str = "import rankup\n") -> Ranks:
    return Ranks(options(tmp_path, text), send=say, on_stop=print, begin=asyncio.create_task, finish=print)


@asynchronous
async def test_ranks_that_start_meanwhile_are_not_taken_for_the_ended_ones(tmp_path: Path) -> None:
    ranks = made(tmp_path)
    waits = asyncio.create_task(ranks.ended_within(5.0))
    await asyncio.sleep(0)
    ranks.all_ended.clear()
    assert await waits


COMMIT = {"why": "", "again": False, "change": "", "ip": "127.0.0.1", "job": "job", "port": 1, "store": False}


@asynchronous
async def test_environment_of_a_rank_stays_small_in_a_job_of_many_nodes(tmp_path: Path) -> None:
    """A variable above 128 KiB breaks each subprocess of the rank, so the rank finds the commit in its record."""
    given = list[tuple[dict[str, str], Record]]()
    ranks = made(tmp_path)

    def start_rank(*words: Any, env: dict[str, str], line: list[int], **more: Any) -> None:
        given.append((env, Record.at(f"/proc/self/fd/{line[1]}")))

    ranks.server = SimpleNamespace(start_rank=start_rank)  # type: ignore[assignment]
    commit = {**COMMIT, "n": 1, "restarts": 0, "change": "x" * 99999, "basis": {"used": ["mine"]},
              "hosts": [[f"a-long-name-of-a-node-{node}", 8] for node in range(9999)]}
    ranks.start(commit, token="mine")
    assert given[0][1].commit == commit
    ranks.links.close()
    assert max(map(len, given[0][0].values())) < 20_000


@asynchronous
async def test_last_message_of_a_rank_is_read_even_after_its_end(tmp_path: Path) -> None:
    """The agent was stopped while the rank connected, said how it ends, and ended."""
    said: list[dict[str, Any]] = []

    def start_rank(*words: Any, line: list[int], **more: Any) -> None:
        with socket.socket(fileno=os.dup(line[0])) as rank:
            rank.sendall(encode("end", **End(1, "", 2, "a mistake").entry()))

    ranks = made(tmp_path, lambda kind, **values: said.append({"is": kind, **values}))
    ranks.server = SimpleNamespace(start_rank=start_rank)  # type: ignore[assignment]
    ranks.start({**COMMIT, "n": 1, "restarts": 0, "basis": {"used": ["other", "mine"]}}, token="mine")
    await ranks._on_rank_end(ranks.ranks[0], 2)
    ranks.links.close()
    assert [(each["is"], each["code"], each["why"]) for each in said] == [
        ("ending", 2, "a mistake"), ("end", 2, "a mistake"),
    ]


@asynchronous
async def test_late_end_of_a_rank_does_not_count_in_a_membership_without_it(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []

    def say(kind: str, **values: Any) -> bool:
        said.append({"is": kind, **values})
        return True

    ranks = made(tmp_path, say)
    ranks.server = SimpleNamespace(start_rank=lambda *words, **more: None)  # type: ignore[assignment]
    ranks.start({**COMMIT, "n": 1, "restarts": 0, "basis": {"used": ["other", "mine"]}}, token="mine")
    ranks.start({**COMMIT, "n": 3, "restarts": 2, "basis": {"used": ["other"]}}, token="mine")
    ranks._ended(ranks.ranks[0], 171)
    (end,) = said
    assert (end["is"], end["n"], end["rank"], end["code"]) == ("end", 1, 1, 171)


@pytest.mark.parametrize(("code", "told"), [(None, True), (0, True), (30, False)])
@asynchronous
async def test_rank_that_said_why_it_fails_is_not_told_to_leave(tmp_path: Path, code: int | None, told: bool) -> None:
    """It waits a moment, so that the others can write their state, and its code decides the job's."""
    signals = list[tuple[int, signal.Signals]]()
    ranks = made(tmp_path, lambda kind, **values: True)
    start_rank, send = lambda *words, **more: None, lambda *words: signals.append(words)
    ranks.server = SimpleNamespace(start_rank=start_rank, signal=send)  # type: ignore[assignment]
    ranks.start({**COMMIT, "n": 1, "restarts": 0, "basis": {"used": ["mine"]}}, token="mine")
    if code is not None:
        ranks._on_rank_message(ranks.ranks[0], {"is": "end", **End(0, "", code).entry()})
    leaving = asyncio.create_task(ranks._leave(0.0))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert ranks.ranks[0].told == told
    leaving.cancel()
    assert signals == [(0, signal.SIGTERM)] * told


@asynchronous
async def test_rank_is_killed_once_it_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as it makes progress, no other rank of the node is killed either: it may wait for that rank."""
    caplog.set_level("INFO", "rankup")
    monkeypatch.setattr(timing, "LEAVE_S", 0.01)
    monkeypatch.setattr(timing, "KILL_S", 0.0)
    killed = list[int]()
    ranks = made(tmp_path)
    ranks.ranks = [Rank(local, local, Record.new(local)) for local in range(2)]
    ranks.all_ended.clear()

    async def ended_within(timeout_s: float) -> bool:
        if timeout_s and (written := ranks.ranks[0].record.written) < 10:
            ranks.ranks[0].record.note_written(1)
            assert killed == [], written
        return False

    ranks.ended_within = ended_within  # type: ignore[method-assign]
    ranks.server = SimpleNamespace(signal=lambda local, number: killed.append(local))  # type: ignore[assignment]
    ranks._ended = lambda rank, code: None  # type: ignore[method-assign]
    await ranks._kill_after(timing.LEAVE_S, "the others")
    assert killed == [0, 1]
    said = [record.message for record in caplog.records]
    assert said == ["rank 0 still writes its state, 0 MB in 0.01 s: no rank is killed while it makes progress", *(
        f"rank {rank} did not end within 0.01 s after the last progress: killed" for rank in range(2)
    )]


@pytest.mark.parametrize("hangs", [False, True])
@asynchronous
async def test_run_is_taken_once_even_if_a_member_is_lost_meanwhile(tmp_path: Path, hangs: bool) -> None:
    """Otherwise the script would start from the beginning, or the job would find that its own run has an owner."""
    taken, go = list[str](), threading.Event()

    def take(attempt: str, *, agreed: bool) -> bool:
        taken.append(attempt)
        return go.wait(600)

    leading: Any = SimpleNamespace(proposed=1)
    files = LeaderFiles(made(tmp_path, text="pass\n"), lambda: leading)
    files.status = ScriptStatus(tmp_path)
    files.status.take = take  # type: ignore[method-assign]
    lost = asyncio.create_task(files.prepare(1, 1, "job", 0))
    while not taken:
        await asyncio.sleep(0.01)
    leading.proposed = 2
    if hangs:  # the end of the agent does not wait for the disk either
        lost.cancel()
    else:
        go.set()
        assert (await files.prepare(2, 1, "job", 0))["again"]
        assert (await lost)["port"] == 0, "nobody reads it"
        files.give_up()
    assert len(taken) == 1


@asynchronous
async def test_ended_job_waits_for_ranks_that_still_write_their_state(tmp_path: Path) -> None:
    """These ranks lost a peer, and then somebody asked the job to stop."""
    agent, written = Agent(options(tmp_path, "import rankup\n")), asyncio.Event()
    agent._over = asyncio.get_running_loop().create_future()
    agent.ranks._leaving = agent.begin(written.wait())  # type: ignore[arg-type]
    agent.hear({"is": "over", "code": 143, "text": "SIGTERM"})
    for _ in range(20):
        await asyncio.sleep(0)
    assert not agent._over.done()
    written.set()
    assert (await agent._over).code == 143


@asynchronous
async def test_end_of_a_rank_never_blocks_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the rank left behind may hold its output open, and the disk of the run may hang."""
    is_read, is_written, waited = threading.Event(), threading.Event(), list[bool]()
    monkeypatch.setattr(ranks_module, "write_end", lambda *words: waited.append(is_written.wait(10)))
    loop = asyncio.get_running_loop()

    def join(timeout_s: float) -> None:
        loop.call_soon_threadsafe(is_read.set)
        waited.append(is_read.wait(10))

    thread, keep_in = SimpleNamespace(join=join), lambda folder: is_written.wait(10)
    reader: Any = SimpleNamespace(thread=thread, tail="", last_error="", keep_in=keep_in)
    ranks = made(tmp_path, lambda kind, **values: True, text="pass\n")
    ranks._commit = {"n": 1, "job": "job", "restarts": 0}
    ranks.ranks = [Rank(0, 0, Record.new(0), reader=reader)]
    await ranks._on_rank_end(ranks.ranks[0], 1)
    assert not ranks.running
    is_written.set()
    await asyncio.gather(*map(asyncio.wrap_future, ranks._writing))
    assert waited == [True, True]


def test_id_of_a_shared_folder_is_not_another_programs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes get the same id, however late the node that makes it writes it."""
    monkeypatch.setattr(timing, "VISIBLE_S", 0.0)
    file, said = tmp_path / "shared.json", list[str]()
    assert asyncio.run(id_of(str(tmp_path))) == asyncio.run(id_of(str(tmp_path))) != ""
    for content in ("", '{"name": "shared"}'):
        file.write_text(content)
        with pytest.raises(UserError) as raised:
            asyncio.run(id_of(str(tmp_path)))
        said.append(str(raised.value).partition(" must hold rankup's id, got ")[2])
        assert file.read_text() == content
    assert said == ["an empty file: its disk was full, or its writer was killed. Remove it.",
                    "one of another program. Name another folder."]
