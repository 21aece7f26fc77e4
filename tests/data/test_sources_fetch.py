"""A data set is downloaded once per node, and failures are explained. Real processes load from a server on loopback."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankup.errors import UserError
from rankup.places.files import cache_roots
from tests.rigs.idx_files import ROWS, everything, small, write_set
from tests.rigs.jobs import environment
from train.config import Config
from train.data.sources import fetch, load
from train.data.sources.fetch import KNOWN, NotFetched, Remote
from train.data.sources.in_memory import read

WAIT_S = 240.0


class Mirror:
    """A server of four small files. It answers while `gate` is open.

    `served` counts the downloads of each file. With `cut` the server resets the connection in the middle of a file.
    """

    def __init__(self, folder: Path, *, status: int = 200, cut: bool = False) -> None:
        self.folder, self.status = folder, status
        self.served: Counter[str] = Counter()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                content = (mirror.folder / name).read_bytes()
                mirror.served[name] += 1
                mirror.begun.set()
                mirror.gate.wait(WAIT_S)
                with contextlib.suppress(OSError):  # the client was killed
                    self.send_response(mirror.status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                    if cut:
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        self.connection.close()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def download(self, *, wrong: bool = False) -> str:
        """Return the download program, changed to load from this server. `wrong`: it expects other MD5 sums."""
        address = f"http://127.0.0.1:{self.server.server_port}/"
        files = [(file.name, "0" * 32 if wrong else hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest())
                 for file in sorted(self.folder.iterdir())]
        here = f"datasets.FashionMNIST.mirrors, datasets.FashionMNIST.resources = ['{address}'], {files}"
        return fetch.DOWNLOAD.replace("try:", f"{here}\ntry:")


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mirror]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started: list[Mirror] = []

    def start(**options: Any) -> Mirror:
        started.append(Mirror(write_set(tmp_path / "served", suffix=".gz"), **options))
        return started[-1]

    yield start
    for one in started:
        one.gate.set()
        one.server.shutdown()
        one.server.server_close()


WORKER = """
import pathlib, sys
from rankup.errors import UserError
from train.config import Config
from train.data.sources import fetch, load

print("ready", flush=True)
sys.stdin.readline()
fetch.DOWNLOAD = sys.argv[2]
remote = fetch.Remote(kind="FashionMNIST", folder="FashionMNIST")
target = pathlib.Path(sys.argv[1]) / "FashionMNIST"
try:
    fetch.fetch(remote, target, timeout_s=240)
    assert len([*(target / "raw").glob("*-ubyte")]) == 4
    print("has all")
except UserError as error:
    print("refused", error)
