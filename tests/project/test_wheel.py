"""The wheel has all files that the program reads, and works in any folder, also one with a user's train.py."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.rigs import own_venv
from tests.rigs.jobs import ROOT, Job, environment, result, start

OWN = "open('imported', 'a').close()\n"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    own_venv.pip("install", wheel, "--target", folder)
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
    wanted = {name for name in listed if not name.endswith((".md", ".png", "demo.sh"))}
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
    assert own_venv.wheel(tmp_path, source=wheel.parent / "source").read_bytes() == wheel.read_bytes()


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


PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"the sum is {total.item():g}")
"""


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of an environment with torch, what torch itself needs, psutil and the wheel."""
    return own_venv.own_venv(tmp_path_factory.mktemp("bare"), wheel, "torch", "psutil")


def test_wheel_launches_a_plain_script_beside_torch_alone(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    env = {"PYTHONPATH": "", "PYTHONWARNINGS": ""}  # torch warns that there is no numpy
    job = start(bare / "rankup", "launch", "--nproc", "2", "train.py", cwd=tmp_path, env=env)
    job.wait()
    assert job.codes == [0], job.output
    assert job.output.count("the sum is 2") == 2


@pytest.mark.parametrize(("words", "says"), [
    (["launch", "own.py"], "rankup.init: needs numpy, safetensors, tensorboard, not installed: pip install numpy"),
    (["status"], "error: status: needs rich, not installed: pip install rich\n"),
    (["train"], "`rankup train` needs pydantic: pip install 'rankup[train]'."),
])
def test_wheel_names_missing_packages_in_one_line(bare: Path, tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "own.py").write_text("import rankup\nrankup.init()\n")
    job = start(bare / "rankup", *words, cwd=tmp_path, env={"PYTHONPATH": "", "PYTHONWARNINGS": ""})
    job.wait()
    assert job.codes == [2], job.output
    assert says in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(("package", "words", "says"), [
    ("psutil", ["launch", "own.py"], "error: launch: needs psutil, not installed: pip install psutil\n"),
    ("torch", ["launch", "own.py"], "error: launch: needs torch, not installed: pip install torch\n"),
    ("torch", ["export", "a", "b"], "error: export: needs torch, not installed: pip install torch\n"),
])
def test_wheel_launch_names_what_it_needs(
    bare: Path, tmp_path: Path, package: str, words: list[str], says: str
) -> None:
    (tmp_path / "own.py").write_text("import rankup\nrankup.init()\n")
    # Without `site`, Python finds only what PYTHONPATH names
    (tmp_path / "few").mkdir()
    for name in {"rankup", "psutil", "torch"} - {package}:
        (tmp_path / "few" / name).symlink_to(next(bare.parent.glob(f"lib/python*/site-packages/{name}")).resolve())
    done = subprocess.run(
        [sys.executable, "-S", "-m", "rankup", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=environment({"PYTHONPATH": str(tmp_path / "few"), "PYTHONWARNINGS": ""}),
    )
    assert (done.returncode, done.stderr) == (2, says)
