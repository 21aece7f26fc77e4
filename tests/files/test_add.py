"""`rankup add` writes launch files into a repository that it does not know, and never over a file of the user's."""

import json
import os
import shlex
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from rankup import cli
from rankup.files.add import rendered_again
from rankup.files.repository import find_origin, find_packages
from tests.rigs.jobs import ROOT

DDP = "import torch.distributed\n"


class Distribution(metadata.Distribution):
    """An installed rankup. `direct_url`: where the installer says it came from, or None for an index."""

    def __init__(self, direct_url: dict | None = None) -> None:
        self.direct_url = direct_url

    def read_text(self, filename: str) -> str | None:
        if filename == "direct_url.json":
            return json.dumps(self.direct_url) if self.direct_url else None
        return "Name: rankup\nVersion: 1.2.3\n" if filename == "METADATA" else None

    def locate_file(self, path: os.PathLike[str] | str) -> Path:
        raise NotImplementedError


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository, the current folder. rankup came from an index."""
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "train.py").write_text(DDP)
    (folder / "requirements.txt").write_text("torch==2.14.1\npandas\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    for name in ("LOADEDMODULES", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    return folder


def add(capsys: pytest.CaptureFixture[str], line: str, *, code: int = 0) -> str:
    """Run `rankup add LINE`. Return what it says."""
    found = cli.main(["add", *shlex.split(line)])
    said = "".join(capsys.readouterr())
    assert found == code, said
    return said


def test_add_writes_files_for_all_launchers_with_the_command_that_made_them(repository: Path, capsys) -> None:
    said = add(capsys, "compose slurm k8s train.py --lr 0.1")
    made = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    assert made - {"train.py", "requirements.txt"} >= {
        "Dockerfile", ".dockerignore", "compose.yaml", "train.sbatch", "k8s/train.yaml",
    }
    for name in ("Dockerfile", ".dockerignore", "compose.yaml", "train.sbatch", "k8s/train.yaml"):
        assert "# rankup add compose slurm k8s train.py --lr 0.1\n" in (repository / name).read_text()
        assert f"wrote {name}" in said
    assert "name  my-model" in said  # a name that Kubernetes takes
    assert "pip install -r requirements.txt" in (repository / "Dockerfile").read_text()
    assert "pip install rankup==1.2.3" in (repository / "Dockerfile").read_text()
    compose = yaml.safe_load((repository / "compose.yaml").read_text())
    assert {"node0", "node1", "prepare"} == set(compose["services"])
    assert "rankup launch train.py --lr 0.1" in (repository / "train.sbatch").read_text()
    assert "docker compose up --build" in said.split("next:")[1]


def test_add_leaves_a_file_that_exists_and_shows_the_difference(repository: Path, capsys) -> None:
    (repository / "compose.yaml").write_text("services: {}\n")
    said = add(capsys, "compose train.py")
    assert (repository / "compose.yaml").read_text() == "services: {}\n"
    assert "compose.yaml exists: left as it is (compare: rankup add --diff compose train.py)" in said
    assert "-services: {}" in add(capsys, "--diff compose train.py")


def test_diff_alone_renders_each_file_again_from_its_header(repository: Path, capsys) -> None:
    add(capsys, "compose slurm train.py --lr 0.1")
    assert "no launch file differs" in add(capsys, "--diff")
    batch = repository / "train.sbatch"
    batch.write_text(batch.read_text().replace("--nodes=2", "--nodes=3"))
    said = add(capsys, "--diff")
    assert "-#SBATCH --nodes=3" in said
    assert "+#SBATCH --nodes=2" in said
    assert "Dockerfile" not in said


def test_stdout_writes_nothing(repository: Path, capsys) -> None:
    before = sorted(repository.iterdir())
    assert add(capsys, "slurm --stdout train.py").startswith("#!/usr/bin/env bash")
    assert sorted(repository.iterdir()) == before


def test_options_reach_the_files(repository: Path, capsys, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (repository / "points").mkdir()
    add(capsys, f"compose slurm --nodes 2:4 --gpus 2 --name mine --data points --data {tmp_path}/shared train.py")
    node = yaml.safe_load((repository / "compose.yaml").read_text())["services"]["node3"]
    assert node["command"].split()[-3:-1] == ["2:4", "train.py"]
    assert node["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["6", "7"]
    mounts = {each["source"]: each["target"] for each in node["volumes"] if each.get("read_only")}
    assert mounts == {"./points": "/".join(["", "work", "points"]), f"{tmp_path}/shared": f"{tmp_path}/shared"}
    batch = (repository / "train.sbatch").read_text()
    assert "#SBATCH --nodes=2-4\n" in batch
    assert "\n#SBATCH --gpus-per-node=2 " in batch
    assert "launch --nnodes 2:4 train.py" in batch
    assert "\npoints\n" in (repository / ".dockerignore").read_text()


def test_words_keep_their_quotes_and_dollars_in_each_file(repository: Path, capsys) -> None:
    add(capsys, "compose slurm train.py --note 'a b' '$HOME'")
    command = yaml.safe_load((repository / "compose.yaml").read_text())["services"]["node0"]["command"]
    assert "train.py --note 'a b' '$$HOME'" in command  # compose reads $$ as $
    assert "train.py --note 'a b' '$HOME'" in (repository / "train.sbatch").read_text()
    assert '"--note", "a b", "$HOME"' in (repository / "Dockerfile").read_text()


def test_an_own_dockerfile_stays_and_becomes_the_base(repository: Path, capsys) -> None:
    (repository / "Dockerfile").write_text("FROM scratch\n")
    said = add(capsys, "compose train.py")
    assert (repository / "Dockerfile").read_text() == "FROM scratch\n"
    assert "ARG BASE_IMAGE=my-model-base\n" in (repository / "Dockerfile.rankup").read_text()
    assert "docker build -t my-model-base . && docker compose up --build" in said


@pytest.mark.parametrize(("files", "expected", "said"), [
    ({"uv.lock": '[[package]]\nname = "torch"\n', "pyproject.toml": '[project]\nname = "x"\n', "requirements.txt": "a"},
     "uv sync --frozen", "from uv.lock, not from requirements.txt"),
    ({"pylock.toml": '[[packages]]\nname = "torch"\n', "requirements.txt": "a"}, "-r pylock.toml", "from pylock.toml"),
    ({"requirements.txt": "torch\n-r more/base.txt\n", "more/base.txt": "pandas"}, "-r requirements.txt", ""),
    ({"requirements.txt": "torch\n-e .\n", "setup.py": ""}, "-r requirements.txt", "installs from this folder"),
    ({"pyproject.toml": '[project]\nname = "x"\ndependencies = ["torch>2"]\n'}, "-r /tmp/list", "from pyproject.toml"),
    ({"pyproject.toml": "[tool.ruff]\n", "setup.py": ""}, "install .", "from setup.py"),
    ({"environment.yml": ""}, "", "pip can't install environment.yml"),
    ({}, "", "no list of packages"),
])
def test_packages_come_from_the_first_list(tmp_path: Path, files: dict[str, str], expected: str, said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = find_packages(tmp_path)
    assert expected in " && ".join(found.install)
    assert any(said in note for note in found.notes), found.notes
    if "more/base.txt" in files:
        assert found.copies == {".": ["requirements.txt"], "more": ["more/base.txt"]}
        assert {"torch", "pandas"} == found.names


@pytest.mark.parametrize(("direct_url", "expected"), [
    (None, "rankup==1.2.3"),
    ({"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}}, "rankup @ git+https://host/r.git@a1"),
    ({"url": "https://host/rankup-1.whl", "archive_info": {}}, "rankup @ https://host/rankup-1.whl"),
])
def test_an_image_gets_rankup_from_where_it_came(direct_url: dict | None, expected: str) -> None:
    assert find_origin(Distribution(direct_url)).requirement == expected


def test_a_wheel_of_rankup_is_put_beside_the_dockerfile(repository: Path, capsys, tmp_path: Path, monkeypatch) -> None:
    wheel = tmp_path / "rankup-1.2.3-py3-none-any.whl"
    wheel.write_bytes(b"\x00\xff")
    came_from = Distribution({"url": wheel.as_uri(), "archive_info": {}})
    monkeypatch.setattr(metadata, "distribution", lambda name: came_from)
    add(capsys, "compose train.py")
    assert (repository / wheel.name).read_bytes() == b"\x00\xff"
    assert f"COPY {wheel.name} /tmp/" in (repository / "Dockerfile").read_text()
    wheel.unlink()
    assert "the wheel of rankup must still be at" in add(capsys, "compose train.py", code=2)


@pytest.mark.parametrize(("line", "said"), [
    ("compose", "SCRIPT must be given"),
    ("compose trian.py", "must be an existing file, got trian.py. Did you mean train.py?"),
    ("compose ../other.py", "must be in this folder"),
    ("compose -m no.module", "-m must name a module"),
    ("slurm train.py --gpus 8", "--gpus must stand before train.py"),
    ("compose --data nowhere train.py", "--data must be an existing folder"),
    ("compose --data . train.py", "--data must not be this folder"),
    ("compose --base . train.py", "--base . must come with a Dockerfile"),
    ("compose --kind x train.py", "--kind"),
    ("compose --requirements no.txt train.py", "--requirements must be a file"),
    ("compose slurm --file x train.py", "--file must come with one kind"),
])
def test_a_mistake_is_one_line_and_writes_nothing(repository: Path, capsys, line: str, said: str) -> None:
    (repository.parent / "other.py").write_text("")
    before = sorted(repository.iterdir())
    text = add(capsys, line, code=2)
    assert said in text
    assert text.count("\n") == 1
    assert sorted(repository.iterdir()) == before


@pytest.mark.parametrize("line", ["../lib", "-e ../lib", "-r missing.txt", "./missing.whl"])
def test_a_requirement_that_no_image_can_have_is_one_line(repository: Path, capsys, line: str) -> None:
    (repository / "requirements.txt").write_text(f"torch\n{line}\n")
    assert "requirements.txt: a path must" in add(capsys, "compose train.py", code=2)


def test_an_option_of_the_script_may_have_the_name_of_one_of_add(repository: Path, capsys) -> None:
    (repository / "train.py").write_text(DDP + "parser.add_argument('--name')\n")
    add(capsys, "slurm train.py --name x")
    assert "launch train.py --name x" in (repository / "train.sbatch").read_text()


def test_a_windows_path_is_corrected(repository: Path, capsys) -> None:
    (repository / "src").mkdir()
    (repository / "src" / "go.py").write_text(DDP)
    assert "is written with /" in add(capsys, r"slurm 'src\go.py'")
    assert "launch src/go.py" in (repository / "go.sbatch").read_text()


def test_all_files_are_written_or_none(repository: Path, capsys, monkeypatch) -> None:
    """The last file can't be written: its folder is a file."""
    (repository / "k8s").write_text("")
    said = add(capsys, "compose slurm k8s train.py", code=2)
    assert "No file was written" in said
    assert not (repository / "Dockerfile").exists()
    assert not (repository / "train.sbatch").exists()


def test_a_script_whose_ranks_would_train_alone_is_said(repository: Path, capsys) -> None:
    (repository / "train.py").write_text("import torch\nfrom helper import x\n")
    (repository / "helper.py").write_text("import torch\n")
    assert "names no torch.distributed" in add(capsys, "slurm train.py")
    assert "names no torch.distributed" not in add(capsys, "slurm --stdout --nodes 1 train.py")
    (repository / "helper.py").write_text(DDP)
    assert "names no torch.distributed" not in add(capsys, "compose train.py")


def test_an_environment_that_is_active_is_activated_in_a_batch_job(repository: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "cuda/13.0:python/3.11")
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "torch")
    monkeypatch.setenv("CONDA_EXE", "/apps/conda/bin/conda")
    text = add(capsys, "slurm --stdout train.py")
    assert "module load cuda/13.0 python/3.11" in text
    assert "/apps/conda/etc/profile.d/conda.sh" in text
    assert "conda activate torch" in text


def test_own_launch_files_are_what_add_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("LOADEDMODULES", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    again = dict(rendered_again(Path(), cli.COMMANDS["add"].parse))
    assert Path("slurm/ddp.sbatch") in again
    for path, text in again.items():
        assert path.read_text() == text, path
