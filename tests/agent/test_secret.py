"""Only members that know a job's secret are let in. A stranger costs nothing and ends nothing, whatever it sends."""

import asyncio
import contextlib
import functools
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from rankup.agent import network
from rankup.agent.network import NONCE, OTHER_SECRET, SECRET_FILE, Link, encode, greeting, listen, prove, read_secret
from rankup.agent.protocol import Member
from rankup.errors import UserError
from tests.agent.test_membership import Nodes
from tests.agent.test_peers import attending, fake_leader
from tests.rigs.jobs import ended, environ_of, wait_for
from tests.rigs.meeting_room import BOUND_S, asynchronous, member

SECRET = b"0123456789abcdef"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


class Leader:
    """Accepts members on its own port, and counts those that it let in."""

    def __init__(self) -> None:
        self.port, self.num_let_in = 0, 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_let_in += 1
        writer.write(encode("leader", over=""))
        try:
            await reader.read()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def is_asked(self, known: bytes) -> str:
        """Return why a member that knows this secret is not let in."""
        link = await Link.connect("127.0.0.1", self.port)
        try:
            return str((await greeting(link, known))["over"])
        finally:
            link.close()


@contextlib.asynccontextmanager
async def leading() -> AsyncIterator[Leader]:
    """A leader with the secret that the environment names, if any."""
    leader = Leader()
    server = await listen(leader.accept, ip="127.0.0.1", port=0)
    leader.port = server.sockets[0].getsockname()[1]
    yield leader
    server.close()


@pytest.fixture
def secret(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(secret_file))
    monkeypatch.setattr(network, "HELLO_S", BOUND_S)


