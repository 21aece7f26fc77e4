"""The image contains everything that training may load, and little else."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.rigs.containers import docker
from tests.rigs.jobs import ROOT

pytestmark = pytest.mark.timeout(900)


def inside(image: str, function: str, user: str = "54321:54321") -> dict[str, Any]:
    """Run a function of tests/rigs/inside_image.py in a read-only container without a network. Return its report."""
    mount = f"{ROOT / 'tests' / 'rigs' / 'inside_image.py'}:/inside.py:ro"
    options = ["--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", user]
    said = docker("run", *options, "-v", mount, "--entrypoint", "python", image, "/inside.py", function)
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def imported(image: str) -> dict[str, Any]:
    """The versions that the libraries in the image report. Skip if the image was built without CUDA."""
    report = inside(image, "imports")
    if report["cuda"] is None:
        pytest.skip("the image's torch has no CUDA")
    return report


def test_image_contains_nothing_that_training_does_not_need(image: str, imported: dict[str, Any]) -> None:
    report = inside(image, "contents", user="0:0")
    assert report["beyond_wheels_mb"] < 400
    assert report["stray"] == []


def test_sbom_of_an_image_lists_debian_and_locked_packages(image: str) -> None:
    made = subprocess.run([sys.executable, ROOT / "docker/host/sbom.py", image], stdout=subprocess.PIPE, check=True)
    listed = {each["purl"] for each in json.loads(made.stdout)["components"]}
    everywhere = {each["purl"] for each in json.loads((ROOT / "docker/sbom.json").read_text())["components"]}
    of_python = {purl for purl in listed if purl.startswith("pkg:pypi/")}
    # Base images of a registry bring the others
    assert {re.split("[/@]", purl)[1] for purl in of_python - everywhere} <= {"rankup", "pip", "setuptools", "wheel"}
    assert any(purl.startswith("pkg:pypi/torch@") for purl in of_python)
    assert any(re.match(r"pkg:deb/\w+/libc6@", purl) for purl in listed)


def test_image_has_the_requirements_of_each_package(image: str) -> None:
    options = ["--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--entrypoint", "python"]
    assert "No broken requirements found" in docker("run", *options, image, "-m", "pip", "check")


def test_libraries_in_the_image_load(imported: dict[str, Any]) -> None:
    assert imported["cuda_available"] is False
    assert imported["nccl"] >= [2]
    assert imported["cudnn"] > 90000
    assert imported["cusparselt"] > 0
    assert imported["nms"] == [0, 2]
    assert imported["board"] == 1


def test_page_names_the_size_of_the_image(image: str, imported: dict[str, Any]) -> None:
    page = (ROOT / "docker" / "README.md").read_text()
    named = re.findall(r"^\| together \| ([\d.]+) GB \|$", page, re.MULTILINE)
    measured = int(docker("image", "inspect", "-f", "{{.Size}}", image)) / 1e9
    # Base images differ by some MB
    assert [float(size) for size in named] == [pytest.approx(measured, rel=0.01)]
