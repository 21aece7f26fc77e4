"""Fetching where something is refused: the next source, bounded waiting, the cache, and the digits that ship."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.places.files import cache_roots
from tests.rigs.idx_files import ROWS, everything, small, write_idx, write_set
from train.config import Config
from train.data.sources import fetch, load
from train.data.sources.fetch import NotFetched, Remote
from train.data.sources.mnist_family import FAMILIES, locate, read_half

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


def pretend(monkeypatch: pytest.MonkeyPatch, *, reasons: dict[str, str], made: Path | None = None) -> list[str]:
    """Let each source fail for a reason, or make a copy of `made` where its download would be; lists what was tried."""
    tried: list[str] = []

    def pretended(name: str) -> Any:
        def get(remote: Remote, folder: Path, *_: Any) -> None:
            tried.append(name)
            assert folder.is_absolute(), "apt-get runs in another folder"
            if name in reasons:
                raise OSError(reasons[name])
            assert made is not None
            for path in made.iterdir():
                (folder / remote.inside / path.name).write_bytes(path.read_bytes())

        return get

    monkeypatch.setattr(fetch, "_from_web", pretended("web"))
    monkeypatch.setattr(fetch, "_from_debian", pretended("apt"))
    return tried


def at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **scripts: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_content_that_is_wrong_though_delivered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = write_set(tmp_path / "served")
    write_idx(served / "t10k-images-idx3-ubyte", torch.zeros(9, 5, 5, dtype=torch.uint8))
    pretend(monkeypatch, reasons={}, made=served)
    with pytest.raises(NotFetched, match="10 labels for 9 images"):
        locate(small(), data_dir=str(tmp_path / "data"), timeout_s=WAIT_S, say=print)
    assert everything(tmp_path / "data") == []


def test_package_is_unpacked_where_the_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    at_hand(monkeypatch, tmp_path, apt_get="exit 1", dpkg="exit 1")
    tried = pretend(monkeypatch, reasons={"web": "HTTP Error 403"}, made=write_set(tmp_path / "served"))
    family = replace(small(), debian_package="some-package")
    folder = locate(family, data_dir="data", timeout_s=WAIT_S, say=print)
    assert tried == ["web", "apt"]
    assert folder == tmp_path / "data" / "FashionMNIST" / "raw"
    assert len(read_half(folder, family, train=False)) == ROWS["t10k"]
    assert everything(tmp_path / "data") == ["FashionMNIST"]


APT_GET = """
case "$*" in
  *Lists*update*) touch lists/fetched ;;
  *download*) if [ ! -e lists/fetched ]; then echo "E: Unable to locate package some-package"; exit 100; fi
              touch some-package_1_all.deb ;;
  *) echo "E: unexpected: $*"; exit 100 ;;
