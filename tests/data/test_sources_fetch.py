"""Downloading a data set once per node: real processes, and a server on loopback."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
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
from train.data.sources.fetch import NotFetched
from train.data.sources.mnist_family import locate

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

    def files(self) -> list[tuple[list[str], str]]:
        """As a family has them. The first address of each leads nowhere."""
        addresses = ("http://127.0.0.1:1", f"http://127.0.0.1:{self.server.server_port}")
        return [([f"{address}/{file.name}" for address in addresses],
                 hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest())
                for file in sorted(self.folder.iterdir())]


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
import json, pathlib, sys
from rankup.errors import UserError
from train.data.sources.fetch import Remote, fetch

def check(folder):
    assert len([*(folder / "raw").iterdir()]) == 4

print("ready", flush=True)
sys.stdin.readline()
remote = Remote("Fashion-MNIST", "FashionMNIST", lambda: json.loads(sys.argv[2]), "FashionMNIST/raw", check)
try:
    fetch(remote, pathlib.Path(sys.argv[1]), timeout_s=240, say=lambda line: print(line, flush=True))
    check(pathlib.Path(sys.argv[1]) / "FashionMNIST")
    print("has all")
except UserError as error:
    print("refused", error)
assert "torch" not in sys.modules, "four of these on two cores would take longer than all else here"
"""


def start_workers(count: int, root: Path, files: list[Any]) -> list[subprocess.Popen[str]]:
    """Processes that begin to fetch at the same moment: whoever waits for a server may do so for 10 s only."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), json.dumps(files)], stdin=subprocess.PIPE, text=True,
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
        assert worker.stdout.readline().startswith("downloading Fashion-MNIST to")


def test_four_processes_with_one_folder_download_each_file_once(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    server = mirror()
    server.gate.clear()
    root = tmp_path / "data"
    workers = start_workers(4, root, server.files())
    all_wait_for_the_download(workers, server)
    server.gate.set()
    outputs = [worker.communicate(timeout=WAIT_S)[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert "has all" in output
    assert server.served == {path.name: 1 for path in server.folder.iterdir()}
    assert everything(root) == ["FashionMNIST"]
    assert {path.name: path.read_bytes() for path in (root / "FashionMNIST" / "raw").iterdir()} == {
        path.stem: gzip.decompress(path.read_bytes()) for path in server.folder.iterdir()
    }


def test_killed_downloader_leaves_no_orphan_and_the_next_run_cleans_up(
    tmp_path: Path, mirror: Callable[..., Mirror]
) -> None:
    server = mirror()
    server.gate.clear()
    root = tmp_path / "data"
    (killed,) = start_workers(1, root, server.files())
    with killed:
        assert server.begun.wait(WAIT_S)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert any(".partial-" in name for name in everything(root))
    assert "FashionMNIST" not in everything(root)
    server.gate.set()
    (second,) = start_workers(1, root, server.files())
    with second:
        output = second.communicate(timeout=WAIT_S)[0]
    assert second.returncode == 0, output
    assert "has all" in output
    assert everything(root) == ["FashionMNIST"]


def test_those_who_waited_share_the_reason_and_do_not_try_again(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    server = mirror(status=403)
    server.gate.clear()
    workers = start_workers(3, tmp_path / "data", server.files())
    all_wait_for_the_download(workers, server)
    server.gate.set()
    outputs = [worker.communicate(timeout=WAIT_S)[0] for worker in workers]
    for output in outputs:
        assert "HTTP Error 403" in output.splitlines()[-1]
    assert sum(server.served.values()) == 1
    assert everything(tmp_path / "data") == []


def test_wrong_md5_is_refused_and_nothing_is_left(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    files = mirror().files()
    files[0] = (files[0][0], "0" * 32)
    with pytest.raises(NotFetched, match=r"web: .* gave another file, its md5 is"):
        locate(small(files), data_dir=str(tmp_path / "data"), timeout_s=WAIT_S, say=print)
    assert everything(tmp_path / "data") == []


def test_slow_download_is_bounded_and_says_how_far_it_is(tmp_path: Path, mirror: Callable[..., Mirror]) -> None:
    with pytest.raises(NotFetched, match=r"web: t10k-images-idx3-ubyte\.gz is not done in time, 0\.0 MB"):
        locate(small(mirror().files()), data_dir=str(tmp_path / "data"), timeout_s=0.0, say=print)
