"""Downloading a data set once per node: real processes, and a server on loopback."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.idx_files import everything, small, write_set
from tests.rigs.jobs import environment
from train.data.sources import fetch
from train.data.sources.fetch import NotFetched
from train.data.sources.in_memory import find_family

WAIT_S = 240.0


class Mirror:
    """A server of four small files, which answers while `gate` is open.

    `served` counts downloads.
    """

    def __init__(self, folder: Path, *, status: int = 200) -> None:
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
                with contextlib.suppress(OSError):  # the process that asked was killed
                    self.send_response(mirror.status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def download(self, *, wrong: bool = False) -> str:
        """The program that downloads, from here. The first address of each file leads nowhere."""
        addresses = ["http://127.0.0.1:1/", f"http://127.0.0.1:{self.server.server_port}/"]
        files = [(file.name, "0" * 32 if wrong else hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest())
                 for file in sorted(self.folder.iterdir())]
        here = f"datasets.FashionMNIST.mirrors, datasets.FashionMNIST.resources = {addresses}, {files}"
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
from train.data.sources import fetch

def check(folder):
    assert len([*(folder / "raw").glob("*-ubyte")]) == 4

print("ready", flush=True)
sys.stdin.readline()
fetch.DOWNLOAD = sys.argv[2]
remote = fetch.Remote("FashionMNIST", "FashionMNIST/raw", find=lambda root: None, check=check)
target = pathlib.Path(sys.argv[1]) / "FashionMNIST"
try:
    fetch.fetch(remote, target, timeout_s=240, say=lambda line: print(line, flush=True))
    check(target)
    print("has all")
except UserError as error:
    print("refused", error)
assert "torch" not in sys.modules, "four of these on two cores would take longer than all else here"
"""


def start_workers(count: int, root: Path, download: str) -> list[subprocess.Popen[str]]:
    """Processes that begin to fetch at the same moment: whoever waits for a server may do so for 10 s only."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), download], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
        )
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
    """Returns when one of them downloads and all others wait for it."""
    assert server.begun.wait(WAIT_S)
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("downloading FashionMNIST to")


def test_four_processes_with_one_folder_download_each_file_once(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    server = mirror()
    server.gate.clear()
    root = tmp_path / "data"
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


def test_killed_downloader_leaves_no_orphan_and_the_next_run_cleans_up(
    tmp_path: Path, mirror: Callable[..., Mirror]
) -> None:
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
    server.gate.set()
    (second,) = start_workers(1, root, server.download())
    with second:
        output = second.communicate(timeout=WAIT_S)[0]
    assert second.returncode == 0, output
    assert "has all" in output
    assert everything(root) == ["FashionMNIST"]


def test_those_who_waited_share_the_reason_and_do_not_try_again(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
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


def test_wrong_md5_is_refused_and_nothing_is_left(
    tmp_path: Path, mirror: Callable[..., Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD", mirror().download(wrong=True))
    with pytest.raises(NotFetched, match=r"web: .*File not found or corrupted"):
        find_family(small(), data_dir=str(tmp_path / "data"), timeout_s=WAIT_S, say=print)
    assert everything(tmp_path / "data") == []