assert "torch" not in sys.modules, "imports of torch would take longer than the whole test"
"""


def start_workers(count: int, root: Path, download: str) -> list[subprocess.Popen[str]]:
    """Start processes that begin to fetch at the same moment, because a process waits only 10 s for another one."""
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(root), download], stdin=subprocess.PIPE, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
        for _ in range(count)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return workers


def all_wait_for_the_download(workers: list[subprocess.Popen[str]], server: Mirror) -> None:
    """Wait until one process downloads and all others wait for it."""
    assert server.begun.wait(WAIT_S)
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("fetching FashionMNIST to")


def test_four_processes_download_each_file_once_after_a_killed_one(
    tmp_path: Path, mirror: Callable[..., Mirror]
) -> None:
    """The killed process leaves a partial folder, but no orphan process."""
    server = mirror()
    server.gate.clear()
    root = tmp_path / "data"
    (killed,) = start_workers(1, root, server.download())
    with killed:
        assert server.begun.wait(WAIT_S)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert any(".partial-" in name for name in everything(root))
    assert "FashionMNIST" not in everything(root)
    server.served.clear()
    server.begun.clear()
    workers = start_workers(4, root, server.download())
    all_wait_for_the_download(workers, server)
    server.gate.set()
    outputs = [worker.communicate(timeout=WAIT_S)[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert "has all" in output
    assert server.served == {path.name: 2 for path in server.folder.iterdir()}  # torchvision follows redirects first
    assert everything(root) == ["FashionMNIST"]
    for path in server.folder.iterdir():
        assert (root / "FashionMNIST" / "raw" / path.stem).read_bytes() == gzip.decompress(path.read_bytes())


def test_waiting_processes_share_the_failure_and_do_not_retry(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    server = mirror(status=403)
    server.gate.clear()
    workers = start_workers(3, tmp_path / "data", server.download())
    all_wait_for_the_download(workers, server)
    server.gate.set()
    outputs = [worker.communicate(timeout=WAIT_S)[0] for worker in workers]
    for output in outputs:
        assert "HTTP Error 403" in output.splitlines()[-1]
    assert sum(server.served.values()) == 1
    assert everything(tmp_path / "data") == []


@pytest.mark.parametrize(("wrong", "cut", "reason"), [
    (True, False, r"web: .*File not found or corrupted"),  # another MD5
    (False, True, r"\(web: ConnectionResetError: .*\)\. Copy"),  # without its progress bar
])
def test_wrong_or_cut_file_is_refused_and_leaves_no_file(
    tmp_path: Path, mirror: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch, wrong: bool, cut: bool, reason: str
) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD", mirror(cut=cut).download(wrong=wrong))
    with pytest.raises(NotFetched, match=reason):
        fetch.locate(small(), data_dir=str(tmp_path / "data"), timeout_s=WAIT_S)
    assert everything(tmp_path / "data") == []


# Debian's package, bounded waiting, the cache, and the digits that ship -----------------------------------------------

# Faster than a real download program, which imports torchvision before it is refused
NOBODY = "raise SystemExit('Connection refused')"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """A data set that no server has, but an installed package of Debian has its files."""
    monkeypatch.setattr(fetch, "DOWNLOAD", NOBODY)
    return replace(small(), package="some-package", packed=write_set(tmp_path / "served", suffix=".gz"))


def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put commands in front of all others of that name."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = tmp_path / "bin" / name.replace("_", "-")
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)


def test_installed_package_replaces_a_download(tmp_path: Path, packaged: Remote) -> None:
    root = fetch.locate(packaged, data_dir=str(tmp_path / "data"), timeout_s=WAIT_S)
    assert len(read("fashion-mnist", root)[1]) == ROWS["t10k"]
    assert everything(tmp_path / "data") == ["FashionMNIST"]


def test_refused_download_names_the_package_and_never_installs_it(
    tmp_path: Path, packaged: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, apt_get=f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    with pytest.raises(NotFetched, match=r"web: .*Connection refused.*Type `apt-get install some-package`"):
        fetch.locate(replace(packaged, packed=None), data_dir=str(tmp_path / "data"), timeout_s=WAIT_S)
    assert not (tmp_path / "ran").exists()


def test_download_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD", "import time; time.sleep(600)")
    with pytest.raises(NotFetched, match="web: timed out"):
        fetch.locate(small(), data_dir=str(tmp_path / "data"), timeout_s=0.5)


def test_full_disk_never_leads_to_another_data_set(
    tmp_path: Path, packaged: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, cp="#!/bin/sh\necho \"cp: error writing: No space left on device\"; exit 1\n")
    monkeypatch.setitem(KNOWN, "fashion-mnist", packaged)
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"FashionMNIST cannot be stored there \(No space left on device\)") as caught:
        load(Config())
    assert not isinstance(caught.value, NotFetched)
    assert everything(tmp_path / "cache") == []


def test_installed_debian_package_is_complete_and_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = KNOWN["fashion-mnist"].packed
    if packed is None or not packed.is_dir():
        pytest.skip("needs Debian's dataset-fashion-mnist")
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path))
    for _ in range(2):
        halves = load(Config())
        assert [(half.name, len(half)) for half in halves] == [("fashion-mnist", 60_000), ("fashion-mnist", 10_000)]
        assert {path.suffix for path in (tmp_path / "FashionMNIST" / "raw").iterdir()} == {""}
        monkeypatch.setattr(fetch, "fetch", None)


def test_data_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UserError, match=r"/proc/none: FashionMNIST cannot be stored there \(No such file"):
        fetch.locate(small(), data_dir="/proc/none", timeout_s=1.0)


# Without network and package ------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fashion-mnist", "mnist"):
        monkeypatch.setitem(KNOWN, name, replace(KNOWN[name], packed=None, package=""))
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "DOWNLOAD", NOBODY)


@pytest.mark.usefixtures("offline")
def test_default_data_set_falls_back_to_digits_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [half.name for half in load(Config())] == ["digits", "digits"]
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "digits" in line]
    assert "Connection refused" in told


@pytest.mark.usefixtures("offline")
def test_chosen_data_set_or_folder_is_never_replaced(tmp_path: Path) -> None:
    for config in (Config(dataset="mnist"), Config(data_dir=str(tmp_path / "empty"))):
        with pytest.raises(NotFetched, match=r"cannot be downloaded.*set data_dir"):
            load(config)


def test_cache_is_the_configured_then_the_users_then_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "broken").write_text("")
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "broken" / "cache"))
    with pytest.raises(UserError, match=rf"{tmp_path / 'broken' / 'cache'}: cannot be written"):
        fetch.writable_cache()
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "named"))
    assert fetch.writable_cache() == tmp_path / "named"
    monkeypatch.delenv("RANKUP_CACHE")
    assert fetch.writable_cache() == tmp_path / "xdg" / "rankup"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.writable_cache() == tmp_path / "home" / ".cache" / "rankup"
    monkeypatch.setenv("HOME", str(tmp_path / "broken"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    last = tmp_path / f"rankup-cache-{os.geteuid()}"
    assert fetch.writable_cache() == last
    assert last.stat().st_mode & 0o777 == 0o700


def test_cache_folder_that_another_user_prepared_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANKUP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as for a user without a home directory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "rankup-cache-4711" / "FashionMNIST").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    for call in (fetch.writable_cache, cache_roots):
        with pytest.raises(UserError, match=rf"{tmp_path}/rankup-cache-4711 must belong to this user"):
            call()
    monkeypatch.setenv("RANKUP_CACHE", f"{tmp_path}/rankup-cache-4711/deep/down")
    with pytest.raises(UserError, match=rf"{tmp_path}/rankup-cache-4711/deep/down must belong to this user"):
        cache_roots()
