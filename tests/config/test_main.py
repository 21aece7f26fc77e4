"""The command line as a user meets it: help, show, mistakes that leave nothing behind, and what the defaults reach."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, environment, rank_env, result
from train.config import Config, load_config
from train.config.options import OPTIONS
from train.main import main

DIGITS = ("--dataset", "digits", "--model", "mlp", "--tensorboard=false")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(
    words: Sequence[str], capsys: pytest.CaptureFixture[str], env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program on that line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


# Help and show --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [("--help", OPTIONS), ("-h", OPTIONS), ("train --help", ["--dataset", "--init-method"]),
     ("train --help hf", ["--hf-config", "--label-column"]), ("--help text", ["--max-seq-len", "--bert-dir"]),
     ("--help predict --lr nonsense", ["--output FILE", "predict --name mine"])],
)
def test_help_is_shown_and_is_success(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, words: Sequence[str]
) -> None:
    code, out, err = ended(line.split(), capsys)
    assert (code, err) == (0, "")
    assert out.startswith(("usage: ", "settings of "))
    assert [word for word in words if word not in out] == []
    assert not list(folder.iterdir())


def test_nothing_at_all_shows_the_commands_and_is_a_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended([], capsys)
    assert code == 2
    assert out.startswith("usage: ")


def test_help_and_show_do_without_torch() -> None:
    code = (
        "import sys; from train.main import main; lines = ('--help', 'show', 'show --lr x', 'trian')"
        "; codes = [main(line.split()) for line in lines]"
        "; assert codes == [0, 0, 2, 2], codes; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)


def test_show_prints_what_would_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("lr: 3e-4\nepochs: 7\n")
    code, out, err = ended(["show", "--config", "mine.yaml", "--epochs", "9", "--no-tensorboard"], capsys)
    assert (code, err) == (0, "")
    (folder / "shown.yaml").write_text(out)
    shown = load_config({}, file="shown.yaml")
    assert shown == Config(lr=3e-4, epochs=9, tensorboard=False)
    _, out, _ = ended(["show", "--config", "mine.yaml", "--epochs", "9", "--no-tensorboard", "--json"], capsys)
    assert Config(**json.loads(out)) == shown
    assert sorted(path.name for path in folder.iterdir()) == ["mine.yaml", "shown.yaml"]


@pytest.mark.parametrize("words", ["show", "--help"])
def test_reader_that_has_had_enough_is_no_fault(words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, MAIN, words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(240)) == ("", 0)
    process.stderr.close()


# Mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "trian": 'unknown command "trian"; did you mean "train"?',
    "train evaluate": 'unexpected argument "evaluate"',
    "train --lr -1": "--lr must be > 0, got -1.",
    "train --config nowhere.yaml": "nowhere.yaml",
    "train --output x.csv": "--output must be used with predict, not with train.",
    "train --sync-bn --device cpu": "--sync-bn must be false with device cpu, got true.",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake_is_code_2_before_anything_runs(folder: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    code, out, err = ended(line.split(), capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert MISTAKES[line] in err
    assert "Traceback" not in err
    assert not list(folder.iterdir()), "a mistake leaves no runs/"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        (rank_env(2, 2, 20000), "RANK"),
        (rank_env(0, 65, 20000), "batch_size must be at least 65"),
    ],
)
def test_environment_that_cannot_work_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], env: dict[str, str], message: str
) -> None:
    code, _, err = ended(["train", *DIGITS, "--batch-size", "64"], capsys, env)
    assert code == 2
    assert message in err
    assert not list(folder.iterdir())


# Ways to write the line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["{settings}", "--local-rank=0 train {settings}", "--local_rank 0 {settings}"])
def test_command_may_be_left_out_and_a_local_rank_may_stand_in_front(forks: Forks, tmp_path: Path, line: str) -> None:
    settings = " ".join((*DIGITS, "--max-steps", "1", "--run-dir", str(tmp_path)))
    forks.ends(*line.format(settings=settings).split())
    assert result(tmp_path / "digits-mlp")["step"] == 1


def test_program_runs_as_a_file_among_files_of_the_same_names(tmp_path: Path) -> None:
    """From a directory whose log.py, data.py, train.py and torch.py are the user's own."""
    for name in ("log", "data", "config", "train", "stop"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken for the program')\n")
    words = [sys.executable, os.path.relpath(MAIN, tmp_path), "train", *DIGITS, "--max-steps", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment({"PYTHONPATH": ""}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(tmp_path / "runs" / "digits-mlp")["step"] == 1


# What the configurations reach; the defaults: tests/promises/test_demo.py -------------------------------------------


@pytest.mark.parametrize(("file", "steps", "accuracy"), [("tiny", 22 * 5, 0.95), ("digits", 22 * 20, 0.97)])
def test_configuration_that_ships_learns_the_digits(
    forks: Forks, tmp_path: Path, file: str, steps: int, accuracy: float
) -> None:
    """Two ranks. Measured: tiny 0.972, digits 0.989; a single one of the 359 test images counts 0.003."""
    forks.ends(
        "train", "--config", ROOT / f"train/configs/{file}.yaml", "--run-dir", tmp_path, world_size=2, timeout_s=800
    )
    found = result(next(tmp_path.glob("*/result.json")).parent)
    assert found["step"] == steps
    assert found["metrics"]["accuracy"] >= accuracy


@pytest.mark.parametrize("setting", ["run-dir", "init-from", "mirror"])
@pytest.mark.parametrize("url", [
    "s3://me:hush@bucket/runs", "gs://hush@bucket/runs", "https://host/model.pt?X-Amz-Signature=hush", "s3://b/r?key=hush",
    "s3://key:hush/ret@bucket/runs", "s3://key:12/hush@bucket", "https://me:hu@hush@host/model.pt",
])
def test_an_address_with_a_secret_in_it_is_refused_and_not_repeated(
    setting: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"--{setting}", url]) == 2
    printed = "".join(capsys.readouterr())
    assert f"--{setting} must be an address without user, password, key or parameters." in printed
    assert "hush" not in printed
