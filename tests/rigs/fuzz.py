"""The formats that the fuzzer of tests/promises/test_fuzz.py reads, and the mutations of their bytes."""

import asyncio
import contextlib
import io
import json
import os
import pickle
import random
import re
import signal
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from PIL import Image

from rankup import timing
from rankup.agent.agent import Agent
from rankup.agent.ends import End
from rankup.agent.events import Rules
from rankup.agent.network import LONGEST, Link, encode
from rankup.agent.peers import Peers
from rankup.agent.protocol import Member
from rankup.agent.rank_agent import read_address
from rankup.agent.ranks import Options, Rank
from rankup.agent.record import Record
from rankup.agent.script import Script
from rankup.env.node_env import Limits, NodeEnv
from rankup.errors import JoinError, UserError
from rankup.explain import diagnose_files, format_report
from rankup.loop.agreement import Agreement
from rankup.loop.weights import load_into
from rankup.observe.metrics import cut_after
from rankup.observe.status import status
from rankup.places.lease import Lease, Lineage
from rankup.state import reading, tree
from rankup.state.copies import MANIFEST, STATE
from tests.rigs.checkpoints import fingerprint
from tests.rigs.meeting_room import Nobody
from tests.rigs.strangers import Evil
from train.config.load import load_config
from train.data.file_samples import decode
from train.data.sources.in_memory import read

Files = dict[str, bytes]
HUGE = (b"99999999999999999999", b"-1", b"1e999", b"0", b"9" * 400, b"9" * 5000, b"NaN", b"4294967295")
VALUES = (None, True, -1, 1e308, 0.5, 2**70, "x" * 9999, "\0", "../outside", [], {}, [[]], {"$": "tensor", "is": "../"})


# Mutations: bytes -> bytes --------------------------------------------------------------------------------------------


