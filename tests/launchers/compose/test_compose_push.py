"""`make push` sends an image of one small layer to a real registry on loopback."""

import hashlib
import json
import secrets
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import clean_environment, docker, wait_for
from tests.rigs.jobs import ROOT, free_port

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host and port of a registry."""
    folder = tmp_path_factory.mktemp("registry")
    place = f"127.0.0.1:{free_port()}"
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{place}'}}\n"
    )
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("needs Debian's docker-registry")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "serve", folder / "config.yml"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        wait_for("the registry", lambda: _answers(place), log=(folder / "log").read_text)
        yield place
    finally:
        process.terminate()
        process.wait(60)


def _answers(place: str) -> bool:
    host, port = place.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def images() -> Iterator[list[str]]:
    """A list to which a test adds the names of its images. They are removed after the test."""
    made: list[str] = []
    yield made
    for name in made:
        docker("rmi", "-f", name, check=False)


def build(folder: Path, images: list[str], revision: str) -> str:
    name = f"rankup-test-push:{secrets.token_hex(4)}"
    (folder / "file").write_text(secrets.token_hex(1 << 15))
    labels = f"LABEL org.opencontainers.image.version=9.8.7 org.opencontainers.image.revision={revision}\n"
    (folder / "Dockerfile").write_text(f"FROM scratch\nCOPY file /\n{labels}")
    docker("build", "-q", "-t", name, folder, DOCKER_BUILDKIT="1")
    images.append(name)
    return name


def push(image: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = [ROOT / "docker" / "host" / "push.sh"]
    return subprocess.run(
        words, env=clean_environment({"IMAGE": image, **env}), capture_output=True, text=True, timeout=400, check=False,
        stdin=subprocess.DEVNULL,
    )


def fetch(registry: str, what: str) -> bytes:
    kind = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    request = urllib.request.Request(f"http://{registry}/v2/me/rankup/{what}", headers=kind)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
    return body


def test_push_puts_the_image_into_the_registry_under_its_version(
    registry: str, images: list[str], tmp_path: Path
) -> None:
    image = build(tmp_path, images, "abc123")
    pushed = f"{registry}/me/rankup:9.8.7"
    images.append(pushed)
    done = push(image, REPOSITORY=f"{registry}/me/rankup")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(fetch(registry, "tags/list")) == {"name": "me/rankup", "tags": ["9.8.7"]}
    manifest = json.loads(fetch(registry, "manifests/9.8.7"))
    assert manifest["config"]["digest"] == docker("image", "inspect", "-f", "{{.Id}}", image).strip()
    for part in [manifest["config"], *manifest["layers"]]:  # every part is there, with the right digest
        blob = fetch(registry, f"blobs/{part['digest']}")
        assert part["digest"] == f"sha256:{hashlib.sha256(blob).hexdigest()}"


def test_push_refuses_an_image_of_uncommitted_files(registry: str, images: list[str], tmp_path: Path) -> None:
    image = build(tmp_path, images, "abc123-dirty")
    done = push(image, REPOSITORY=f"{registry}/me/dirty")
    assert (done.returncode, "was built from files that are not committed" in done.stderr) == (2, True), done.stderr
    with urllib.request.urlopen(f"http://{registry}/v2/_catalog", timeout=60) as answer:
        assert "me/dirty" not in json.load(answer)["repositories"]


def test_push_without_a_repository_is_refused(images: list[str], tmp_path: Path) -> None:
    done = push(build(tmp_path, images, "abc123"))
    assert (done.returncode, "push: REPOSITORY must name the image" in done.stderr) == (2, True), done.stderr
