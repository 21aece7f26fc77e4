"""The command line: accepted forms, help, and that all mistakes are reported before anything runs."""

import json
import re
from pathlib import Path

import pytest

from tests.rigs.jobs import rank_env
from train.commands import COMMANDS, Doctor, Predict
from train.commands.line import parse_args
from train.config import Config, load_config
from train.config.data import SOURCES
from train.config.load import fields_of
from train.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(line: str, capsys: Captured) -> tuple[int, str, str]:
    """Run the program with this command line in this process. Return its exit code, stdout and stderr."""
    return main(line.split()), *capsys.readouterr()


@pytest.mark.parametrize(("line", "settings"), [
    ("train --batch-size 64", {"batch_size": "64"}), ("--batch_size=64", {"batch_size": "64"}),
    ("train --lr -1e-3", {"lr": "-1e-3"}), ("train --lr 1 --lr 2", {"lr": "2"}), ("train", {}),
    ("train --name=a=b", {"name": "a=b"}), ("train --name=", {"name": ""}), ("train --name=--x", {"name": "--x"}),
    ("train --augment", {"augment": "True"}), ("train --augment trivial", {"augment": "trivial"}),
    ("train --no_augment --sync-bn", {"augment": "False", "sync_bn": "True"}),
    ("train --augment --no-augment", {"augment": "False"}), ("--local_rank 3 train", {}),
    ("--local-rank=0 train --epochs 2", {"epochs": "2"}),
    ("train --options.a-b_c=1", {"options.a_b_c": "1"}),
    # By default Fire takes a lone dash for the end of a call, and parses lists and numbers
    ("train --data-dir -", {"data_dir": "-"}), ("train --options.x true", {"options.x": "true"}),
    ("train --name [1,2]", {"name": "[1,2]"}), ("--name predict", {"name": "predict"}),
])
def test_command_line_is_parsed_into_settings(line: str, settings: dict[str, str]) -> None:
    parsed = parse_args(line.split())
    assert (parsed.command, parsed.settings, parsed.mistakes) == ("train", settings, [])


def test_options_of_a_command_have_type_and_default() -> None:
    parsed = parse_args(["predict", "--input", "1e5", "--config", "x.yaml", "--rank", "1"])
    assert (parsed.mistakes, parsed.settings) == ([], {})
    assert parsed.options == Predict(config="x.yaml", input="1e5", rank=1)
    assert parse_args(["doctor", "--alone", "--json"]).options == Doctor(alone=True, json=True)
    assert not parse_args(["doctor", "--fresh"]).mistakes  # ddp.sbatch passes the training's arguments


def test_every_setting_is_a_flag_in_both_spellings() -> None:
    for name in Config.model_fields.keys() - {"options"}:
        for spelling in (name, name.replace("_", "-")):
            assert parse_args(["train", f"--{spelling}=1"]).settings == {name: "1"}


def test_show_prints_what_would_be_used(folder: Path, capsys: Captured) -> None:
    (folder / "mine.yaml").write_text("lr: 3e-4\nepochs: 7\n")
    code, out, err = ended("show --config mine.yaml --epochs 9 --no-tensorboard", capsys)
    assert (code, err) == (0, "")
    assert ", ".join(SOURCES) in out
    (folder / "shown.yaml").write_text(out)
    shown = load_config({}, file="shown.yaml")
    assert shown == Config(lr=3e-4, epochs=9, tensorboard=False)
    _, out, _ = ended("show --config mine.yaml --epochs 9 --no-tensorboard --json", capsys)
    assert Config(**json.loads(out)) == shown
    assert sorted(path.name for path in folder.iterdir()) == ["mine.yaml", "shown.yaml"]


