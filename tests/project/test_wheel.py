"""The wheel has all files that the program reads, and works in any folder, also one with a user's train.py."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, Job, environment, result, start

OWN = "open('imported', 'a').close()\n"


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run(command, check=True, env=environment({"PYTHONPATH": "", "PYTHONWARNINGS": ""}))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("rankup", "train"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return built(source, folder)


def built(source: Path, folder: Path) -> Path:
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", folder)
    (made,) = folder.glob("rankup-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", wheel, "--target", folder)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder with only a train.py, which leaves a file behind whenever it runs or is imported."""
    (tmp_path / "train.py").write_text(OWN)
    return tmp_path


def rankup(installed: Path, own: Path, *words: str | Path) -> Job:
    """Run the installed command in the user's folder, and wait for its end."""
    program = installed / "bin" / "rankup"
    job = start(sys.executable, program, *words, cwd=own, env={"PYTHONPATH": str(installed)})
    job.wait()
    return job


def test_wheel_has_every_file_except_pages(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "rankup", "train"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()
    # Not pages with their pictures, nor the script of `make demo`
    wanted = {name for name in listed if not name.endswith((".md", ".png", ".sh"))}
    assert {"rankup/explain/known_faults.toml", "train/samples/texts/dev.txt"} < wanted
    assert "rankup/env/launchers.py" in wanted
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {re.sub("^train/", "rankup/program/", name) for name in wanted}
    assert wanted <= held, wanted - held
    assert {name.split("/")[0].split("-")[0] for name in held} == {"rankup"}


def test_wheel_has_the_same_bytes_on_another_day(wheel: Path, tmp_path: Path) -> None:
    for path in (wheel.parent / "source").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert built(wheel.parent / "source", tmp_path).read_bytes() == wheel.read_bytes()


def test_wheel_works_beside_an_own_train_py(installed: Path, own: Path) -> None:
    line = ("--dataset", "digits", "--model", "mlp", "--max-steps", "1", "--tensorboard=false", "--name", "run")
    (own / "train").mkdir()  # also beside a package of that name
    (own / "train" / "__init__.py").write_text(OWN)
    for world_size, started in enumerate([["train"], ["launch", "--nproc=2", "-m", "rankup.program.main"]], 1):
        job = rankup(installed, own, *started, *line, "--fresh")
        assert job.codes == [0], job.output
        assert result(own / "runs" / "run")["world_size"] == world_size
    assert "(rankup show lists all)" in rankup(installed, own, "train", "--stpes", "1").output
    (own / "job.log").write_text("CUDA out of memory\n")
    job = rankup(installed, own, "explain", "job.log")
    assert "the GPU's memory was not enough" in job.output
    assert not (own / "imported").exists()


def test_wheel_starts_an_own_train_py_that_copies_the_loop(installed: Path, own: Path) -> None:
    loop = (ROOT / "train" / "loop.py").read_text().replace("from .", "from rankup.program.")
    (own / "train.py").write_text(loop + """
program, run_dir = Program().begin(), Path("runs/train")
program.read_rank()
program.start(run_dir)
train(Config(dataset="digits", model="mlp", max_steps=2), program, run_dir=run_dir)
""")
    job = rankup(installed, own, "launch", "--nproc=2", "train.py")
    assert job.codes == [0], job.output
    assert result(own / "runs" / "train")["world_size"] == 2