@asynchronous
async def test_only_the_same_secret_lets_a_member_in(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with leading() as leader:
        assert await leader.is_asked(b"") == ""
        way_out = "Set RANKUP_SECRET_FILE to the same content on all nodes, or on none"
        why = f"rank 0 and this process have different secrets, or only one of them has one. {way_out}"
        assert await leader.is_asked(SECRET) == why
    monkeypatch.setenv(SECRET_FILE, str(secret_file))
    async with leading() as leader:
        assert await leader.is_asked(SECRET) == ""
        assert await leader.is_asked(SECRET[::-1]) == await leader.is_asked(b"") == why
        assert leader.num_let_in == 1
    assert caplog.messages == [f"a process on 127.0.0.1 was refused: it has another secret, or none. {way_out}"]


@pytest.mark.usefixtures("secret")
@asynchronous
async def test_recorded_answer_lets_nobody_in():
    async def talk(answer: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
        writer.write(said := answer(bytes.fromhex(json.loads(await reader.readline())["nonce"])))
        try:
            return said, await reader.readline()
        except ConnectionResetError:
            return said, b""
        finally:
            writer.close()

    async with leading() as leader:
        recorded, heard = await talk(lambda nonce: bytes(NONCE) + prove(SECRET, "member", nonce, bytes(NONCE)))
        assert json.loads(heard)["is"] == "proof"
        assert (await talk(lambda nonce: recorded))[1] == b""
        # The leader's messages do not help either; a stranger gets them by posing as a leader
        assert (await talk(lambda nonce: bytes(NONCE) + prove(SECRET, "leader", nonce, bytes(NONCE))))[1] == b""
        assert leader.num_let_in == 1


@asynchronous
async def test_shut_out_member_names_the_secret_although_the_leader_has_ended_by_then(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have waited equally long, and the leader began first."""
    async with contextlib.AsyncExitStack() as waits, leading() as leader:
        monkeypatch.setenv(SECRET_FILE, str(secret_file))  # of the member alone
        one = await waits.enter_async_context(attending(member(1, left_s=2.0), lambda: leader.port))
        while one.peers.meeting.problem != OTHER_SECRET:
            await asyncio.sleep(0)
        waits.push_async_callback(lambda: one.failed)
    text = str(one.failed.result())
    assert text.startswith(f"{OTHER_SECRET}. Then rank 1 of ")
    assert "refuses the connection" in text


@pytest.mark.usefixtures("secret")
@asynchronous
async def test_half_open_connections_keep_nobody_out():
    async with leading() as leader:
        strangers = [await Link.connect("127.0.0.1", leader.port) for _ in range(network.MOST_HALF_OPEN + 20)]
        assert await leader.is_asked(SECRET) == ""
        for stranger in strangers[:20]:  # the oldest connections were closed to make room
            with contextlib.suppress(ConnectionError):
                while True:
                    await stranger.receive()
        for stranger in strangers:
            stranger.close()
        assert leader.num_let_in == 1


@asynchronous
async def test_member_tells_a_false_leader_nothing():
    """Even if the false leader repeats the member's own message."""
    async with fake_leader() as (port, links):
        link = await Link.connect("127.0.0.1", port())
        greeted = asyncio.create_task(greeting(link, SECRET))
        stranger = await links.get()
        stranger.send("challenge", nonce=bytes(NONCE).hex())
        answer = await stranger._reader.readexactly(2 * NONCE)
        stranger.write(encode("proof", proof=answer[NONCE:].hex()) + encode("leader", over=""))
        assert str((await greeted)["over"]).startswith("rank 0 and this process have different secrets")
        link.close()
        assert await stranger._reader.read() == b""


@pytest.mark.parametrize(("mode", "content", "why"), [
    (0o644, SECRET, "of mode 600, got 644"), (0o640, SECRET, "of mode 600, got 640"),
    (0o600, b"short\n", "of 16 to 4096 bytes"), (0o600, b"x" * 5000, "of 16 to 4096 bytes"), (0, None, "can be read"),
])
def test_secret_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, content: bytes | None, why: str
):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    if os.geteuid() == 0:  # a Secret of Kubernetes belongs to root, and may have mode 640
        monkeypatch.setattr(os, "fstat", lambda fd, real=os.fstat: os.stat_result([*real(fd)[:4], 1000, *real(fd)[5:]]))
    with pytest.raises(UserError, match=why) as error:
        read_secret({SECRET_FILE: str(path)})
    assert "\n" not in str(error.value)


def test_secret_that_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match="must name a file"):
            read_secret({SECRET_FILE: str(path)})


# A job, and a stranger in its network ---------------------------------------------------------------------------------


class Stranger:
    """Talks to a job's port in a thread, over and over: connects, holds, resets, sends garbage, false hellos and a
    recorded answer. `rounds`: how often it has done all of this."""

    def __init__(self, port: int, recorded: bytes) -> None:
        hello = asdict(Member("stranger", 1, 1, 9, "nowhere", 1, 9.0))
        hello = {**hello, "n": 10**6, "settings": {}}
        false = [encode("hello", **{**hello, "world_size": size}) for size in (2, 9)]
        orders = encode("over", code=0, text="") + encode("stop", signal="SIGTERM") + encode("lost", n=1, ranks=[0])
        self._said = [b"", b"\0", recorded, recorded + false[0], *false, orders, os.urandom(5000), b"[" * 100_000]
        self._said += [b"x" * (1 << 20), b"GET / HTTP/1.1\r\n\r\n", bytes(2 * NONCE)]
        self._port, self.rounds = port, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def _talk(self) -> None:
        held: list[socket.socket] = []
        while not self._over.is_set():
            for each in self._said:
                for how in ("close", "reset", "hold"):
                    with contextlib.suppress(OSError):
                        held.append(connection := socket.create_connection(("127.0.0.1", self._port), timeout=1.0))
                        connection.sendall(each)
                        if how == "reset":
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        if how != "hold":
                            held.pop().close()
            for connection in held[:-400]:
                connection.close()
            del held[:-400]
            self.rounds += 1
        for connection in held:
            connection.close()

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def record(port: int) -> bytes:
    """Return the answer of a member with the secret, as a stranger on the network records it."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
        nonce = bytes.fromhex(json.loads(lines.readline())["nonce"])
        connection.sendall(said := bytes(NONCE) + prove(SECRET, "member", nonce, bytes(NONCE)))
        assert json.loads(lines.readline())["is"] == "proof"
        return said


def test_stranger_ends_nothing_before_a_membership_and_while_nodes_come_and_go(tmp_path: Path, secret_file: Path):
    """It talks to the ports of all nodes: node 1 leads once node 0 is lost, and the spare takes its place."""
    options, env = ("--spares=1", "--wait-for-node=100", "--lost-after-s=60"), {SECRET_FILE: str(secret_file)}
    nodes = Nodes(tmp_path, "2", *options)
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(ended(nodes.job))
        strangers = dict[int, Stranger]()

        def listening(node: int) -> list[int]:
            found = [each for each in nodes.agents[node].net_connections("tcp") if each.status == "LISTEN"]
            return [each.laddr.port for each in sorted(found, key=lambda each: each.fd)]

        def talk_to(node: int, port: int) -> None:
            strangers[node] = Stranger(port, record(port))
            stack.enter_context(strangers[node].talking())

        nodes.add(0, env)
        wait_for("its port", lambda: nodes.port in listening(0))
        talk_to(0, nodes.port)
        wait_for("five rounds of the stranger", lambda: strangers[0].rounds >= 5)
        for node in (1, 2):  # the spare may come late
            nodes.add(node, env)
        first = nodes.attempt(2)
        lost, other = (nodes.of_rank(rank, first) for rank in (0, 1))
        for node in (1, 2):  # the ports after the first one test routes, and read nothing
            talk_to(node, wait_for("a port", functools.partial(listening, node))[0])
        wait_for("two rounds of all strangers", lambda: all(each.rounds >= 2 for each in strangers.values()))
        wait_for("a spare", lambda: nodes.shown(0).count('"spare"'))
        nodes.kill(lost)
        second = nodes.attempt(2, after=first)
        said = {node: each.rounds for node, each in strangers.items()}
        wait_for("further rounds of all", lambda: all(each.rounds > said[node] + 2 for node, each in strangers.items()))
        for path in (tmp_path / "shared").glob(f"{second}-*"):
            environment = "".join(environ_of(int(path.read_text().split()[1])).values())
            assert environment
            assert SECRET.decode() not in environment
            assert str(secret_file) not in environment
        nodes.go()
        assert job.wait() == [-9 * (node == lost) for node in range(3)], job.output
    assert "this node is a spare" in job.outputs[3 - lost - other]
    assert f"node {lost} on " in job.outputs[other]
    assert len(nodes.jobs()) == 1
    attempts = {path.name.split("-")[0] for path in (tmp_path / "shared").glob("*-of-*")}
    assert attempts == {str(first), str(second)}, job.output