@pytest.mark.parametrize(("line", "words"), [
    ("-h", COMMANDS), ("tarin --help", COMMANDS), ("--stpes 3 --help", ["--init-method", ", ".join(SOURCES)]),
    *((f"--help {name} --lr nonsense", [f"--{option.replace('_', '-')}" for option in ("name", *fields_of(model))]
       + [f"  python -m train.main {name} "]) for name, model in COMMANDS.items()),
])
@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_width_and_a_screen(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, width: int, line: str, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = ended(line, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: ")
    assert [word for word in words if word not in out and word not in " ".join(out.split())] == []
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= width
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("line", "here", "elsewhere"), [
    ("train --workload text --help", "--bert-dir VALUE", "--model"),
    ("--parallel dp -h", "--device-ids VALUE", "--bert-dir"), ("train -h", "--model VALUE", "--device-ids"),
])
def test_help_has_the_settings_of_the_chosen_parts(capsys: Captured, line: str, here: str, elsewhere: str) -> None:
    code, out, _ = ended(line, capsys)
    assert code == 0
    assert here in out
    assert f"{elsewhere} VALUE" not in out


@pytest.mark.parametrize("line", ["--options.x True", "--options.x=True", "--options.x true"])
def test_option_of_a_workload_may_be_true_as_python_writes_it(line: str) -> None:
    assert load_config(parse_args(["train", *line.split()]).settings).options == {"x": True}


def test_empty_command_line_shows_the_commands_and_is_a_mistake(capsys: Captured) -> None:
    code, out, _ = ended("", capsys)
    assert code == 2
    assert out.startswith("usage: ")


@pytest.mark.parametrize(("line", "messages"), [
    ("train --stpes 100",
     ['unknown setting "--stpes"; did you mean "--max-steps"? (python -m train.main show lists all)']),
    ("train --Learning-rate=1", ['unknown setting "--Learning-rate"; did you mean "--lr"? (*)']),
    ("train --bacth-size 4", ['unknown setting "--bacth-size"; did you mean "--batch-size"? (*)']),
    ("train --no-lr", ["--lr must be followed by a value."]),
    ("--zzz", ['unknown setting "--zzz". (*']),
    ("train -- --interactive", ['unknown setting "--interactive"*']),  # Fire has its own flags after it
    ("train - x", ['unexpected argument "-".', 'unexpected argument "x".']),
    ("train --lr --epochs 3", ["--lr must be followed by a value."]),
    ("train --options.x", ["--options.x must be followed by a value, such as true."]),
    ("train --lr True", ['--lr must be a valid number, *, got "True".']),
    ("train True", ['unexpected argument "True".']),
    ("train --options. 1", ['unknown setting "--options."*']),
    ("train --config --lr 1", ["--config must be followed by a value."]),
    ("train --config=", ["--config must be a file's name or null, got \"\"."]),
    ("train --no-augment=true", ['unknown setting "--no-augment"; did you mean "--augment"? (*)']),
    ("trian", ['unknown command "trian"; did you mean "train"?']),
    ("train epochs=3", ['unexpected argument "epochs=3".']),
    ("train --rank two", ['--rank must be a valid integer, * or null, got "two".']),
    ("doctor --alone=maybe", ['--alone must be a valid boolean, *, got "maybe".']),
    ("predict --output x.txt", ['--output must be a .csv file, got "x.txt".']),
    ("train --output x.csv", ['unknown setting "--output"*']),
    ("train --run-dir x --mirror x", ['--mirror must be another place than run_dir, got "x". *']),
    ("train --dataset digits --fake-classes 3",
     ["fake_classes must be left out here, got 3. It belongs to --dataset fake."]),
    ("train --stpes 3 --lr -1 --dataset 3 --bogus",
     ['unknown setting "--stpes"*', 'unknown setting "--bogus"*', '--lr must be greater than 0, got "-1".',
      f"--dataset must be one of {', '.join(SOURCES)}, got \"3\"."]),
])
def test_mistakes_are_all_reported_with_code_2_before_anything_runs(
    folder: Path, capsys: Captured, line: str, messages: list[str]
) -> None:
    code, out, err = ended(line, capsys)
    assert (code, out) == (2, "")
    found = err.removeprefix("error: ").splitlines()
    assert len(found) == len(messages), found
    for message in messages:  # any order: some are known only at the end
        assert any(re.fullmatch(re.escape(message).replace(r"\*", ".*"), one) for one in found), found
    assert not list(folder.iterdir()), "a mistake must not create runs/"


@pytest.mark.parametrize(("value", "got"), [("fashion", '"fashion"'), ("", "null"), ("[digits]", "[digits]")])
def test_mistakes_of_a_file_begin_with_its_name(folder: Path, capsys: Captured, value: str, got: str) -> None:
    (folder / "it.yaml").write_text(f"dataset: {value}\nlr: -1\n")
    code, _, err = ended("show --config it.yaml", capsys)
    assert code == 2
    assert f"it.yaml: dataset must be one of {', '.join(SOURCES)}, got {got}.\n" in err
    assert "it.yaml: lr must be greater than 0, got -1." in err


@pytest.mark.parametrize(("env", "message"), [
    ({"WORLD_SIZE": "2"}, "RANK"),
    (rank_env(2, 2, 20000), "RANK"),
    (rank_env(0, 65, 20000), "batch_size must be at least 65"),
])
def test_impossible_environment_is_refused_and_creates_no_file(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, _, err = ended("train --dataset digits --model mlp --batch-size 64", capsys)
    assert code == 2
    assert message in err
    assert not list(folder.iterdir())


URLS = ("s3://me:hush@bucket/runs", "gs://hush@bucket/runs", "https://host/model.pt?X-Amz-Signature=hush",
        "s3://b/r?key=hush", "s3://key:hush/ret@bucket/runs", "s3://key:12/hush@bucket",
        "HTTPS://host/model.pt?sig=hush", "http://[me:hush@host/model.pt", "https://me:hu@hush@host/model.pt")


@pytest.mark.parametrize(("setting", "url"), [
    *((setting, url) for setting in ("run-dir", "init-from", "mirror") for url in URLS), ("dataset", f"hf:{URLS[-1]}"),
])
def test_address_with_a_secret_is_refused_and_not_printed(setting: str, url: str, capsys: Captured) -> None:
    code, *printed = ended(f"train --{setting} {url}", capsys)
    assert code == 2
    assert f"--{setting} must be an address without user, password, key or parameters." in "".join(printed)
    assert "hush" not in "".join(printed)


def test_launch_of_the_program_names_the_command_that_took_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--nproc", "2", "train/main.py"]) == 2
    assert "rankup launch train/main.py train" in "".join(capsys.readouterr())
