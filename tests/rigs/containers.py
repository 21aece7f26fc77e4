"""Real containers for tests: a compose project per test, killed from outside as by a crash, then removed."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rankup.files import IN_IMAGE
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import FOREIGN, ROOT, environ_of, last_step, result, wait_for

# Variables of compose.yaml that a user's shell or .env may set
SETTINGS = ("ARGS", "NNODES", "NPROC", "RUNS", "IMAGE", "TARGET", "TMP", "MEMORY", "RESTART", "COMPOSE_PROFILES",
            "COMPOSE_FILE", "CONTEXT")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not FOREIGN.match(k) and k not in SETTINGS}
    # Warnings are errors only in the Python programs that the tests start themselves
    clean.pop("PYTHONWARNINGS", None)
    return clean | {"DOCKER_CLI_HINTS": "false"} | dict(extra or {})


def docker(*words: str | Path, check: bool = True, timeout_s: float = 400, **env: str) -> str:
    """Return the output of `docker WORDS`, errors included. A failure fails the test, unless `check` is False."""
    done = subprocess.run(["docker", *map(str, words)], env=clean_environment(env), cwd=ROOT, text=True,
                          timeout=timeout_s, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          check=False)
    assert done.returncode == 0 or not check, f"docker {' '.join(map(str, words))}: {done.returncode}\n{done.stdout}"
    return done.stdout


def why_not() -> str:
    """Return why container tests can't run here, and the way out, or "" if they can."""
    has_docker = any((Path(folder) / "docker").exists() for folder in os.environ["PATH"].split(":"))
    compose = ["docker", "compose", "version"]
    if not has_docker or subprocess.run(compose, capture_output=True, check=False).returncode != 0:
        return "no container engine with Compose v2 here: docker/host/setup.sh installs one"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "the container engine does not answer: docker/host/setup.sh starts it or says why"
    if os.geteuid() != 0:
        return "killing a container's processes from outside takes root: run the tests with sudo"
    return ""


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a process that trains, or None for any other process and one that has just ended."""
    with contextlib.suppress(psutil.Error):
        named = re.fullmatch(r"rank (\d+)", process.name())
        if named:  # a forked rank of an agent: its command line is the fork server's. Its workers have its name
            parent = process.parent()
            return int(named[1]) if parent is not None and parent.name() != process.name() else None
        env, parent = environ_of(process.pid), process.parent()
        if "TORCHELASTIC_RUN_ID" in env and "TORCHELASTIC_RUN_ID" not in environ_of(parent.pid if parent else 0):
            return int(env["RANK"])  # a rank started as a new interpreter. Its workers have its variables
        words = process.cmdline()
        others = {"launch", "torch.distributed.run"} & set(words)
        if "train" in words and not others and "python" in Path(words[0]).name:
            number = environ_of(process.pid).get("RANK", "")
            return int(number) if number else None
    return None


class Project:
    """One compose project. `runs` is a folder on the host to which the nodes write. `add`: the words of a `rankup add
    compose` whose file it uses instead of compose.yaml, in the folder `where`."""

    def __init__(self, folder: Path, *, add: str = "", where: Path = ROOT, **env: str) -> None:
        self.name = f"rankup-test-{secrets.token_hex(4)}"
        self.folder, self.runs = folder, folder / "runs"
        self.env = {"RUNS": str(self.runs), "RESTART": "on-failure:50", **env}
        self.files = ["-f", str(ROOT / "compose.yaml")]
        if add:
            image = "--name rankup --image rankup:runtime --base none"
            words = [sys.executable, "-m", "rankup", "add", "compose", "--stdout", *f"{image} {add}".split()]
            self.files = ["-f", str(folder / "compose.yaml")]
            done = subprocess.run(words, cwd=where, stdout=subprocess.PIPE, check=True)
            (folder / "compose.yaml").write_bytes(done.stdout)

    def add(self, name: str) -> None:
        """Also use this file of docker/, such as compose.nodes.yaml."""
        self.files += ["-f", str(ROOT / "docker" / name)]

    def override(self, text: str) -> None:
        """Add a compose file with this text, which overrides the others."""
        path = self.folder / f"override-{len(self.files)}.yaml"
        path.write_text(text)
        self.files += ["-f", str(path)]

    def slow(self, *nodes: str) -> None:
        """Let these nodes (default: node0 and node1) find the workload slow_steps:build."""
        mount = f"{ROOT}/tests/rigs/slow_steps.py:{IN_IMAGE}/slow_steps.py:ro"
        self.override(json.dumps({"services": {node: {"volumes": [mount]} for node in nodes or ("node0", "node1")}}))

    def compose(self, *words: str, check: bool = True, timeout_s: float = 400, **env: str) -> str:
        # An empty file of variables, because this checkout's .env belongs to its user
        options = ["--env-file", os.devnull, "--project-directory", str(ROOT), "-p", self.name, *self.files]
        return docker("compose", *options, *words, check=check, timeout_s=timeout_s, **{**self.env, **env})

    def up(self, *nodes: str, **env: str) -> None:
        """Start these nodes (default: all) and return."""
        self.env |= env
        self.compose("up", "-d", "--no-build", *nodes)

    def stop(self, *nodes: str) -> None:
        self.compose("stop", *nodes)

    def logs(self) -> str:
        return self.compose("logs", "--no-log-prefix", check=False)

    # Containers ---------------------------------------------------------------------------------------------------

    def inspect(self, node: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", f"{self.name}-{node}-1"))[0]
        return found

    def state(self, node: str) -> dict[str, Any]:
        state: dict[str, Any] = self.inspect(node)["State"]
        return state

    def codes(self, *nodes: str, timeout_s: float = 600) -> list[int]:
        """Wait until these nodes (default: node0 and node1) have ended for good. Return their exit codes."""
        nodes = nodes or ("node0", "node1")
        wait_for(
            f"end of {nodes}", lambda: all(self.state(node)["Status"] == "exited" for node in nodes),
            timeout_s=timeout_s, log=self.logs,
        )
        return [self.state(node)["ExitCode"] for node in nodes]

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the processes of this node that train, as the host sees them, oldest first."""
        init = self.state(node)["Pid"]
        children = psutil.Process(init).children(recursive=True) if init else []
        return [process for process in children if rank_of(process) is not None]

    def kill_rank(self, node: str, *, step: int = 0) -> None:
        """Send SIGKILL to one process that trains, at this step of the run "job". Find the process before that step:
        the engine's answer may take longer than the rest of the run."""
        rank = wait_for(f"a rank in {node}", lambda: self.ranks(node), log=self.logs)[0]
        self.wait_for_step("job", step)
        rank.send_signal(signal.SIGKILL)

    def kill_container(self, node: str, *, step: int = 0) -> None:
        """Send SIGKILL to the container's first process from outside: the kernel ends all others, and the engine sees a
        crash. After `docker kill` the engine would not restart the container, as after a user's request."""
        pid = wait_for(f"{node} running", lambda: self.state(node)["Pid"], log=self.logs)
        self.wait_for_step("job", step)
        os.kill(pid, signal.SIGKILL)

    # Runs ---------------------------------------------------------------------------------------------------------

    def step(self, run: str) -> int:
        return last_step(self.runs / run)

    def wait_for_step(self, run: str, step: int, *, timeout_s: float = 600) -> None:
        wait_for(f"step {step} of {run}", lambda: self.step(run) >= step, timeout_s=timeout_s, log=self.logs)

    def result(self, run: str) -> dict[str, Any]:
        return result(self.runs / run)

    def remove(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "0", check=False)


def digest_by_forks(forks: Forks, folder: Path, job: str, *, nproc: int = 2) -> str:
    """Return the digest of forked ranks of this machine: tests/promises/test_parity.py shows that all launchers give
    the same digest. The run in `job` is named "job"."""
    codes, output = forks.run("train", *job.split(), "--run-dir", folder, world_size=nproc, timeout_s=600)
    assert codes == [0] * nproc, output
    return str(result(folder / "job")["digest"])


def warned(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the warnings of a doctor's report, except those on link speeds, which vary with the load."""
    bad = [found for found in report["findings"] if found["level"] != "ok"]
    assert report["exit_code"] == (10 if bad else 0), report
    return [found for found in bad if found["stage"] != "links"]


@contextmanager
def project(folder: Path, *, add: str = "", where: Path = ROOT, **env: str) -> Iterator[Project]:
    """A project whose containers, networks and volumes are always removed."""
    made = Project(folder, add=add, where=where, **env)
    try:
        yield made
    finally:
        made.remove()
