"""What the image holds: all that training may load, and as little else as can be."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.containers import docker
from tests.rigs.jobs import ROOT

pytestmark = pytest.mark.timeout(900)
SLIM = ROOT / "docker" / "slim.sh"
# Libraries of the GPU's driver and of fast networks, which no package brings: the engine mounts the driver's, and those
# of a network are in images for it. Each is loaded only where it is used.
OF_THE_MACHINE = {
    "libcuda.so.1", "libmlx5.so.1", "librdmacm.so.1", "libibverbs.so.1", "libfabric.so.1", "libucs.so.0", "libucp.so.0",
    "libpmix.so.2", "liboshmem.so.40", "libmpi.so.40",
}


def inside(image: str, script: str, *words: str, user: str = "54321:54321") -> dict[str, Any]:
    """What tests/rigs/SCRIPT prints as JSON in a container without a network, on a read-only file system."""
    mount = f"{ROOT / 'tests' / 'rigs' / script}:/{script}:ro"
    options = ["--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", user]
    said = docker("run", *options, "-v", mount, "--entrypoint", "python", image, f"/{script}", *words)
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def imported(image: str) -> dict[str, Any]:
    """What the libraries say of themselves. Skips where somebody built an image without CUDA."""
    report = inside(image, "inside_image.py", "imports")
    if report["cuda"] is None:
        pytest.skip("the image's torch has no CUDA")
    return report


def test_the_image_holds_nothing_that_training_does_not_need(image: str, imported: dict[str, Any]) -> None:
    report = inside(image, "inside_image.py", "contents", user="0:0")
    assert report["beyond_wheels_mb"] < 300
    assert report["stray"] == []
    # Of the wheels, only what the page names is gone
    assert report["lost"] == []


def test_the_list_of_an_images_packages_has_debians_and_the_locked_ones(image: str) -> None:
    made = subprocess.run([sys.executable, ROOT / "docker/host/sbom.py", image], stdout=subprocess.PIPE, check=True)
    listed = {each["purl"] for each in json.loads(made.stdout)["components"]}
    everywhere = {each["purl"] for each in json.loads((ROOT / "docker/sbom.json").read_text())["components"]}
    of_python = {purl for purl in listed if purl.startswith("pkg:pypi/")}
    assert of_python - everywhere <= {purl for purl in of_python if purl.startswith("pkg:pypi/rankup@")}
    assert any(purl.startswith("pkg:pypi/torch@") for purl in of_python)
    assert any(re.match(r"pkg:deb/\w+/libc6@", purl) for purl in listed)


def test_each_library_finds_the_libraries_that_it_needs(image: str, imported: dict[str, Any]) -> None:
    report = inside(image, "inside_image.py", "libraries")
    assert report["looked_at"] > 100
    assert set(report["missing"]) <= OF_THE_MACHINE, report["missing"]


def test_each_package_finds_the_packages_that_it_needs(image: str) -> None:
    # The image has no pip, but its Python has the wheels to make one
    check = "python -m venv /tmp/pip && /tmp/pip/bin/python -m pip --python /opt/venv/bin/python check"
    options = ["--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp"]
    assert "No broken requirements found" in docker("run", *options, "--entrypoint", "sh", image, "-c", check)


def test_the_libraries_load(imported: dict[str, Any]) -> None:
    assert imported["cuda_available"] is False
    assert imported["nccl"] >= [2]
    assert imported["cudnn"] > 90000
    assert imported["cusparselt"] > 0
    assert imported["nms"] == [0, 2]
    assert imported["board"] == 1


def test_triton_and_nvrtc_compile_for_gpus(image: str, imported: dict[str, Any]) -> None:
    sizes = inside(image, "gpu_kernels.py")
    assert len(sizes) == 4
    assert all(size > 1000 for size in sizes.values()), sizes


def test_the_page_names_the_size_of_the_image(image: str, imported: dict[str, Any]) -> None:
    page = (ROOT / "docker" / "README.md").read_text()
    named = re.findall(r"^\| together \| ([\d.]+) GB \|$", page, re.MULTILINE)
    measured = int(docker("image", "inspect", "-f", "{{.Size}}", image)) / 1e9
    # Bases differ by some MB
    assert [float(size) for size in named] == [pytest.approx(measured, rel=0.01)]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The empty site-packages of a virtual environment in `tmp_path`."""
    made = tmp_path / "lib" / "python3.11" / "site-packages"
    made.mkdir(parents=True)
    return made


def slim(venv: Path, path: str = "") -> str:
    done = subprocess.run(
        [SLIM, venv], env={"PATH": f"{path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slim_removes_what_the_page_names_and_nothing_else(tmp_path: Path, packages: Path) -> None:
    goes = [
        "numpy/_core/lib/libnpymath.a", "sympy/core/tests/test_args.py", "torch/bin/protoc-3.21.12.0",
        "triton/backends/nvidia/lib/cupti-blackwell/libcupti.so.13", "triton/plugins/libTritonPluginsTestLib.so",
        "nvidia/cu13/lib/libcusolverMg.so.12", "nvidia/cu13/lib/libnvrtc.alt.so.13",
    ]
    stays = [
        "jinja2/tests.py", "torch-2.14.1.dist-info/licenses/tests/LICENSE", "torch/bin/torch_shm_manager",
        "triton/backends/nvidia/lib/libdevice.10.bc", "triton/plugins/__init__.py",
        "nvidia/cu13/lib/libcusolver.so.12", "nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libcupti.so.13",
    ]
    for name in goes + stays:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    slim(tmp_path)
    assert sorted(str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()) == sorted(stays)


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("strip")), reason="needs g++ and binutils")
def test_slim_takes_the_symbols_of_a_library_only_if_what_is_mapped_stays(tmp_path: Path, packages: Path) -> None:
    library = packages / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    code = 'extern "C" int twice(int x) { return 2 * x; }'
    subprocess.run(["g++", "-g", "-shared", "-fPIC", "-o", library, "-xc++", "-"], input=code, text=True, check=True)
    built = library.read_bytes()

    # A strip that changes one byte of what is mapped, a name
    strip = tmp_path / "bin" / "strip"
    strip.parent.mkdir()
    strip.write_text('#!/bin/sh\nsed "s/twice/Twice/" "$4" > "$3"\n')
    strip.chmod(0o755)
    assert "libtriton.so keeps its symbols" in slim(tmp_path, str(strip.parent))
    assert library.read_bytes() == built

    assert "keeps" not in slim(tmp_path)
    assert len(library.read_bytes()) < len(built)
    assert os.access(library, os.X_OK)
    assert ctypes.CDLL(str(library)).twice(21) == 42
    assert [path.name for path in library.parent.iterdir()] == ["libtriton.so"]
