"""`rankup add` writes launch files into a repository that it does not know, and never over a file of the user's."""

import errno
import json
import os
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from rankup import cli
from rankup.errors import UserError
from rankup.files import IN_IMAGE, JOB_KINDS
from rankup.files.add import rendered_again
from rankup.files.repository import find_origin, find_packages, python_minor
from tests.rigs.jobs import ROOT

DDP = "import torch.distributed\n"
CONDA = 'eval "$(conda shell.bash hook)" && conda activate '


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
    forget_environments(monkeypatch)
    return folder


def forget_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as if no module is loaded and no environment is active, for a user with the id 1000."""
    for name in ("LOADEDMODULES", "CONDA_DEFAULT_ENV", "CONDA_EXE", "MAMBA_EXE", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 1000)


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
    compare = "compare: rankup add --diff compose train.py; another file: --file FILE"
    assert f"compose.yaml exists: left as it is ({compare})" in said
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
    ({"pyproject.toml": "[tool.ruff]\n", "setup.py": ""}, "install -e .", "from setup.py"),
    ({"environment.yml": ""}, "", "pip can't install environment.yml"),
    ({"a/requirements.txt": "", "b/requirements.txt": ""}, "", "give --requirements b/requirements.txt"),
    ({"requirements.txt": "\ufefftorch\n", "requirements-train.txt": ""}, "", "not from requirements-train.txt"),
    ({"uv.lock": "", "pyproject.toml": '[project.optional-dependencies]\ncpu = []\ngpu = []\n'}, "",
     "without the extras cpu, gpu"),
    ({}, "", "no list of packages"),
])
def test_packages_come_from_the_first_list(tmp_path: Path, files: dict[str, str], expected: str, said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = find_packages(tmp_path, near="b")
    assert expected in " && ".join(found.install)
    assert any(said in note for note in found.notes), found.notes
    if "requirements-train.txt" in files:
        assert found.names == {"torch"}  # without the mark of UTF-8 that Windows writes
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
    ("compose --kind jobset train.py", "--kind must come with k8s"),
    ("compose slurm --file x train.py", "--file must come with one kind"),
    ("slurm --file ../train.sbatch train.py", "--file must be a path inside this folder"),
    ("compose --output /scratch train.py", "--output must be a path inside this folder"),
    ("compose --extra gpu train.py", "--extra must come with"),
    ("k8s --data a/images --data b/images train.py", "--data must name folders of different names"),
    ("compose run.sh", "must be a Python file, got run.sh. Name the one that it starts: train.py"),
    ("compose folder.py", "must be an existing file, got folder.py."),
    ("compose --image 'a b' train.py", "--image must be the name of an image, got a b."),
    ("compose --base 'a\nRUN b' train.py", "each word must be on one line"),
    ("compose --name 'a\nb' train.py", "each word must be on one line"),
    ("compose --dockerfile ../Dockerfile train.py", "--dockerfile must be a path inside this folder"),
    ("compose --data a --output a train.py", "--output must not be a folder of --data"),
])
def test_a_mistake_is_one_line_and_writes_nothing(repository: Path, capsys, line: str, said: str) -> None:
    (repository.parent / "other.py").write_text("")
    (repository / "run.sh").write_text("torchrun --nproc-per-node 8 train.py --lr 0.1\n")
    for folder in ("a/images", "b/images", "folder.py"):
        (repository / folder).mkdir(parents=True)
    before = sorted(repository.iterdir())
    text = add(capsys, line, code=2)
    assert said in text
    assert text.count("\n") == 1
    assert sorted(repository.iterdir()) == before


@pytest.mark.parametrize(("files", "expected"), [
    ({"uv.lock": '[[package]]\nname = "torch"\n'}, "uv sync --frozen --inexact --no-dev --extra gpu --extra io"),
    ({}, "*p['optional-dependencies']['gpu'], *p['optional-dependencies']['io'], sep=chr(10))"),
])
def test_extras_of_the_project_are_installed(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    project = '[project]\nname = "x"\n[project.optional-dependencies]\ngpu = ["torch"]\nio = ["h5py"]\n'
    for name, text in {"pyproject.toml": project, **files}.items():
        (tmp_path / name).write_text(text)
    found = find_packages(tmp_path, extras=["gpu", "io"])
    assert expected in " ".join(found.install)
    assert "torch" in (found.names or ())
    with pytest.raises(UserError, match="--extra must be one of gpu, io, got no"):
        find_packages(tmp_path, extras=["no"])


@pytest.mark.parametrize(("files", "expected"), [
    ({"setup.py": ""}, "python -m pip install --no-deps -e ."),
    ({"pyproject.toml": '[build-system]\nrequires = ["setuptools-scm"]\n'},  # .git, which has the version, is left out
     "SETUPTOOLS_SCM_PRETEND_VERSION=0 python -m pip install --no-deps -e ."),
])
def test_a_project_beside_its_requirements_is_installed_in_place(tmp_path: Path, files: dict, expected: str) -> None:
    for name, text in {"requirements.txt": "torch\n", **files}.items():
        (tmp_path / name).write_text(text)
    assert find_packages(tmp_path).project == [expected]


@pytest.mark.parametrize(("requires", "running", "expected"), [
    ("", 11, 11), (">=3.10", 11, 11), (">=3.12", 11, 12), ("~=3.12.0", 13, 12), ("==3.10.*", 11, 10), ("<3.11", 11, 10),
    (">=3.8, <3.13", 14, 12), ("<=3.12", 13, 12), ("~=3.10", 13, 13), ("<3.12.4", 13, 12), ("!=3.9.*,>=3.9", 8, 9),
])
def test_the_image_has_a_python_that_the_project_allows(requires: str, running: int, expected: int) -> None:
    assert python_minor(requires, running) == expected


def test_an_image_has_git_if_a_package_comes_from_a_repository(repository: Path, capsys) -> None:
    assert "apt-get" not in add(capsys, "compose --diff train.py")
    (repository / "requirements.txt").write_text("torch\nclip @ git+https://example.org/clip.git@a1b2\n")
    assert "--no-install-recommends git \\" in add(capsys, "compose --diff train.py")


def test_a_folder_that_the_script_writes_is_the_runs_in_an_image(repository: Path, capsys) -> None:
    """An own .dockerignore may let runs/ into the image, where a link inside of it would catch no write."""
    (repository / ".dockerignore").write_text(".git\n")
    (repository / "runs").mkdir()
    said = add(capsys, "compose --output logs/out train.py")
    assert "your .dockerignore does not name runs:" in said
    dockerfile = (repository / "Dockerfile").read_text()
    assert "rm -rf runs && ln -s /runs runs" in dockerfile
    assert "mkdir -p logs && rm -rf logs/out && ln -s /runs logs/out" in dockerfile


def test_what_an_image_would_lack_or_carry_in_vain_is_said(repository: Path, capsys, tmp_path: Path) -> None:
    (tmp_path / "imagenet").mkdir()
    (repository / "linked").symlink_to(tmp_path / "imagenet")
    (repository / "cached").mkdir()
    (repository / "loop").symlink_to("loop")
    (repository / "round").symlink_to(f"../{repository.name}/train.py")
    with (repository / "cached" / "train.bin").open("wb") as file:
        file.truncate(2 * 10**9)  # sparse
    (repository / "lib").mkdir()
    (repository / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n\turl = x\n')
    (repository / "docker").mkdir()
    (repository / "docker" / "Dockerfile.gpu").write_text("FROM scratch\n")
    (repository / "train.py").write_text(DDP + "import hydra\n")
    said = add(capsys, f"compose train.py --path={tmp_path}/imagenet")
    assert f"linked is a link to {tmp_path}/imagenet, which no image has: give --data linked" in said
    assert f"round is a link to {repository}/train.py, which no image has" in said
    assert "cached has more than 1 GB, which the image would carry: give --data cached" in said
    assert f"{tmp_path}/imagenet is not in the image: give --data {tmp_path}/imagenet" in said
    assert "lib: empty, as submodules are" in said
    assert "docker/Dockerfile.gpu is here" in said
    (repository / "round").unlink()
    assert "Hydra writes to outputs/" in said
    said = add(capsys, f"compose --data linked --data cached --data {tmp_path}/imagenet --output outputs train.py "
                       f"{tmp_path}/imagenet")
    assert "give --data" not in said
    assert "Hydra" not in said


@pytest.mark.parametrize(("files", "script", "roots"), [
    ({"scripts/fit.py": "from net import model\n", "net/model.py": ""}, "scripts/fit.py", ["", "/src"]),
    ({"scripts/fit.py": "import helper as h\n", "helper.py": ""}, "scripts/fit.py", ["", "/src"]),
    ({"scripts/fit.py": "import torch\n"}, "scripts/fit.py", ["/src"]),
    ({"train.py": "import helper\n", "helper.py": ""}, "train.py", ["/src"]),
    ({"train.py": "", "src/__init__.py": ""}, "train.py", []),  # src is the package itself
    ({"src/net/fit.py": ""}, "-m net.fit", ["/src"]),
    # pip installs src/, but perhaps not what else lies in the folder
    ({"scripts/fit.py": "from net import model\n", "net/model.py": "", "setup.py": ""}, "scripts/fit.py", [""]),
])
def test_a_script_finds_the_modules_of_the_folder_in_an_image_and_on_slurm(
    repository: Path, capsys, files: dict[str, str], script: str, roots: list[str]
) -> None:
    for name, text in {"src/other.py": "", **files}.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(DDP + text)
    for kind, folder in (("compose", IN_IMAGE), ("slurm", "$PWD")):
        made = [line for line in add(capsys, f"{kind} --diff {script}").splitlines() if "PYTHONPATH=" in line]
        expected = "PYTHONPATH=" + ":".join(f"{folder}{root}" for root in roots) + "${PYTHONPATH:+:$PYTHONPATH}"
        assert [line.split()[-1] for line in made] == ([expected] if roots else []), made


@pytest.mark.parametrize(("dockerfile", "line"), [
    ("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n", "docker build --build-arg BASE_IMAGE=VALUE -t my-model-base ."),
    ("ARG TAG\nFROM --platform=$BUILDPLATFORM repo/torch:$TAG as x\nFROM x\n", "docker build --build-arg TAG=VALUE -t"),
    ("ARG TAG=1\nARG ROOT\nFROM torch:${TAG}-x\nARG NAME\nFROM ${ROOT:-debian}\n", "docker build -t my-model-base ."),
])
def test_values_that_an_own_dockerfile_needs_are_in_the_next_line(
    repository: Path, capsys, dockerfile: str, line: str
) -> None:
    (repository / "Dockerfile").write_text(dockerfile)
    said = add(capsys, "compose train.py")
    assert f"  {line}" in said
    assert ("replace each VALUE below" in said) is ("VALUE" in line)


def test_nothing_is_said_of_a_dockerignore_that_names_what_the_image_has(repository: Path, capsys) -> None:
    (repository / ".dockerignore").write_text("*\n!train.py\n!requirements.txt\n")
    (repository / "runs").mkdir()
    (repository / "cached").mkdir()
    with (repository / "cached" / "train.bin").open("wb") as file:
        file.truncate(2 * 10**9)
    assert "files  " not in add(capsys, "compose train.py")


def test_k8s_says_what_the_next_line_needs(repository: Path, capsys) -> None:
    (repository / "Dockerfile").write_text("FROM scratch\n")
    said = add(capsys, "k8s --gpus 8 train.py")
    assert "docker build -t my-model-base . && docker build -f Dockerfile.rankup" in said.split("next:")[1]
    assert "my-model is in no registry" in said
    assert "in no registry" not in add(capsys, "k8s --image host/me/mine:1 train.py")
    assert 'requests: {cpu: "32", memory: 128Gi}' in (repository / "k8s" / "train.yaml").read_text()
    (repository / "tune.py").write_text(DDP)
    assert "train.yaml makes a job my-model too: give --name" in add(capsys, "k8s tune.py")
    assert "makes a job" not in add(capsys, "k8s --name tune --file k8s/other.yaml tune.py")


def test_compose_says_how_many_gpus_one_machine_needs(repository: Path, capsys) -> None:
    assert "compose.yaml takes 16 GPUs of one machine" in add(capsys, "compose --gpus 8 train.py")
    assert "of one machine" not in add(capsys, "compose --nodes 1 --gpus 8 train.py")


def test_the_command_of_a_project_is_named_by_its_module(repository: Path, capsys) -> None:
    (repository / "pyproject.toml").write_text('[project]\nname = "x"\n[project.scripts]\nfit = "net.fit:main"\n')
    assert "Did you mean -m net.fit?" in add(capsys, "compose fit", code=2)


@pytest.mark.parametrize(("header", "said"), [
    ('slurm --gpus "8 train.py', "No closing quotation"),
    ("slurm --frob train.py", 'unknown argument "--frob"'),
    ("slurm gone.py", "must be an existing file, got gone.py"),
])
def test_a_header_that_is_no_command_is_named_with_its_file(repository: Path, capsys, header: str, said: str) -> None:
    (repository / "mine.sbatch").write_text(f"#!/bin/bash\n# rankup add {header}\n")
    text = add(capsys, "--diff", code=2)
    assert text.startswith("error: mine.sbatch: its header must be a command that works")
    assert said in text


def test_files_of_others_do_not_stop_a_comparison(repository: Path, capsys) -> None:
    (repository / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (repository / "folder.yaml").mkdir()
    (repository / "dangling.yaml").symlink_to("nowhere")
    assert "no launch file differs" in add(capsys, "--diff")


def test_a_file_that_this_user_may_not_read_is_one_line(repository: Path, capsys, monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("rankup.files.repository._lines", refuse)  # root may read each file
    said = add(capsys, "compose train.py", code=2)
    assert said == "error: add: requirements.txt must be readable, got Permission denied.\n"


@pytest.mark.parametrize("text", [
    "project = 3", "tool.uv = 3", "build-system.requires = 'x'", "project.dependencies = 'torch'",
    "project.dependencies = [3]", "project.requires-python = 3", "project.optional-dependencies.gpu = 'torch'",
])
def test_a_project_file_with_a_value_of_another_kind_is_one_line(repository: Path, capsys, text: str) -> None:
    (repository / "pyproject.toml").write_text(text)
    said = add(capsys, "compose slurm train.py", code=2)
    assert said.startswith("error: pyproject.toml: ")
    assert said.count("\n") == 1


def test_what_is_no_file_stays_as_it_is(repository: Path, capsys) -> None:
    (repository / "Dockerfile").mkdir()
    (repository / "train.sbatch").mkdir()
    (repository / "compose.yaml").symlink_to("nowhere")
    said = add(capsys, "compose slurm train.py")
    for name in ("Dockerfile", "train.sbatch", "compose.yaml"):
        assert f"add: {name} exists: left as it is" in said
    assert (repository / "compose.yaml").is_symlink()
    assert "+exec rankup launch" in add(capsys, "slurm --diff train.py")


@pytest.mark.parametrize("text", ["package = 3", "[[package]]\nversion = 1"])
def test_a_lock_file_that_is_none_is_one_line(repository: Path, capsys, text: str) -> None:
    (repository / "uv.lock").write_text(text)
    assert "uv.lock must have its pyproject.toml beside it" in add(capsys, "compose train.py", code=2)
    (repository / "pyproject.toml").write_text("")
    assert "uv.lock: it must be a lock file" in add(capsys, "compose train.py", code=2)


@pytest.mark.parametrize("line", [
    "net @ file:///opt/net", "../lib", "-e ../lib", "-e lib", "-r missing.txt", "./missing.whl", "-f ../wheels",
    "-f none",
])
def test_a_requirement_that_no_image_can_have_is_one_line(repository: Path, capsys, line: str) -> None:
    (repository / "requirements.txt").write_text(f"torch\n{line}\n")
    assert "requirements.txt: a path must" in add(capsys, "compose train.py", code=2)


@pytest.mark.parametrize(("file", "text"), [
    ("uv.lock", '[[package]]\nname = "lib"\nsource = { editable = "../lib" }\n'),
    ("uv.lock", '[[package]]\nname = "lib"\nsource = { path = "/opt/lib-1-py3-none-any.whl" }\n'),
    ("pylock.toml", '[[packages]]\nname = "lib"\ndirectory = { path = "../lib" }\n'),
    ("pyproject.toml", '[project]\nname = "x"\ndependencies = ["lib[a] @ file:///opt/lib"]\n'),
])
def test_a_path_in_any_list_must_be_in_the_folder(repository: Path, capsys, file: str, text: str) -> None:
    (repository / "requirements.txt").unlink()
    (repository / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (repository / file).write_text(text)
    assert f"{file}: a path must be inside this folder" in add(capsys, "compose train.py", code=2)
    if file != "pyproject.toml":
        (repository / "lib").mkdir()
        (repository / file).write_text(re.sub('"[./opt]*/lib.*?"', '"lib"', text))
        add(capsys, "compose train.py")
        before, _, _ = (repository / "Dockerfile").read_text().partition("uv venv")
        assert "COPY . ./" in before  # the lock installs it, so it is there first


def test_what_a_list_installs_from_the_folder_is_copied_first(repository: Path, capsys) -> None:
    (repository / "wheels").mkdir()
    (repository / "requirements.txt").write_text("torch\n--find-links=wheels\nextra\n")
    assert '"--find-links=wheels" in requirements.txt installs from this folder' in add(capsys, "compose train.py")
    assert "COPY . ./\n" in (repository / "Dockerfile").read_text()


def test_a_list_that_powershell_wrote_is_read(repository: Path, capsys) -> None:
    (repository / "requirements.txt").write_text("torch==2.14.1\r\npandas\r\n", "utf-16")
    assert "does not name torch" not in add(capsys, "compose train.py")


@pytest.mark.parametrize("project", [
    '[build-system]\nrequires = ["poetry-core"]\n[tool.poetry]\nname = "x"\n',
    '[build-system]\nrequires = ["setuptools"]\n',
])
def test_a_project_whose_packages_only_its_build_system_knows_is_installed(
    repository: Path, capsys, project: str
) -> None:
    (repository / "requirements.txt").unlink()
    (repository / "pyproject.toml").write_text(project)
    (repository / "poetry.lock").touch()
    assert "packages  from pyproject.toml" in add(capsys, "compose train.py")
    assert "python -m pip install -e .\n" in (repository / "Dockerfile").read_text()


def test_paths_with_spaces_and_dollars_reach_the_files_and_the_next_lines(repository: Path, capsys) -> None:
    (repository / "my train.py").write_text(DDP)
    (repository / "my $HOME data").mkdir()
    said = add(capsys, "compose slurm k8s --data 'my $HOME data' --data './my $HOME data' 'my train.py'")
    assert "  sbatch 'my train.sbatch'\n" in said
    assert "-f 'k8s/my train.yaml'\n" in said
    node = yaml.safe_load((repository / "compose.yaml").read_text())["services"]["node0"]
    assert [each["source"] for each in node["volumes"]] == ["${RUNS:-./runs}", "./my $$HOME data"]


@pytest.mark.parametrize(("file", "line"), [
    ("train.yaml", "docker compose -f train.yaml up --build"),
    ("deploy/train.yaml", "docker compose --project-directory . -f deploy/train.yaml up --build"),
])
def test_a_compose_file_of_another_name_is_in_the_line_that_starts_it(
    repository: Path, capsys, file: str, line: str
) -> None:
    (repository / "docker-compose.yml").touch()
    assert f"  {line}\n" in (said := add(capsys, f"compose --file {file} train.py"))
    assert "docker-compose.yml" not in said
    assert f"# Run: {line} " in (repository / file).read_text()
    (repository / "compose.override.yaml").touch()
    said = add(capsys, "compose train.py")
    assert "docker-compose.yml is here: compose reads compose.yaml in its place" in said
    assert "compose.override.yaml is here: compose reads compose.yaml and then it" in said


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


def test_modules_that_are_loaded_are_loaded_in_a_batch_job(repository: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "cuda/13.0:python/3.11")
    assert "module load cuda/13.0 python/3.11" in add(capsys, "slurm --stdout train.py")


@pytest.mark.parametrize(("folders", "env", "line"), [
    ([], {}, "export PATH=$PWD/.venv/bin:$PATH"),
    (["venv"], {}, "export PATH=$PWD/venv/bin:$PATH"),
    (["my env"], {}, "export PATH=$PWD/'my env'/bin:$PATH"),
    ([".venv", "env"], {"VIRTUAL_ENV": "HERE/env"}, "export PATH=$PWD/.venv/bin:$PATH"),
    (["a", "env"], {"VIRTUAL_ENV": "HERE/env"}, "export PATH=$PWD/env/bin:$PATH"),
    (["env"], {"VIRTUAL_ENV": "/shared/my envs/x"}, "export PATH='/shared/my envs/x'/bin:$PATH"),
    (["env"], {"CONDA_DEFAULT_ENV": "base"}, "export PATH=$PWD/env/bin:$PATH"),
    ([], {"CONDA_DEFAULT_ENV": "torch"}, CONDA + 'torch'),
    (["env"], {"CONDA_DEFAULT_ENV": "torch", "CONDA_EXE": "/my apps/bin/conda"},
     """eval "$('/my apps/bin/conda' shell.bash hook)" && conda activate torch"""),
    ([], {"CONDA_DEFAULT_ENV": "HERE/envs/t"}, CONDA + './envs/t'),
    ([], {"CONDA_DEFAULT_ENV": "/shared/t"}, CONDA + '/shared/t'),
    ([], {"CONDA_DEFAULT_ENV": "t", "MAMBA_EXE": "/bin/micromamba"},
     'eval "$(/bin/micromamba shell hook --shell bash)" && micromamba activate t'),
    ([".venv/conda-meta"], {}, CONDA + './.venv'),
    (["env/conda-meta"], {"CONDA_DEFAULT_ENV": "base"}, CONDA + './env'),
    (["environment.yml: lit"], {"CONDA_DEFAULT_ENV": "base"}, CONDA + 'lit'),
    (["environment.yml: lit"], {"CONDA_DEFAULT_ENV": "torch"}, CONDA + 'torch'),
    (["environment.yml: lit", ".venv"], {}, "export PATH=$PWD/.venv/bin:$PATH"),
    (["environment.yml: lit", "env"], {}, "export PATH=$PWD/env/bin:$PATH"),
    (["environment.yaml: 'my-lit'  # ours"], {}, CONDA + 'my-lit'),
    (["environment.yml:"], {}, "export PATH=$PWD/.venv/bin:$PATH"),
])
def test_a_batch_job_gets_the_environment_of_the_repository(
    repository: Path, capsys, monkeypatch, folders: list[str], env: dict[str, str], line: str
) -> None:
    """`folders`: environments, or lists of conda with the name in them."""
    for folder in folders:
        if folder.startswith("environment"):
            file, _, name = folder.partition(":")
            (repository / file).write_text(f"name:{name}\ndependencies: [pytorch]\n")
            continue
        (repository / folder).mkdir(parents=True)
        (repository / folder / "pyvenv.cfg").touch()
    for name, text in env.items():
        monkeypatch.setenv(name, text.replace("HERE", str(repository)))
    (found,) = [each for each in add(capsys, "slurm --stdout train.py").splitlines() if "in which you" in each]
    assert found.partition("# EDIT")[0].strip() == line


def test_a_batch_job_that_activates_an_environment_of_conda_runs_its_rankup(
    repository: Path, capsys, monkeypatch, tmp_path: Path
) -> None:
    """A stand-in for conda: its hook defines a function, which puts an environment's folder first."""
    conda, rankup = tmp_path / "my apps" / "bin" / "conda", tmp_path / "envs" / "lit" / "bin" / "rankup"
    hook = f'#!/bin/sh\n[ "$1" = shell.bash ] && echo \'conda() {{ export PATH="{tmp_path}/envs/$2/bin:$PATH"; }}\'\n'
    for path, text in ((conda, hook), (rankup, '#!/bin/sh\necho "mine: $*, $PYTHONPATH"\n')):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("CONDA_EXE", str(conda))
    (repository / "environment.yml").write_text("name: lit\n")
    (repository / "src").mkdir()
    add(capsys, "slurm train.py --lr 0.1")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/theirs"}
    said = subprocess.check_output(["bash", "train.sbatch", "--more"], env=env, text=True)
    assert said == f"mine: launch train.py --lr 0.1 --more, {repository}/src:/theirs\n"


@pytest.mark.parametrize(("folder", "files"), [
    (".", {"compose.yaml", "docker/Dockerfile", "slurm/ddp.sbatch", *(f"k8s/{kind}.yaml" for kind in JOB_KINDS)}),
    ("train/examples/repository",
     {"compose.yaml", "Dockerfile", ".dockerignore", "train.sbatch", "k8s/train.yaml", "k8s/volume.yaml"}),
])
def test_own_launch_files_are_what_add_writes(monkeypatch: pytest.MonkeyPatch, folder: str, files: set[str]) -> None:
    monkeypatch.chdir(ROOT / folder)
    forget_environments(monkeypatch)
    again = dict(rendered_again(Path(), cli.COMMANDS["add"].parse))
    assert files <= {str(path) for path in again}
    for path, text in again.items():
        assert path.read_text() == text, path