esac
"""
DPKG = """
[ "$1" = -x ] && [ -f "$2" ] && mkdir -p "$3/usr/share/place" && touch "$3/usr/share/place/file"
"""


def from_debian(tmp_path: Path, until_s: float = WAIT_S) -> Path:
    remote = Remote("it", "it", lambda: (), "it/raw", lambda _: None, package="some-package", place="usr/share/place")
    (tmp_path / "apt" / remote.inside).mkdir(parents=True)
    fetch._from_debian(remote, tmp_path / "apt", time.monotonic() + until_s, print)
    return tmp_path / "apt" / remote.inside


def test_apt_fetches_its_own_lists_when_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, tmp_path, apt_get=APT_GET, dpkg=DPKG)
    assert (from_debian(tmp_path) / "file").is_file()


def test_apt_that_fails_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, tmp_path, apt_get='echo "Err:1 mirror"; echo "E: Failed to fetch it  403"; exit 100', dpkg="")
    with pytest.raises(OSError, match="Err:1 mirror E: Failed to fetch it  403"):
        from_debian(tmp_path)


def test_apt_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, tmp_path, apt_get="exec sleep 600", dpkg="")
    with pytest.raises(subprocess.TimeoutExpired):
        from_debian(tmp_path, until_s=0.2)


def test_debians_package_that_is_installed_is_what_was_published() -> None:
    family = FAMILIES["fashion-mnist"]
    if not (family.here and family.here.is_dir()):
        pytest.skip("needs Debian's dataset-fashion-mnist")
    halves = load(Config())
    assert [(half.name, len(half)) for half in halves] == [("fashion-mnist", 60_000), ("fashion-mnist", 10_000)]


HOLDER = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "GRACE_S", 0.3)
    monkeypatch.setattr(fetch, "REPORT_EVERY_S", 0.1)
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / ".FashionMNIST.lock")], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process has not finished downloading Fashion-MNIST") as e:
            locate(small(), data_dir=str(tmp_path), timeout_s=0.2, say=said.append)
        assert not isinstance(e.value, NotFetched)  # no ground to fall back: somebody may well succeed
        holder.kill()
    assert said[0].startswith("waiting for another process to download Fashion-MNIST (0 s of at most 0.2 s)")


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(suffix: str, prefix: str, dir: str) -> str:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match=rf"{tmp_path}: Fashion-MNIST cannot be stored there \(Read-only file system\)"):
        locate(small(), data_dir=str(tmp_path), timeout_s=1.0, say=print)
    assert everything(tmp_path) == []


# What is done without network and package


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(FAMILIES, "fashion-mnist", small())
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    return pretend(monkeypatch, reasons={"web": "<urlopen error [Errno -2] Name or service not known>"})


def test_default_falls_back_to_digits_and_says_so_in_one_line(offline: list[str]) -> None:
    said: list[str] = []
    assert [half.name for half in load(Config(), say=said.append)] == ["digits", "digits"]
    assert offline == ["web"], "the second half must not try, and decide, again"
    told = [line for line in said if "digits" in line]
    assert len(told) == 1
    assert "Name or service not known" in told[0]
    assert "\n" not in told[0]


@pytest.mark.parametrize(
    ("dataset", "own"), [("fashion-mnist", True), ("mnist", False), ("mnist", True), ("cifar10", False)]
)
def test_a_chosen_set_or_place_is_never_replaced(tmp_path: Path, offline: list[str], dataset: Any, own: bool) -> None:
    config = Config(dataset=dataset, data_dir=str(tmp_path / "empty") if own else None)
    with pytest.raises(NotFetched, match=r"cannot be downloaded.*set data_dir"):
        load(config, say=print)


def test_cache_is_the_named_one_then_the_users_then_the_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "named"))
    assert fetch.writable_cache() == tmp_path / "named"
    monkeypatch.delenv("RANKUP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.writable_cache() == tmp_path / "xdg" / "rankup"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fetch.writable_cache() == tmp_path / "home" / ".cache" / "rankup"
    (tmp_path / "broken").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "broken"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert fetch.writable_cache() == tmp_path / f"rankup-cache-{os.geteuid()}"
    assert (tmp_path / f"rankup-cache-{os.geteuid()}").stat().st_mode & 0o777 == 0o700


def test_cache_folder_that_another_user_prepared_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANKUP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as for a user without a home directory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "rankup-cache-4711" / "FashionMNIST").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    for call in (lambda: fetch.cached("FashionMNIST"), fetch.writable_cache, cache_roots):
        with pytest.raises(UserError, match=rf"{tmp_path}/rankup-cache-4711 must belong to this user"):
            call()
    monkeypatch.setenv("RANKUP_CACHE", f"{tmp_path}/rankup-cache-4711/deep/down")
    with pytest.raises(UserError, match=rf"{tmp_path}/rankup-cache-4711/deep/down must belong to this user"):
        cache_roots()


def test_named_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=rf"{tmp_path / 'file' / 'cache'}: cannot be written"):
        fetch.writable_cache()
