"""`rankup submit --host` over a real sshd, with a scripted sbatch there: what is sent, and what faults leave."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.rigs import ssh
from tests.rigs.containers import clean_environment
from tests.rigs.jobs import ROOT, wait_for

BATCH = """#!/bin/sh
#SBATCH --output=logs/%j.out
exec rankup launch train.py "$@"
"""
SLURM = {
    "sbatch": 'echo "$PWD $*" >> ~/jobs; ls -A > ~/seen; cat recipe.py >> ~/seen; echo 7',
    "scontrol": 'echo "JobId=7 ExitCode=0:0"; echo "   StdOut=$HOME/slurm-7.out"',
    "squeue": 'cat ~/queue 2> /dev/null || true',
}


class Desk:
    """A laptop with a repository, and a host `login` whose home is `there`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there = folder, folder / "home"
        self.mine = folder / "laptop" / "mine"
        self.mine.mkdir(parents=True)
        (self.there / "bin").mkdir(parents=True)
        # sshd starts in the home of this machine's user, whatever HOME is
        (self.there / ".profile").write_text('cd "$HOME"\nPATH="$HOME/bin:$PATH"\necho "welcome to login"\n')
        for name, text in SLURM.items():
            self.program(name, text)
        (self.mine / "job.sbatch").write_text(BATCH)
        (self.mine / "train.py").write_text("")
        (self.mine / "recipe.py").write_text("WORD = 1\n")

    def program(self, name: str, text: str, where: str = "home") -> None:
        path = self.folder / where / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self, *words: str, path: str = "") -> "subprocess.Popen[str]":
        env = {**clean_environment(), "PYTHONPATH": str(ROOT), "HOME": str(self.folder / "laptop"),
               "PATH": f"{path}{self.folder / 'laptop' / 'bin'}:{self.folder / 'ssh' / 'bin'}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [sys.executable, "-m", "rankup", *words], cwd=self.mine, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )

    def submit(self, *words: str) -> tuple[int, str]:
        process = self.start("submit", "--detach", "--host", "login", "job.sbatch", *words)
        said = process.communicate(timeout=300)[0]
        assert "Traceback" not in said, said
        return process.returncode, said

    @property
    def jobs(self) -> list[str]:
        path = self.there / "jobs"
        return path.read_text().splitlines() if path.exists() else []

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self.there / "mine/.rankup").glob("*") if path.name[0] != ".")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with ssh.login(tmp_path / "ssh", HOME=str(made.there)):
        yield made


def test_submit_sends_to_the_same_folder_of_the_home_and_only_once(desk: Desk) -> None:
    """The job starts in the snapshot, whose runs/ and .venv are those of the folder there. The output file is where it
    would be without a snapshot."""
    (desk.there / "mine/.venv/bin").mkdir(parents=True)
    code, said = desk.submit("--lr", "0 1")
    assert code == 0, said
    assert "+ rsync -rlp --checksum " in said
    (name,) = desk.snapshots()
    place = desk.there / "mine/.rankup" / name
    assert desk.jobs == [f"{place} --parsable --chdir=. --output=../../logs/%j.out --open-mode=append "
                         "job.sbatch --lr 0 1"]
    assert (desk.there / "mine/logs").is_dir()  # Slurm does not make the folder of the output
    assert (place / "runs").resolve() == desk.there / "mine/runs"
    assert (place / ".venv/bin").is_dir()
    assert (desk.there / "seen").read_text().endswith("WORD = 1\n")
    again = desk.submit()[1]
    assert "rsync" not in again
    (desk.mine / "recipe.py").write_text("WORD = 2\n")  # the same size, perhaps in the same second
    code, said = desk.submit()
    assert f"--copy-dest=../{name}/" in said
    assert (desk.there / "seen").read_text().endswith("WORD = 2\n")
    assert (place / "recipe.py").read_text() == "WORD = 1\n"
    assert len(desk.snapshots()) == 2


def test_submit_sends_by_tar_where_rsync_is_missing(desk: Desk) -> None:
    for tool in ("sh", "ls", "ln", "xargs", "head", "mkdir", "touch", "sha256sum", "tar", "mv", "find", "cat", "id",
                 "tail"):
        (desk.there / "bin" / tool).symlink_to(str(shutil.which(tool)))
    (desk.there / ".profile").write_text('cd "$HOME"\nPATH="$HOME/bin"\n')
    code, said = desk.submit()
    assert code == 0, said
    assert "+ tar -cf - . | ssh login " in said
    assert (desk.there / "seen").read_text().endswith("WORD = 1\n")


def test_submit_cut_in_the_middle_of_the_copy_runs_nothing(desk: Desk) -> None:
    """Half of it is there under another name. The next submit sends all of it."""
    (desk.mine / "big.bin").write_bytes(os.urandom(4_000_000))
    desk.program("rsync", f'exec {shutil.which("rsync")} --bwlimit=200 "$@"', where="laptop")
    process = desk.start("submit", "--host", "login", "job.sbatch")
    half = wait_for("half of it", lambda: [*desk.there.glob("mine/.rankup/.sending-*/*")], process=process)
    (rsync,) = (each for each in psutil.Process(process.pid).children() if each.name() == "rsync")
    rsync.kill()
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 1, said
    assert "submit: the snapshot did not get to login, so nothing runs: rsync ended with -9" in said
    assert (desk.jobs, desk.snapshots()) == ([], [])
    assert half
    (desk.folder / "laptop/bin/rsync").unlink()
    assert desk.submit()[0] == 0
    assert len(desk.jobs) == len(desk.snapshots()) == 1


