"""The machine that runs a job: this one, or another one by the user's own ssh. store.sh keeps the snapshots there."""

import io
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rankup.errors import ExpectedError, UserError
from rankup.submit.snapshot import Snapshot

SCRIPT = (Path(__file__).parent / "store.sh").read_text()
Result = TypeVar("Result")
MARK = "--rankup--"  # comes before the output of store.sh, because a login shell may print a greeting


def uninterrupted(work: Callable[[], Result]) -> tuple[Result, bool]:
    """Hold Ctrl-C back, also from child processes, while `work` submits a job: else nobody would know whether there is
    one. Returns the result of `work`, and whether the user pressed Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        result, pressed = work(), signal.SIGINT in signal.sigpending()
        if pressed:
            signal.sigwait({signal.SIGINT})
        return result, pressed
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def say(text: str) -> None:
    print(f"submit: {text}", flush=True)


class Machine:
    """A shell on this machine, or on another one, and the job's folder there. `given`: "", HOST or HOST:FOLDER. Raises
    UserError for a name that ssh would not take as a host."""

    def __init__(self, given: str) -> None:
        self.given, (self.host, _, folder) = given, given.partition(":")
        if given and not re.fullmatch(r"[\w.@%+][\w.@%+-]*(:(?!//|-|~[^/]).*)?", given):
            raise UserError(f"--host must be a host as for ssh, or HOST:FOLDER, got {given}.")
        here, home = Path.cwd(), Path.home()
        there = here.relative_to(home) if here != home and here.is_relative_to(home) else here.name
        self.folder = (re.sub("^~/*$", ".", folder).removeprefix("~/") or str(there)) if given else str(here)
        self.ssh: list[str] = []

    def __enter__(self) -> "Machine":
        self._sockets = tempfile.mkdtemp(prefix="rankup-", dir="/tmp")  # the path of a socket must be short
        # One connection carries all commands, so that a password is asked once
        control = ("ControlMaster=auto", f"ControlPath={self._sockets}/%C", "ControlPersist=60")
        self.ssh = ["ssh", *(word for each in control for word in ("-o", each))]
        return self

    def __exit__(self, *_: object) -> None:
        if self.host and shutil.which("ssh"):
            subprocess.run([*self.ssh, "-O", "exit", self.host], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def show(self, line: str) -> None:
        """Print a command that runs there, as one can type it here."""
        print(f"+ {shlex.join(['ssh', self.host, line]) if self.host else line}", flush=True)

    def do(self, action: str, *words: str) -> bytes:
        """Run an action of store.sh, and return its output. Raises ExpectedError if it fails."""
        text = f"set -- {shlex.join([action, self.folder, *words])}\necho {MARK}\n{SCRIPT}"
        shell = [*self.ssh, self.host, "sh -ls"] if self.host else ["sh", "-s"]
        return self._run(shell, text.encode()).partition(f"{MARK}\n".encode())[2]

    def _run(self, words: list[str], text: bytes = b"") -> bytes:
        with tempfile.TemporaryFile() as errors:  # no pipe, because ssh in the background may keep it open
            try:
                done = subprocess.run(words, input=text, stdout=subprocess.PIPE, stderr=errors, check=False)
            except FileNotFoundError:
                raise UserError(f"submit: {words[0]} must be installed here, got none.") from None
            errors.seek(0)
            said = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        if done.returncode == 0:
            return done.stdout
        full = next((line for line in said if "No space left" in line or "quota exceeded" in line), "")
        reason = full or (said[-1] if said else f"{words[0]} ended with {done.returncode}")
        reason = re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", reason)
        raise ExpectedError(f"`ssh {self.host}` failed: {reason}" if done.returncode == 255 and self.host else reason)

    def place(self, snapshot: Snapshot) -> str:
        """Put the snapshot into the job's folder, unless it is there. Returns the name of its folder. Raises
        ExpectedError if that fails. The folder gets its name last, when all checksums are right."""
        try:
            found = self.do("find", snapshot.name, *snapshot.outputs)
            self.folder, name, *more = found.decode().splitlines()
            if more:
                sending = f".sending-{secrets.token_hex(4)}"
                self._send(snapshot, f"{self.folder}/.rankup/{sending}/", *more)
                self.do("name", sending, name)
        except UserError:
            raise
        except ExpectedError as error:
            where = self.host or self.folder
            raise ExpectedError(f"submit: the snapshot did not get to {where}, so nothing runs: {error}") from None
        return name

    def _send(self, snapshot: Snapshot, path: str, tool: str, previous: str = "") -> None:
        if not self.host or tool == "tar" or not shutil.which("rsync"):
            line = f"mkdir {shlex.quote(path)} && tar -xf - -C {shlex.quote(path)}"
            if self.host:
                print(f"+ tar -cf - . | {shlex.join(['ssh', self.host, line])}", flush=True)
            self._run([*self.ssh, self.host, line] if self.host else ["sh", "-c", line], snapshot.tar())
            return
        # By content, because the times and sizes of two versions may be equal. Copies, because a job may write to them
        words = ["rsync", "-rlp", "--checksum", *([f"--copy-dest=../{previous}"] if previous else [])]
        with tempfile.TemporaryDirectory() as staging:
            os.chmod(staging, 0o755)  # the snapshot's folder gets this mode
            with tarfile.open(fileobj=io.BytesIO(snapshot.tar())) as tar:
                tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # Python 3.11.2 has none
                tar.extractall(staging)
            ends = [f"{staging}/", f"{self.host}:{path}"]
            print(f"+ {shlex.join([*words, *ends])}", flush=True)
            self._run([*words, "-e", shlex.join(self.ssh), *ends])


def run_there(given: str, words: list[str]) -> None:
    """Replace this process by `rankup WORDS` in the job's folder on another machine. Raises UserError without ssh."""
    machine = Machine(given)
    line = (
        f"cd {shlex.quote(machine.folder)} && PATH=$PWD/.venv/bin:$PWD/venv/bin:$PATH && export PATH && "
        f"if command -v rankup > /dev/null; then exec {shlex.join(['rankup', *words])}; "
        f"else echo 'error: rankup must be on PATH of {machine.host}, or in .venv there, got none.' >&2; exit 2; fi"
    )
    try:
        tty = ["-t"] if sys.stdout.isatty() else []
        os.execvp("ssh", ["ssh", *tty, machine.host, f"sh -lc {shlex.quote(line)}"])
    except FileNotFoundError:
        raise UserError("--host must come with ssh on this machine, got none.") from None