def flip(dice: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def rearrange(dice: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(dice.randrange(len(data) + 1) for _ in range(3))
    swapped = data[:a] + data[b:c] + data[a:b] + data[c:]
    return dice.choice((data[:a], data[:b] + data[a:], swapped, data[:a] + data[b:]))


def number(dice: random.Random, data: bytes) -> bytes:
    found = [*re.finditer(rb"-?\d+", data[:4000])]
    return _put(data, *dice.choice(found).span(), dice.choice(HUGE)) if found else flip(dice, data)


def nest(dice: random.Random, data: bytes) -> bytes:
    at, opening = dice.randrange(len(data) + 1), dice.choice((b"[", b'{"a":', b"- ", b"{a: "))
    return _put(data, at, at, opening * dice.choice((50, 1500)))


def retype(dice: random.Random, data: bytes) -> bytes:
    lines = data.splitlines() if b"\n{" in data else [data]
    at = dice.randrange(len(lines))
    try:
        lines[at] = json.dumps(_changed(dice, json.loads(lines[at]))).encode()
    except (ValueError, RecursionError):
        return number(dice, data)
    return b"\n".join(lines) + b"\n"


def code(dice: random.Random, data: bytes) -> bytes:
    evil = pickle.dumps(Evil(Path("proof")), protocol=2)
    return dice.choice((evil, data[: len(data) // 2] + evil, b"a: !!python/object/apply:os.mkdir [proof]\n"))


def _put(data: bytes, begin: int, end: int, new: bytes) -> bytes:
    return data[:begin] + new + data[end:]


def _changed(dice: random.Random, value: Any) -> Any:
    if isinstance(value, (dict, list)) and value and dice.random() < 0.8:
        key = dice.choice([*value]) if isinstance(value, dict) else dice.randrange(len(value))
        if dice.random() < 0.15:
            return {k: v for k, v in value.items() if k != key} if isinstance(value, dict) else value[:key]
        changed = _changed(dice, value[key])
        if isinstance(value, dict):
            return {**value, key: changed} if dice.random() < 0.9 else {**value, "../outside": value[key]}
        return [*value[:key], changed, *value[key + 1 :]]
    return dice.choice(VALUES)


def replace(dice: random.Random, path: Path) -> None:
    """Replace the file by something else."""
    path.unlink()
    kind = dice.choice(("nothing", "folder", "pipe", "../outside", "nowhere", "/dev/zero", "/dev/full", path.name))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to(kind)


# Formats --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    files: Callable[[], Files]
    read: Callable[[Path], object]
    replaced: bool = True  # the user names a folder, where a file may also be a link, a pipe or a device
    sealed: bool = False  # a manifest has digests, which are right in half of the inputs


MODEL = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}
TRACKED = {"model": MODEL, "more": {"a": (1, float("inf")), 3: b"x"}}
RECORD = json.dumps({"step": 3, "run": "abc", "attempt": "a", "data": {"seed": 1}}).encode()


def sealed(files: Files) -> Files:
    entries = {name: fingerprint(content) for name, content in files.items() if name != MANIFEST}
    return {**files, MANIFEST: json.dumps({"step": 3, "files": entries}).encode()}


def plain_copy() -> Files:
    files = {name: content if isinstance(content, bytes) else b"".join(map(bytes, content))
             for name, content in tree.files_of(*tree.encode(TRACKED)).items()}
    return sealed({STATE: RECORD, **files})


def sharded_copy() -> Files:
    form, tensors = tree.encode(TRACKED)
    content = b"".join(map(bytes, tree.TensorFile(*tree.local_parts(tensors))))
    return sealed({STATE: RECORD, tree.TREE: tree.to_file(form), tree.file_of(0): content})


def weights() -> Files:
    return {"model.safetensors": b"".join(map(bytes, tree.TensorFile(MODEL)))}


def run_folder() -> Files:
    end = End(1, "node1", 1, "RuntimeError: CUDA out of memory", 7).entry()
    report = {"run": "abc", "attempt": "20260102T030405-ab-0", "began": 1.0, "time": 9.0, "first_step": 0, "step": 7,
              "total_steps": 9, "finished": False, "seconds": {"step": 5.0, "setup": 1.0}, "unit": "i", "per_s": 3.5,
              "remaining_s": 4.0, "metrics": {"loss": 0.5}, "open_s": 0.1, "nodes": [],
              "ranks": [{"rank": 0, "host": "a", "step": 7, "phase": "step", "seen": 8.0, "began": 7.0}]}
    at = "status/20260102T030405-ab-0"
    log = "2026-01-02 03:04:05 [a r0/2] step 7/9 loss 0.5\nTraceback (most recent call last):\n" \
          '  File "t.py", line 3, in <module>\n    f()\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n'
    values: dict[str, Any] = {
        "status.json": {"attempt": at[7:], "state": "failed", "world_size": 2, "code": 1, "why": "x",
                        "ranks": {"1": end}},
        "run.json": {"run": "abc", "begun_by": at[7:], "start": "", "attempts": [[at[7:], 0]], "number": 1},
        "lease.json": {"attempt": "a", "token": "t", "beat": 3, "host": "h", "pid": 1, "kernel": "k", "released": True},
        "result.json": {"digest": "d", "steps": 9}, f"{at}/progress-t.json": report, f"{at}/rank-1.json": end,
        "metrics.jsonl": {"step": 7, "train/loss": 0.5, "train/lr": 0.1},
        "disagreements.jsonl": {"run": "abc", "step": 3, "sound": 2, "digests": [1, 2], "odd": [1]},
    }
    files = {name: json.dumps(value).encode() + b"\n" for name, value in values.items()}
    return {**files, "logs/rank-0.log": log.encode()}


def read_run(folder: Path) -> None:
    for as_json in (True, False):
        status(folder.parent, folder.name, as_json=as_json)
    with contextlib.suppress(UserError):
        format_report(diagnose_files([folder]))
    Lineage.read(folder)
    two = SimpleNamespace(world_size=2)
    Agreement._read(SimpleNamespace(_path=folder / "disagreements.jsonl", _run="abc", group=two))  # type: ignore[arg-type]
    with contextlib.suppress(OSError):
        cut_after(folder / "metrics.jsonl", 5, 5)
    with contextlib.suppress(OSError), Lease(folder, "next", life_s=0.0, beat_s=9.0):  # lease.json may be a folder
        pass


def frames() -> Files:
    me = Member("t1", 1, 1, 2, "node0", 1, 9.0, settings={"a": "b"})
    end = End(1, "", 1, "x", 7).entry()
    said = [encode("hello", **asdict(me), age=(0, 0, 0, ""), before=[], state=0, warm=True),
            encode("shown", basis=BASIS), encode("has", age=(1, 1, 1, "t0")), encode("lacks"),
            encode("alive", ranks=[{"rank": 0, "ago_s": 0.1}]), encode("ready", n=1, problem=""), encode("ask"),
            encode("stop", signal="SIGTERM"), encode("standing", n=1, stop=0, step=3),
            encode("ending", n=1, **end), encode("end", n=1, **end)]
    return {"frames": b"".join(said)}


class Ready(Nobody):
    """A node that is always ready."""

    peers: Peers

    def hear(self, message: dict[str, Any]) -> None:
        if message["is"] == "propose":
            self.peers.send("ready", n=message["n"], problem="")


async def nowhere() -> tuple[str, int]:
    raise ConnectionError("nowhere")


async def read_frames(data: bytes) -> None:
    broken: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: broken.append(context))
    node, me = Ready(), Member("t0", 0, 1, 2, "node0", 1, 9.0)
    node.peers = Peers(me, Rules(), node, master=nowhere, leads=True)
    node.peers.start()
    await node.peers.accept(*_said(data))
    for _ in range(9):
        await asyncio.sleep(0)
    node.peers.close()
    assert not broken, broken


BASIS = {"n": 1, "v": 0, "by": "t0", "job": "20260102T030405-ab", "used": [("", 0, 2)], "voters": [("", 0, 2)],
         "left": False, "before": [(0, [], [("gone", 0, 0)])], "same_arguments": True, "state": 0,
         "known": {"gone": [], "more": [("t1", "127.0.0.1", 1, 1, "a", 2, 2), ("t0", "127.0.0.1", 1, 1, "b", 0, 2)]}}


def words() -> Files:
    """What a member hears from its leader, and an agent from its ranks."""
    later = {**BASIS, "n": 2, "known": {"from": (1, 1, 1, "t0"), "gone": [1], "more": []}, "used": [("", 0, 1)]}
    said = [encode("leader", over="", token="t0", n=0, formed=0, running=False, job=""),
            encode("waiting", text="for node 0"), encode("show"), encode("propose", n=1, basis=BASIS),
            encode("commit", n=1, restarts=0, why="", port=4711, job="20260102T030405-ab", store=True, again=False,
                   change="membership 1", basis={**BASIS, "v": 1, "before": []}),
            encode("propose", n=2, basis=later),
            encode("prepare", n=1, stop=7), encode("confirm", n=1, stop=7), encode("stop", signal="SIGTERM"),
            encode("ranks", ranks=[{"ago_s": 0.1}], nodes=[]), encode("alive"),
            encode("lost", n=1, ranks=[0], host="node0", why="its process has ended", code=137),
            encode("spare", basis=BASIS), encode("left_out", why="x"), encode("basis", basis=BASIS)]
    end = End(1, "", 1, "x", 7).entry()
    rank = encode("ask") + encode("end", **end) + encode("stop", signal="SIGINT")
    return {"leader": b"".join(said) + encode("over", code=0, text=""), "rank": rank}


def read_words(folder: Path) -> None:
    with mock.patch.object(timing, "PAUSE_S", 0.0):
        asyncio.run(_led(folder, (folder / "leader").read_bytes(), (folder / "rank").read_bytes()))


async def _led(folder: Path, leader: bytes, rank: bytes) -> None:
    """Run an agent without processes that gets these bytes from its leader and its rank."""
    broken: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: broken.append(context))
    node = NodeEnv(node_rank=1, num_nodes=2, nproc=2, master_addr="127.0.0.1", master_port=1, limits=Limits(1, 2))
    agent = Agent(Options(node=node, script=Script(["s.py"], [], None, "s.py", "s"), run_dir=folder / "run"))
    agent._over, ready = asyncio.get_running_loop().create_future(), asyncio.Event()
    ready.set()
    server = SimpleNamespace(start_rank=lambda *given, **more: None, signal=lambda *given: None, pids={}, ready=ready,
                             close=lambda: None)
    agent.ranks._loop = asyncio.get_running_loop()
    agent.ranks.server = server  # type: ignore[assignment]
    agent.ranks._signal = lambda name, told: getattr(signal, name)  # type: ignore[method-assign]
    heard = list[Link]()

    async def connect(*given: Any, **more: Any) -> Link:
        if heard:
            raise ConnectionRefusedError
        heard.append(Link(*_said(leader)))
        return heard[0]

    me, address = Member("t1", 2, 2, 4, "node1", 1, 0.0), ("127.0.0.1", 1)
    with mock.patch.object(Link, "connect", connect):
        agent.peers = Peers(me, Rules(limits=Limits(1, 2)), agent, master=nowhere, address=address)
        agent.peers.start()
        try:
            with agent.ranks.links.open(Rank(0, 2, Record.new(2))) as line:
                line.sendall(rank)
            async with asyncio.timeout(60):
                # Without its leader, a node of an elastic job may lead, and then waits for others
                while not agent._over.done() and agent.peers.meeting.leading is None:
                    await asyncio.sleep(0.001)
                if agent._over.done():
                    agent._over.result()
        except JoinError:
            pass
        finally:
            for task in agent._tasks:
                task.cancel()
            agent.peers.close()
            agent.ranks.close()  # its threads still write to the folder
    assert not broken, broken
    assert {each.name for each in folder.iterdir()} <= {"leader", "rank", "run"}


def _said(data: bytes) -> tuple[Any, Any]:
    """Return a connection whose other side sends this data and leaves."""
    reader = asyncio.StreamReader(limit=LONGEST)
    reader.feed_data(data)
    reader.feed_eof()
    own = SimpleNamespace(getsockopt=lambda *given: struct.pack("3i", 1, os.geteuid(), 1))
    writer = SimpleNamespace(write=lambda data: None, close=lambda: None, is_closing=lambda: False,
                             transport=SimpleNamespace(abort=lambda: None),
                             get_extra_info=lambda name: own if name == "socket" else ("127.0.0.1", 1))
    return reader, writer


def idx_files() -> Files:
    images = b"\0\0\x08\x03" + b"\0\0\0\x02" + b"\0\0\0\x03" * 2 + bytes(range(18))
    labels = b"\0\0\x08\x01" + b"\0\0\0\x02" + b"\1\2"
    return {f"MNIST/raw/{part}-{name}-ubyte": content for part in ("train", "t10k")
            for name, content in (("images-idx3", images), ("labels-idx1", labels))}


def pictures() -> Files:
    found = {kind: io.BytesIO() for kind in ("png", "jpeg", "webp", "tiff", "bmp")}
    for kind, file in found.items():
        Image.effect_noise((20, 20), 50).convert("RGB").save(file, kind)
    return {kind: file.getvalue() for kind, file in found.items()}


SETTINGS = b"dataset: digits\nlr: 0.5\nepochs: 3\nname: 'a'\noptions: {a: [1, {b: c}], d: no}\n"
FORMATS = {
    "plain_copy": Format(plain_copy, lambda folder: reading.read(folder).tracked, sealed=True),
    "sharded_copy": Format(sharded_copy, lambda folder: reading.read(folder).tracked, sealed=True),
    "weights": Format(weights, lambda folder: load_into(torch.nn.Linear(3, 2), folder, lambda text: None)),
    "settings": Format(lambda: {"c.yaml": SETTINGS}, lambda folder: load_config({}, file=str(folder / "c.yaml")),
                       replaced=False),
    "idx": Format(idx_files, lambda folder: read("mnist", folder), replaced=False),
    "pictures": Format(pictures, lambda folder: [decode(str(path)) for path in folder.iterdir()], replaced=False),
    "run": Format(run_folder, read_run),
    "place": Format(lambda: {"p": b'{"rankup": ["127.0.0.1", 4711]}'}, lambda folder: read_address(folder / "p"),
                    replaced=False),
    "frames": Format(frames, lambda folder: asyncio.run(read_frames((folder / "frames").read_bytes())), replaced=False),
    "words": Format(words, read_words, replaced=False),
}
