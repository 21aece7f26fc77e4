"""What a snapshot holds, and what it is named by."""

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from rankup.errors import UserError
from rankup.places.files import snapshot_text
from rankup.submit import snapshot
from rankup.submit.snapshot import Snapshot, take

OWN = {".rankup.json", ".rankup.sum"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    write(folder, {"train.py": "1", "src/pkg/a.py": "1", "job.sbatch": "#!/bin/sh\n", ".gitignore": "points/\n"})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def names(made: Snapshot) -> set[str]:
    return ({*made.files} | {*made.links}) - OWN


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        take(folder, "job.sbatch")
    return str(caught.value)


def test_snapshot_has_tracked_and_new_files_but_no_ignored_ones(mine: Path) -> None:
    """Neither the history, nor what runs, environments and caches hold, although git does not ignore these here."""
    write(mine, {
        "new.py": "1", "points/0.txt": "1", "runs/a/logs/rank-0.log": "1", "env/pyvenv.cfg": "", "env/bin/python": "",
        "src/pkg/__pycache__/a.pyc": "", ".ruff_cache/x": "", "slurm-7.out": "", ".rankup/abc/train.py": "1",
        "src/runs/b.py": "1",
    })
    (mine / "src/pkg/a.py").write_text("2")
    os.remove(mine / "train.py")
    made = take(mine, "job.sbatch")
    assert names(made) == {"src/pkg/a.py", "job.sbatch", ".gitignore", "new.py", "src/runs/b.py"}
    assert made.files["src/pkg/a.py"][1] == b"2"
    assert b"+2" in made.diff


def test_snapshot_without_git_leaves_out_what_add_knows_as_data_and_output(tmp_path: Path) -> None:
    header = "#!/bin/sh\n# rankup add slurm --data points --output=outputs/a train.py --data no\n"
    write(tmp_path, {"train.py": "1", "job.sbatch": header, "points/0.txt": "1", "outputs/a/b": "1", "no/c": "1",
                     ".venv/pyvenv.cfg": "", ".venv/lib/x.py": "", "runs/a/b": "1", "pkg/.git/config": ""})
    made = take(tmp_path, "job.sbatch")
    assert names(made) == {"train.py", "job.sbatch", "no/c"}
    assert made.outputs == ["outputs/a"]
    assert made.record.keys() == {"snapshot"}


def test_snapshot_has_the_files_of_submodules_and_of_a_folder_in_a_larger_repository(
    mine: Path, tmp_path: Path
) -> None:
    write(tmp_path / "lib", {"lib.py": "1"})
    git(tmp_path / "lib", "init", "-q")
    git(tmp_path / "lib", "add", ".")
    git(tmp_path / "lib", "commit", "-q", "-m", "lib")
    git(mine, "submodule", "--quiet", "add", str(tmp_path / "lib"), "third/lib")
    write(mine, {"third/lib/new.py": "1", "src/job.sbatch": ""})
    assert {"third/lib/lib.py", "third/lib/new.py"} < names(take(mine, "job.sbatch"))
    assert not any(".git/" in name or name.endswith(".git") for name in names(take(mine, "job.sbatch")))
    write(mine, {"third/lib/data/0.txt": "1", "data.sbatch": "# rankup add slurm --data third/lib/data train.py\n"})
    assert "third/lib/data/0.txt" in names(take(mine, "job.sbatch"))
    assert "third/lib/data/0.txt" not in names(take(mine, "data.sbatch"))
    inner = take(mine / "src", "job.sbatch")
    assert names(inner) == {"pkg/a.py", "job.sbatch"}
    assert inner.record["commit"]
    git(mine, "submodule", "--quiet", "deinit", "-f", "third/lib")
    assert not any(name.startswith("third") for name in names(take(mine, "job.sbatch")))


def test_snapshot_leaves_the_folders_of_results_to_the_users_folder(mine: Path) -> None:
    """With a file of its own in runs/, the snapshot would have a folder runs/, which later jobs do not see."""
    write(mine, {"runs/.gitkeep": "", "runs/base.yaml": "1", "outputs/a/.gitkeep": "", "outputs/b": "1", "runs2/c": "1",
                 "add.sbatch": "# rankup add slurm --output outputs/a train.py\n"})
    git(mine, "add", ".")
    made = take(mine, "add.sbatch")
    assert {"outputs/b", "runs2/c"} < names(made)
    assert not {"runs/.gitkeep", "runs/base.yaml", "outputs/a/.gitkeep"} & names(made)
    assert made.notes == ["left out, because jobs write there: runs/base.yaml"]


def test_snapshot_has_the_wheel_of_add_only_for_the_build_of_an_image(mine: Path) -> None:
    """It is of no use to a job, and most of what a ConfigMap holds."""
    write(mine, {"rankup-1-py3-none-any.whl": "1", ".gitignore": "*.whl\n"})
    assert "rankup-1-py3-none-any.whl" in names(take(mine, "job.sbatch", "rankup-1-py3-none-any.whl"))
    git(mine, "add", "-f", "rankup-1-py3-none-any.whl")
    assert "rankup-1-py3-none-any.whl" not in names(take(mine, "job.sbatch"))


def test_snapshot_keeps_a_diff_that_git_applies_with_any_settings(mine: Path) -> None:
    for key, value in (("diff.external", "/bin/true"), ("diff.noprefix", "true"), ("color.ui", "always")):
        git(mine, "config", key, value)
    (mine / "train.py").write_text("2\n")
    made = take(mine, "job.sbatch")
    git(mine, "checkout", "-q", "train.py")
    (mine.parent / "diff").write_bytes(made.diff)
    git(mine, "apply", str(mine.parent / "diff"))
    assert (mine / "train.py").read_text() == "2\n"


@pytest.mark.parametrize("with_git", [True, False])
def test_snapshot_refuses_a_folder_that_it_can_not_read(
    with_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without these files would be another one."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, {"job.sbatch": "", "closed/a.py": "1"})
        if with_git:
            git(folder, "init", "-q")
        (folder / "closed").chmod(0)
        monkeypatch.setenv("HOME", made)
        user = os.geteuid()
        if user == 0:  # root reads everything
            subprocess.run(["chown", "-R", "nobody", made], check=True)
            os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            said = refused(folder)
        finally:
            os.seteuid(user)
            (folder / "closed").chmod(0o755)
    assert said.startswith("submit: git must be" if with_git else f"submit: {folder}/closed must be readable, got ")
    assert "Permission denied" in said


def test_snapshot_is_named_by_content_commit_and_mode(mine: Path) -> None:
    first = take(mine, "job.sbatch")
    assert first.record == {
        "snapshot": first.name, "commit": git(mine, "rev-parse", "HEAD").strip(), "branch": "main", "dirty": False,
    }
    assert json.loads(first.files[".rankup.json"][1]) == first.record
    assert not first.diff
    os.utime(mine / "train.py", (1, 1))
    assert take(mine, "job.sbatch").name == first.name
    seen = {first.name}
    for change in (
        lambda: (mine / "train.py").write_text("3"), lambda: (mine / "train.py").chmod(0o755),
        lambda: (mine / "new.py").touch(), lambda: (mine / "link").symlink_to("train.py"),
        lambda: git(mine, "commit", "-q", "-a", "-m", "second"),
    ):
        change()
        made = take(mine, "job.sbatch")
        assert made.name not in seen
        assert made.record["dirty"] is True  # new.py stays untracked
        seen.add(made.name)


def test_snapshot_leaves_out_untracked_secrets_and_names_them(mine: Path) -> None:
    write(mine, {".env": "1", "conf/id_ed25519": "1", "cert.pem": "1", ".env.example": "1", "tracked.key": "1",
                 ".envrc": "1", "conf/secrets.yaml": "1"})
    git(mine, "add", "tracked.key")
    made = take(mine, "job.sbatch")
    assert {".env.example", "tracked.key"} < names(made)
    assert not {".env", "conf/id_ed25519", "cert.pem", ".envrc", "conf/secrets.yaml"} & names(made)
    (note,) = made.notes
    assert ".env .envrc cert.pem conf/id_ed25519 conf/secrets.yaml" in note


def test_snapshot_keeps_links_inside_and_refuses_others(mine: Path, tmp_path: Path) -> None:
    (mine / "best.py").symlink_to("src/pkg/a.py")
    (mine / "folder").symlink_to("src")
    (mine / "loop").symlink_to("loop")
    (mine / "later").symlink_to("points/later")
    made = take(mine, "job.sbatch")
    assert made.links == {"best.py": "src/pkg/a.py", "folder": "src", "loop": "loop", "later": "points/later"}
    for target in (str(tmp_path), "../elsewhere", str(mine / "train.py"), "src/../../mine/train.py"):
        (mine / "out").symlink_to(target)
        assert refused(mine).startswith(f"submit: out must be a link inside this folder, got one to {target}. ")
        (mine / "out").unlink()


def test_snapshot_refuses_too_many_bytes_and_names_the_largest_folders(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 4 * 2**20)
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 10**6)
    for name, size in (("weights/a", 2), ("cache/b", 4), ("src/pkg/c", 1)):
        (mine / name).parent.mkdir(exist_ok=True)
        (mine / name).write_bytes(bytes(size * 2**20))
    assert "at most 4 MiB, got 7: cache 4 MiB, weights 2 MiB, src 1 MiB. Name data in .gitignore" in refused(mine)
    (mine / "cache/b").unlink()
    assert "weights/a has 2 MB, which each snapshot carries" in take(mine, "job.sbatch").notes


@pytest.mark.parametrize("name", ["a\nb.py", "a\\b.py", os.fsdecode(b"\xff.py")])
def test_snapshot_refuses_names_that_no_list_holds(mine: Path, name: str) -> None:
    (mine / name).touch()
    assert refused(mine).startswith("submit: the name of a file must be one line without \\, got ")


def test_snapshot_says_why_git_does_not_answer(mine: Path) -> None:
    (mine / ".git" / "index").write_text("nonsense")
    assert refused(mine).startswith(f"submit: git must be able to list the files in {mine}, got: ")
    shutil.rmtree(mine / ".git")
    (mine / ".git").write_text("gitdir: /gone\n")  # a copy of a worktree: without git, what it ignores would be sent
    assert refused(mine).startswith(f"submit: git must be able to list the files in {mine}, got: ")


def test_snapshot_without_git_where_git_speaks_german(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"train.py": "1", "job.sbatch": "", "bin/git": f"""#!/bin/sh
[ "$LC_ALL" = C ] || {{ echo "fatal: Kein Git-Repository" >&2; exit 128; }}
exec {shutil.which("git")} "$@"
"""})
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert names(take(tmp_path, "job.sbatch")) == {"train.py", "job.sbatch", "bin/git"}


def test_snapshot_before_the_first_commit(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "1", "job.sbatch": ""})
    git(tmp_path, "init", "-q")
    made = take(tmp_path, "job.sbatch")
    assert names(made) == {"train.py", "job.sbatch"}
    assert made.record["dirty"] is True
    assert snapshot_text(**made.record) == f"{made.name} with changes"
