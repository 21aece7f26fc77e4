"""`rankup submit`: mistakes, dry runs, and a compose file with a scripted docker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankup.cli import main
from rankup.launch import own_code_first
from rankup.submit.machine import Machine
from tests.rigs.jobs import ROOT

DOCKER = """#!/bin/sh
echo "$CONTEXT|$ARGS|$DOCKER_HOST|$*" >> "$0.calls"
case "$*" in
  *" up "*) cat "$CONTEXT/recipe.py" >> "$0.calls"; [ ! -L "$CONTEXT/rankup-1.whl" ] ;;
  *" ps "*) echo 0; echo 171; echo 3 ;;
esac
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with launch files and a scripted docker."""
    folder = tmp_path / "mine"
    (folder / "bin").mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "recipe.py").write_text("WORD = 1\n")
    (folder / "job.sbatch").write_text('#!/bin/sh\n#SBATCH -o logs/%x.out\n#SBATCH --error=/tmp/e\nrun "$@"\n')
    (folder / "compose.yaml").write_text((ROOT / "compose.yaml").read_text())
    (folder / "bin/docker").write_text(DOCKER)
    (folder / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def calls(mine: Path) -> list[str]:
    return (mine / "bin/docker.calls").read_text().splitlines()


def test_submit_compose_builds_from_the_snapshot_and_ends_with_the_code_of_the_nodes(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "rankup-1.whl").touch()  # ignored, but the image needs it: a link would lead out of the build
    (mine / ".gitignore").write_text("*.whl\n")
    subprocess.run(["git", "init", "-q"], check=True)
    assert main(["submit", "compose.yaml", "--lr", "0 2"]) == 3
    said = capfd.readouterr().out
    (place,) = [path for path in (mine / ".rankup").iterdir() if path.is_dir()]
    up, recipe, logs, _ = calls(mine)
    assert up == f"{place}|--lr '0 2'||compose up --build --detach"
    assert recipe == "WORD = 1"
    assert logs.endswith("|compose logs --follow")
    assert re.search(r"CONTEXT=\S+ docker compose up --build --detach\n", said)


def test_submit_compose_on_a_host_asks_its_docker(mine: Path) -> None:
    assert main(["submit", "--host", "login", "--detach", "compose.yaml"]) == 0
    assert [line.split("|")[2] for line in calls(mine) if "|" in line] == ["ssh://login"]


def test_submit_compose_of_another_form_says_that_it_builds_from_the_folder(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "compose.yaml").write_text("services: {}\n")
    assert main(["submit", "--dry-run", "compose.yaml"]) == 0
    assert "compose.yaml builds from this folder. To build from the snapshot, write there `context:" in (
        capfd.readouterr().out
    )


def test_submit_dry_run_prints_the_lines_and_writes_nothing(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(mine.rglob("*"))
    assert main(["submit", "--dry-run", "job.sbatch", "--lr", "1"]) == 0
    assert main(["submit", "--dry-run", "--host", "login:/data/mine", "job.sbatch"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line[0] == "+"]
    assert sorted(mine.rglob("*")) == before
    assert re.sub("[0-9a-f]{12}", "NAME", lines[0]) == (
        f"+ cd {mine}/.rankup/NAME && sbatch --chdir=. --output=../../logs/%x.out --open-mode=append job.sbatch --lr 1"
    )
    assert lines[1].startswith("+ ssh login 'cd /data/mine/.rankup/")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", "--output=../../slurm-%j.out"),
        ("#SBATCH --nodes=2 -o a.out -e b", "--output=../../a.out --error=../../b"),
        ("#SBATCH --output 'a b' # -e no", "'--output=../../a b'"),
        ('#SBATCH --output="a b" --array=1-3', "'--output=../../a b'"),
        ("#SBATCH --array 1-3 -J don't", "--output=../../slurm-%A_%a.out"),
        ("##SBATCH --output=a\n#SBATCH -o/b", ""),
    ],
)
def test_submit_keeps_the_output_where_the_batch_file_has_it(
    line: str, options: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "-own.sbatch").write_text(f"#!/bin/sh\n#SBATCH --nodes=1\n{line}\nrun\n")
    assert main(["submit", "--dry-run", "--", "-own.sbatch"]) == 0
    want = " ".join(f"sbatch --chdir=. {options} --open-mode=append ./-own.sbatch".split())
    assert capfd.readouterr().out.endswith(f" && {want}\n")


def test_submit_takes_a_file_by_its_whole_path_in_a_linked_folder(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").symlink_to(mine)
    monkeypatch.chdir(tmp_path / "linked")
    assert main(["submit", "--dry-run", f"{tmp_path}/linked/job.sbatch"]) == 0
    assert capfd.readouterr().out.endswith(" job.sbatch\n")


@pytest.mark.parametrize("line", ["cd /home/me/mine", "  cd ~/mine", 'srun python "/a/train.py" --lr 1'])
def test_submit_names_a_line_that_leaves_the_snapshot(
    line: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "own.sbatch").write_text(f"#SBATCH --nodes=1\n# cd /no\ncd src; cd $SLURM_SUBMIT_DIR\n{line}\n")
    assert main(["submit", "--dry-run", "own.sbatch"]) == 0
    assert "from there the job runs no files of the snapshot" in capfd.readouterr().out
    (mine / "own.sbatch").write_text("#SBATCH --nodes=1\n# cd /no\ncd src; cd $SLURM_SUBMIT_DIR\n")
    assert main(["submit", "--dry-run", "own.sbatch"]) == 0
    assert "from there" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.sbatch"], "submit: FILE must be a launch file in this folder, got gone.sbatch."),
        (["../mine2/x.sbatch"], "submit: FILE must be a launch file in this folder, got ../mine2/x.sbatch."),
        (["train.py"], "submit: FILE must be a batch file, a compose file or a manifest of a job, got train.py."),
        (["own.sbatch", "--lr", "1"], 'own.sbatch: it must pass "$@" to the script, got none.'),
        (["own.yaml", "--lr"], "own.yaml: its command must end in ${ARGS:-}, got none."),
        (["--host", "login", "job.yaml"], "submit: --host must come with Slurm or compose, got job.yaml."),
        (["--host", "a b", "job.sbatch"], "--host must be a host as for ssh, or HOST:FOLDER, got a b."),
        (["--host", "ssh://login", "job.sbatch"], "--host must be a host as for ssh, or HOST:FOLDER, got ssh://login."),
        (["--host", "x:~you/a", "job.sbatch"], "--host must be a host as for ssh, or HOST:FOLDER, got x:~you/a."),
        (["out.sbatch"], "submit: out must be a link inside this folder, got one to /etc."),
        ([], "FILE must be given."),
    ],
)
def test_submit_mistakes_are_one_line(
    words: list[str], message: str, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "own.sbatch").write_text("#!/bin/sh\n#SBATCH --nodes=1\nrun\n")
    (mine / "own.yaml").write_text("services: {}\n")
    (mine / "job.yaml").write_text("kind: Job\n")
    if "out.sbatch" in words:
        (mine / "out.sbatch").write_text("#SBATCH --nodes=1\n")
        (mine / "out").symlink_to("/etc")
    assert main(["submit", *words]) == 2
    said = capfd.readouterr()
    assert message in said.err + said.out
    assert "Traceback" not in said.err
    assert not (mine / ".rankup").exists()


def test_submit_without_the_tool_says_so(
    mine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "job.yaml").write_text("kind: Job\n")
    monkeypatch.setenv("PATH", str(mine / "bin"))
    for words, tool in ((["job.yaml"], "kubectl"), (["--host", "a", "job.sbatch"], "ssh")):
        assert main(["submit", *words]) == 2
        assert f"submit: {tool} must be installed here, got none." in capfd.readouterr().err


def test_launch_in_a_snapshot_imports_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install -e .` made the environment import the package from the folder of the user."""
    here = tmp_path / "mine/.rankup/abc"
    (here / "src").mkdir(parents=True)
    (here / ".rankup.json").write_text("{}")
    made = tmp_path / "site/mine-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Name: mine\nVersion: 1\n")
    (made / "direct_url.json").write_text(f'{{"dir_info": {{"editable": true}}, "url": "file://{tmp_path}/mine"}}')
    monkeypatch.setattr(sys, "path", [str(made.parent)])
    monkeypatch.setenv("PYTHONPATH", "/before")
    own_code_first(tmp_path / "mine")
    assert os.environ["PYTHONPATH"] == "/before"
    own_code_first(here)
    assert os.environ["PYTHONPATH"] == f"{here}/src:{here}:/before"


@pytest.mark.parametrize(
    ("given", "folder"), [("a", "mine"), ("a:", "mine"), ("a:~", "."), ("a:~/", "."), ("a:~/b", "b"), ("a:/b", "/b")]
)
def test_host_names_a_folder_as_a_shell_would(given: str, folder: str, mine: Path) -> None:
    assert Machine(given).folder == folder