@pytest.mark.parametrize("tool", ["rsync", "sbatch"])
def test_submit_interrupted_says_whether_there_is_a_job(desk: Desk, tool: str) -> None:
    """A Ctrl-C of a terminal goes to all processes of the command."""
    slow = f'touch "{desk.there}/at"; while [ ! -e "{desk.there}/go" ]; do sleep 0.1; done\n'
    if tool == "rsync":
        desk.program("rsync", f'{slow}exec {shutil.which("rsync")} "$@"', where="laptop")
    else:
        desk.program("sbatch", slow + SLURM["sbatch"])
    process = desk.start("submit", "--host", "login", "job.sbatch")
    wait_for(tool, (desk.there / "at").exists, process=process)
    os.killpg(process.pid, signal.SIGINT)
    if tool == "sbatch":
        (desk.there / "go").touch()
    said = process.communicate(timeout=100)[0]
    assert "Traceback" not in said
    if tool == "rsync":
        assert process.returncode == 143
        assert "Ctrl-C before the job was submitted: nothing runs." in said
        assert not desk.jobs
    else:
        assert process.returncode == 0, said
        assert "submit: Look: rankup status --host login. Stop: ssh login scancel 7." in said
        assert len(desk.jobs) == 1


def test_submit_whose_output_nobody_reads_ends_as_other_commands_do(desk: Desk) -> None:
    process = desk.start("submit", "--host", "login", "--detach", "job.sbatch")
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=100) == 141


def test_submit_that_arrives_damaged_runs_nothing(desk: Desk) -> None:
    """A disk that is full and a disk that lies."""
    real = shutil.which("rsync")
    desk.program("rsync", f'{real} "$@"; for place; do :; done; place=${{place%/}}; echo x >> '
                          f'"{desk.there}/mine/.rankup/${{place##*/}}/recipe.py"', where="laptop")
    code, said = desk.submit()
    assert code == 1
    assert "so nothing runs: it did not arrive whole." in said
    full = "rsync: write failed on x: No space left on device (28)"
    desk.program("rsync", f'echo "{full}" >&2; echo "rsync error" >&2; exit 11', where="laptop")
    code, said = desk.submit()
    assert code == 1
    assert f"so nothing runs: {full}" in said
    assert (desk.jobs, desk.snapshots()) == ([], [])


def test_submit_twice_at_once_makes_one_snapshot_and_two_jobs(desk: Desk) -> None:
    both = [desk.start("submit", "--detach", "--host", "login", "job.sbatch") for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert (len(desk.jobs), len(desk.snapshots())) == (2, 1)
    assert not [*desk.there.glob("mine/.rankup/.sending-*")]


def test_submit_says_what_ssh_says(desk: Desk) -> None:
    known = desk.folder / "ssh" / "known"
    known.write_text(known.read_text()[:-20] + "AAAAAAAAAAAAAAAAAAA\n")
    code, said = desk.submit()
    assert code == 1
    assert "so nothing runs: `ssh login` failed: Host key verification failed." in said
    process = desk.start("submit", "--host", "-oProxyCommand=touch here", "job.sbatch")
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 2
    assert "--host must be a host as for ssh" in said
    assert not (desk.mine / "here").exists()


def test_submit_keeps_five_snapshots_those_of_jobs_and_those_with_files_of_jobs(desk: Desk) -> None:
    names = []
    for number in range(8):
        (desk.mine / "recipe.py").write_text(f"WORD = {number}\n")
        assert desk.submit()[0] == 0
        names += [name for name in desk.snapshots() if name not in names]
        place = desk.there / "mine/.rankup" / names[-1]
        if number == 0:
            (desk.there / "queue").write_text(f"{place}\n")
        if number == 1:
            (place / "model.pt").write_text("weights")
        os.utime(place, (number, number))
    assert desk.snapshots() == sorted([*names[:2], *names[-5:]])
    place = desk.there / "mine/.rankup" / names[-1]
    (place / "recipe.py").write_text("a job wrote here\n")
    assert desk.submit()[0] == 0
    assert desk.jobs[-1].startswith(f"{place}-2 ")
    assert (desk.there / "seen").read_text().endswith("WORD = 7\n")


def test_submit_finds_files_of_jobs_by_name_in_any_tree(desk: Desk) -> None:
    """A file named like an option, and a list that is read once, not once for each file. Another user's snapshots in a
    shared folder stay, because squeue is asked for the jobs of this user."""
    for name in ("-rf", "-x", "ä ö.py", *map(str, range(50))):
        (desk.mine / name).touch()
    desk.program("cut", f'echo >> "{desk.there}/cuts"; exec {shutil.which("cut")} "$@"')
    for number in range(7):
        (desk.mine / "recipe.py").write_text(f"WORD = {number}\n")
        assert desk.submit()[0] == 0
        if number == 0 and os.geteuid() == 0:
            (kept,) = desk.snapshots()
            shutil.chown(desk.there / "mine/.rankup" / kept, "nobody")
        os.utime(desk.there / "mine/.rankup" / sorted(set(desk.snapshots()))[-1])
    assert len((desk.there / "cuts").read_text().splitlines()) < 40
    assert len(desk.snapshots()) == 5 + (os.geteuid() == 0)


def test_status_on_a_host_without_rankup_says_so(desk: Desk) -> None:
    (desk.there / "mine").mkdir()
    (desk.there / ".profile").write_text('cd "$HOME"\nPATH=/usr/bin:/bin\n')
    process = desk.start("status", "--host", "login")
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 2
    assert "error: rankup must be on PATH of login, or in .venv there, got none." in said
    desk.program("../mine/.venv/bin/rankup", 'echo "$PWD $*"')
    process = desk.start("logs", "--rank", "0", "--host", "login", "runs/a b")
    assert f"{desk.there}/mine logs --rank 0 runs/a b" in process.communicate(timeout=100)[0]
