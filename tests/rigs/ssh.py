"""An sshd of the tests on this machine's loopback with its own keys, and an `ssh` that knows it as the host `login`."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.jobs import wait_for


class Login:
    """The host `login`. `bin` goes to the front of PATH: its `ssh` reads the tests' configuration, not the user's."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        shutil.copy(folder / "user.pub", folder / "authorized")
        variables = " ".join(f'"{name}={value}"' for name, value in env.items())
        lines = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none",
            "AuthorizedKeysFile": folder / "authorized", "StrictModes": "no", "UsePAM": "no", "PrintMotd": "no",
            "SetEnv": variables, "MaxStartups": "100",
        }
        (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self.know((folder / "host.pub").read_text())
        (folder / "ssh_config").write_text(
            f"Host login\n HostName 127.0.0.1\n Port {self.port}\n IdentityFile {folder / 'user'}\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {folder / 'known'}\n StrictHostKeyChecking yes\n"
        )
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
        (self.bin / "ssh").chmod(0o755)

    def know(self, key: str) -> None:
        """Make the client expect this key of the host."""
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {key}")


@contextmanager
def login(folder: Path, **env: str) -> Iterator[Login]:
    """Run an sshd. `env`: variables of its sessions."""
    made = Login(folder, env)
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert sshd, "no sshd here: apt-get install openssh-server"
    Path("/run/sshd").mkdir(exist_ok=True)
    words, log = [sshd, "-D", "-E", folder / "sshd.log", "-f", folder / "sshd_config"], folder / "sshd.log"
    with subprocess.Popen(words) as server:
        wait_for("sshd", lambda: log.exists() and "listening" in log.read_text(), process=server)
        try:
            yield made
        finally:
            server.terminate()
