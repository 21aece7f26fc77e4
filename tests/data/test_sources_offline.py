"""Fetching where something is refused: Debian's package, bounded waiting, the cache, and the digits that ship."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankup.errors import UserError
from rankup.places.files import cache_roots
from tests.rigs.idx_files import ROWS, everything, small, write_idx, write_set
from train.config import Config
from train.data.sources import fetch, load
from train.data.sources.fetch import NotFetched
from train.data.sources.in_memory import FAMILIES, Family, find_family, read_half

WAIT_S = 120.0
# Quicker than what imports torchvision to be refused by its servers
NOBODY = "raise SystemExit('Connection refused')"
# In a bare container there are no lists of packages
APT_GET = """#!/bin/sh
case "$*" in
  *Lists*update*) touch lists/fetched; echo "Err:1 one of the lists"; exit 100 ;;
  *Lists*download*) [ -e lists/fetched ] && touch some-package_1_all.deb ;;
  *) echo "E: unexpected: $*"; exit 100 ;;
esac
"""
DPKG = """#!/bin/sh
[ "$1" = -x ] && [ -f "$2" ] && mkdir -p "$3/usr/share" && cp -r {served} "$3/usr/share/place"
"""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """A family that no server has, and Debian does: its package holds what `served` holds."""
    monkeypatch.setattr(fetch, "DOWNLOAD", NOBODY)
    write_set(tmp_path / "served")
    put(tmp_path, apt_get=APT_GET, dpkg=DPKG.format(served=tmp_path / "served"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return replace(small(), package="some-package", here=Path("/usr/share/place"))


def put(tmp_path: Path, **scripts: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = tmp_path / "bin" / name.replace("_", "-")
        path.write_text(script)
        path.chmod(0o755)


def test_package_is_unpacked_where_the_download_is_refused(
    tmp_path: Path, packaged: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # apt-get runs in another folder
    folder = find_family(packaged, data_dir="data", timeout_s=WAIT_S, say=print)
    assert folder == tmp_path / "data" / "FashionMNIST" / "raw"
    assert len(read_half(folder, packaged, train=False)) == ROWS["t10k"]
    assert everything(tmp_path / "data") == ["FashionMNIST"]


@pytest.mark.parametrize(
    ("apt_get", "timeout_s", "message"),
    [
        ('echo "Err:1 mirror"; echo "E: Failed to fetch it  403"; exit 100', WAIT_S,
         r"\(web: .*Connection refused.*; apt: Err:1 mirror E: Failed to fetch it 403\)"),
        ("exec sleep 600", 0.5, "apt: timed out"),
    ],
)
def test_apt_that_fails_or_hangs_gives_its_reason(
    tmp_path: Path, packaged: Family, apt_get: str, timeout_s: float, message: str
) -> None:
    put(tmp_path, apt_get=f"#!/bin/sh\n{apt_get}\n")
    with pytest.raises(NotFetched, match=message):
        find_family(packaged, data_dir=str(tmp_path / "data"), timeout_s=timeout_s, say=print)


def test_content_that_is_wrong_though_delivered_is_refused(tmp_path: Path, packaged: Family) -> None:
    write_idx(tmp_path / "served" / "t10k-images-idx3-ubyte", torch.zeros(9, 5, 5, dtype=torch.uint8))
    with pytest.raises(NotFetched, match="10 labels for 9 images"):
        find_family(packaged, data_dir=str(tmp_path / "data"), timeout_s=WAIT_S, say=print)
    assert everything(tmp_path / "data") == []


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
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".FashionMNIST.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process has not finished downloading FashionMNIST") as e:
            find_family(small(), data_dir=str(tmp_path), timeout_s=0.2, say=print)
        assert not isinstance(e.value, NotFetched)  # no ground to fall back: somebody may well succeed
        holder.kill()


def test_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UserError, match=r"/proc/none: FashionMNIST cannot be stored there \(No such file"):
        find_family(small(), data_dir="/proc/none", timeout_s=1.0, say=print)


# What is done without network and package -----------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fashion-mnist", "mnist"):
        monkeypatch.setitem(FAMILIES, name, replace(small(), name=name))
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "DOWNLOAD", NOBODY)


@pytest.mark.usefixtures("offline")
def test_default_falls_back_to_digits_and_says_so_in_one_line() -> None:
    said: list[str] = []
    assert [half.name for half in load(Config(), say=said.append)] == ["digits", "digits"]
    (told,) = [line for line in said if "digits" in line]
    assert "Connection refused" in told
    assert "\n" not in told


@pytest.mark.usefixtures("offline")
def test_a_chosen_set_or_place_is_never_replaced(tmp_path: Path) -> None:
    for config in (Config(dataset="mnist"), Config(data_dir=str(tmp_path / "empty"))):
        with pytest.raises(NotFetched, match=r"cannot be downloaded.*set data_dir"):
            load(config, say=print)


def test_cache_is_the_named_one_then_the_users_then_the_temporary(
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
