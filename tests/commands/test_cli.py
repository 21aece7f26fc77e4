"""The command `rankup`: its commands, their help, mistakes, and output for programs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rankup.cli import COMMANDS, OF_PROGRAM, completion, main
from rankup.errors import UserError
from tests.rigs.jobs import ROOT, environment


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    return code, *capsys.readouterr()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two ranks in the folder runs/ of an empty current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "logs").mkdir(parents=True)
    for rank in (0, 1):
        log = tmp_path / "runs" / "mine" / "logs" / f"rank-{rank}.log"
        log.write_text(f"2026-11-22T10:00:01 vm r{rank} ready\n2026-11-22T10:00:05 vm r{rank} CUDA out of memory\n")
    (tmp_path / "runs" / "mine" / "status.json").write_text('{"state": "failed", "code": 1, "why": "no memory"}')
    return tmp_path


def test_rankup_without_arguments_shows_every_command_in_a_dozen_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys)
    assert (code, err) == (2, "")
    assert len(out.splitlines()) <= 12
    assert max(map(len, out.splitlines())) <= 80
    for name in {*COMMANDS, *OF_PROGRAM}:
        assert re.search(rf"\b{name}\b", out)
    assert said(capsys, "help") == said(capsys, "--help") == (0, out, "")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_fits_a_screen_and_has_two_examples(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = said(capsys, name, "--help")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(f"usage: rankup {name} ")
    examples = re.findall(rf"^  rankup {name}(.*)$", out, re.MULTILINE)
    assert len(examples) == 2
    for words in examples:
        COMMANDS[name].parse(words.split())
    assert said(capsys, "help", name) == (0, out, "")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"rankup \S+, torch \d\S+, Python 3\.\S+\n", out)


MISTAKES = {
    "lunch": 'unknown command "lunch"; did you mean launch?',
    "trian": 'unknown command "trian"; did you mean train?',
    "zzz": 'unknown command "zzz". `rankup` lists all.',
    "train.py --lr 0.1": "train.py is no command. This starts a script: rankup launch train.py --lr 0.1",
    "run x.py": "run is no command. This starts a script: rankup launch x.py",
    "-v": 'unknown option "-v". Options follow a command: rankup COMMAND [OPTIONS]. See rankup --help.',
    "logs --folow": 'unknown argument "--folow"; did you mean --follow? See rankup logs --help.',
    "logs a b": 'unknown argument "b". See rankup logs --help.',
    "logs --rank": "--rank must be followed by a value. See rankup logs --help.",
    "doctor --join-timeout-s soon": "--join-timeout-s must be a number of seconds >= 0, got soon.",
    "launch --stop-grace-s=-1 x.py": "--stop-grace-s must be a number of seconds >= 0, got -1.",
    "launch --lost-after-s nan x.py": "--lost-after-s must be a number of seconds >= 0, got nan.",
    "launch --lost-after-s 1 x.py": "--lost-after-s must be at least 3, got 1. On a busy machine, healthy nodes are",
    "explain": "no run with logs was found in runs. Name its folder, or set --run-dir.",
    "launch": "SCRIPT must be given. See rankup launch --help.",
    "launch --nporc 2 x.py": 'unknown argument "--nporc"; did you mean --nproc?',
    "launch --nproc two x.py": "--nproc must be a whole number >= 1, got two.",
    "launch --nproc 0 x.py": "--nproc must be a whole number >= 1, got 0.",
    "launch --nproc auto x.py": "--nproc must be a number or gpu, got auto. Give gpu for one rank for each visible GPU",
    "launch --nnodes 2 --master-addr a --master-port 70000 x.py": "--master-port must be a whole number from 1 to 6553",
    "launch nofile.py": "SCRIPT must be an existing file, got nofile.py. Give its path from /",
    "launch .": "SCRIPT must be a file, got the folder .. Name a file in it, or start a package with -m PACKAGE.",
    "launch -m": "SCRIPT must be given. See rankup launch --help.",
    "launch --restart-args ' x.py": "--restart-args must be words as in a shell, with closed quotes, got '.",
    "launch --shared-dir s3://user:key@bucket x.py": "--shared-dir must be an address without user, password, key",
    "export s3://user:key@bucket/mine mine.pt": "RUN must be an address without user, password, key",
    "launch --spares 1 x.py": "--spares and --max-failures-per-node must come with --nnodes 2:4, or 2 with --spares 1.",
    "launch --nnodes 2: x.py": "--nnodes must be a number of nodes, or 2:4 for two to four, got 2:.",
    "launch --nnodes 3:2 x.py": "--nnodes must be a number of nodes, or 2:4 for two to four, got 3:2.",
    "launch --max-failures-per-node 3 x.py": "--spares and --max-failures-per-node must come with --nnodes 2:4",
    "launch --restart-on 1,x x.py": "--restart-on must be a whole number from 1 to 127, got x.",
    "launch --restart-on 300 x.py": "--restart-on must be a whole number from 1 to 127, got 300.",
    "launch --max-restarts=-1 x.py": "--max-restarts must be a whole number >= 0, got -1.",
    "doctor --num-threads 0": "--num-threads must be a whole number >= 1, got 0.",
    "logs --json=yes": "--json must have no value, got yes.",
    f"export {300 * 'm'} x.pt": "File name too long",
    "export mine": "FILE must be given. See rankup export --help.",
    "status mine": "RUN must be a run in runs/ or a run's folder, got mine. There are no runs yet.",
}


def options_with_values() -> list[tuple[str, str]]:
    """Return command and option of each option whose value argparse checks."""
    return [(name, action.option_strings[0]) for name, parser in COMMANDS.items() for action in parser._actions
            if action.option_strings and action.nargs != 0 and (action.type or action.choices)]


@pytest.mark.parametrize(("name", "flag"), options_with_values())
def test_wrong_value_of_each_option_is_answered_with_its_rule(name: str, flag: str) -> None:
    with pytest.raises(UserError, match=rf"^{flag} must be (?!invalid).* got \?'?!"):
        COMMANDS[name].parse([*(["k8s"] if name == "add" else []), f"{flag}=?'!"])


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake_gives_one_line_and_code_2(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    code, out, err = said(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert MISTAKES[line] in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


def test_launch_interrupted_before_its_ranks_start_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankup.launch.read_node_env", Mock(side_effect=KeyboardInterrupt))
    (tmp_path / "x.py").touch()
    code, out, err = said(capsys, "launch", "--run-dir", str(tmp_path / "runs"), str(tmp_path / "x.py"))
    assert (code, out, err) == (143, "SIGINT before the start: no rank was started.\n", "")


def test_option_json_prints_results_for_programs(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from train.main import main as program

    for own in (main, program):  # the program has rankup's commands too
        assert own(["status", "mine", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert (found["run"], found["state"]) == ("mine", "failed")
    for words in ("explain mine --json", "explain --json"):  # without a name: the newest run
        assert main(words.split()) == 20
        assert json.loads(capfd.readouterr().out)[0]["name"] == "cuda-memory"
    assert main(["logs", "mine", "--json"]) == 0
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    assert first == {"time": "2026-11-22T10:00:01", "ranks": [0, 1], "hosts": ["vm", "vm"], "text": "ready"}
    assert second["text"] == "CUDA out of memory"


@pytest.mark.parametrize(("begun", "offered"), [
    ("st", "status stacks"), ("exp", "explain export"), ("tr", "train"), ("--nn", "--nnodes"),
])
def test_completion_offers_commands_and_options(begun: str, offered: str) -> None:
    *complete, words, command = shlex.split(completion())
    assert (complete, command) == (["complete", "-o", "default", "-W"], "rankup")
    line = ["bash", "-c", 'compgen -W "$0" -- "$1"', words, begun]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout.split() == offered.split()


def test_commands_of_the_program_are_passed_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('taken for the program')\n")
    command = [sys.executable, "-m", "rankup", "show", "--epochs", "9"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^epochs: 9 ", done.stdout, re.MULTILINE)
