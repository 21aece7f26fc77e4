"""The command line: what is understood, that every mistake on it is reported, and the help."""

import re
from typing import Literal

import pytest

from train.config import Config
from train.config.command_line import parse_args
from train.config.help_text import help_text
from train.config.options import OPTIONS, Options
from train.config.schema import fields_of, nearest
from train.config.settings import setting
from train.run import CHOICES


class Train(Options):
    """Train."""

    timeout: float = setting(1.5, "Seconds.")
    quiet: bool = setting(False, "Say less.")


class Launch(Train):
    """Start processes."""

    nproc: int = setting(2, "Processes.", ge=1)


class Predict(Train):
    """Predict."""

    checkpoint: str | None = setting(None, "A checkpoint.", metavar="DIR")
    format: Literal["csv", "jsonl"] = setting("csv", "The output.")


COMMANDS = {"train": Train, "launch": Launch, "predict": Predict}


def parse(line):
    return parse_args(line.split(), commands=COMMANDS)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("train --batch-size 64", {"batch_size": "64"}), ("train --batch_size=64", {"batch_size": "64"}),
        ("--batch-size 64", {"batch_size": "64"}), ("train --lr -0.1", {"lr": "-0.1"}),
        ("train --lr 1 --lr 2", {"lr": "2"}), ("train --name=a=b", {"name": "a=b"}), ("train --name=", {"name": ""}),
        ("train --name=--x", {"name": "--x"}), ("train --augment", {"augment": "True"}),
        ("train --augment=true", {"augment": "true"}), ("train --augment false", {"augment": "false"}),
        ("train --no-augment", {"augment": "False"}), ("train --no_augment", {"augment": "False"}),
        ("train --augment --no-augment", {"augment": "False"}), ("train --augment trivial", {"augment": "trivial"}),
        ("train --augment imagenet", {"augment": "imagenet"}), ("train --options.width 64", {"options.width": "64"}),
        ("train --options.a-b_c=1", {"options.a_b_c": "1"}), ("--local-rank=0 train --epochs 2", {"epochs": "2"}),
        ("--local-rank 0 train --epochs 2", {"epochs": "2"}), ("--local_rank=3 train", {}),
        ("--local_rank 3 train", {}), ("train", {}), ("train --channels-last", {"channels_last": "True"}),
        ("train --channels-last --no-augment", {"channels_last": "True", "augment": "False"}),
        ("train --channels-last auto", {"channels_last": "auto"}),
        ("train --no-channels-last", {"channels_last": "False"}),
    ],
)
def test_command_line_is_understood(line, settings):
    parsed = parse(line)
    assert parsed.mistakes == []
    assert parsed.command == "train"
    assert parsed.settings == settings


def test_command_line_gives_options_with_type_and_default():
    parsed = parse("launch --nproc 4 --quiet --timeout 3 --config x.yaml")
    assert parsed.mistakes == []
    assert parsed.config_file == "x.yaml"
    assert parsed.options == Launch(nproc=4, timeout=3.0, quiet=True)
    assert type(parsed.options.timeout) is float
    assert parse("predict --checkpoint 1e5 --format jsonl").options == Predict(checkpoint="1e5", format="jsonl")
    assert parsed.settings == {}


@pytest.mark.parametrize("line", ["--help", "-h", "train -h", "--stpes 3 --help"])
def test_command_line_help_is_asked_for(line):
    assert parse(line).help
    assert not parse("train").help


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("train --stpes 100",
         ['unknown setting "--stpes"; did you mean "--max-steps"? (python -m train.main show lists all)']),
        ("train --batch 4", ['unknown setting "--batch"; did you mean "--batch-size"? (*)']),
        ("train --epoch 4", ['unknown setting "--epoch"; did you mean "--epochs"? (*)']),
        ("train --learning-rate=1", ['unknown setting "--learning-rate"; did you mean "--lr"? (*)']),
        ("train --nprocs 4", ['unknown setting "--nprocs"; did you mean "--nproc"? (*)']),
        ("train --no-lr", ['unknown setting "--no-lr"*']),
        ("--bogus", ['unknown setting "--bogus"*']),
        ("train --", ['unknown setting "--"*']),
        ("train --lr", ["--lr must be followed by a value. *"]),
        ("train --lr --epochs 3", ["--lr must be followed by a value. (One that begins with a dash: --lr=-x)"]),
        ("train --options.x", ["--options.x must be followed by a value. *"]),
        ("train --options x", ["--options must be --options.NAME VALUE, *"]),
        ("train --no-augment=true", ['unknown setting "--no-augment"; did you mean "--augment"? (*)']),
        ("train --config=", ["--config must be a file's name, got nothing."]),
        ("train --config", ["--config must be followed by a value. *"]),
        ("trian", ['unknown command "trian"; did you mean "train"?']),
        ("train epochs=3", ['unexpected argument "epochs=3"; did you mean --epochs=3?']),
        ("epochs=3", ['unknown command "epochs=3"; did you mean --epochs=3?']),
        ("train now", ['unexpected argument "now".']),
        ("launch --nproc two", ['--nproc must be an integer >= 1, got "two".']),
        ("launch --nproc 1.5", ["--nproc must be an integer >= 1, got 1.5."]),
        ("launch --nproc 0", ["--nproc must be >= 1, got 0."]),
        ("launch --nproc", ["--nproc must be followed by a value. *"]),
        ("launch --quiet=yes", ['--quiet must be true or false, got "yes".']),
        ("predict --format xml", ['--format must be one of csv, jsonl, got "xml".']),
        ("train --nproc 2", ["--nproc must be used with launch, not with train."]),
        ("train --stpes 3 --lr --bogus", ['unknown setting "--stpes"*', "--lr must *", 'unknown setting "--bogus"*']),
    ],
)
def test_command_line_mistakes_are_all_collected(line, messages):
    found = parse(line).mistakes
    # In any order: what is known only at the end of the line comes last.
    assert len(found) == len(messages), found
    for message in messages:
        assert any(re.fullmatch(re.escape(message).replace(r"\*", ".*"), f) for f in found), found


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("train --name True", {"name": "True"}), ("train --name=False", {"name": "False"}),
        ("train --data-dir -", {"data_dir": "-"}), ("train --lr -1e-3", {"lr": "-1e-3"}),
        ("train --name [1,2]", {"name": "[1,2]"}),
        ("train --batch-size 1 --batch_size 2 --batch-size 3", {"batch_size": "3"}),
        ("train --name train", {"name": "train"}), ("--name launch", {"name": "launch"}),
    ],
)
def test_command_line_is_not_guessed_by_fire(line, settings):
    """Left to itself Fire reads True for a missing value, a lone dash as the end of a call, and lists and numbers."""
    parsed = parse(line)
    assert (parsed.command, parsed.settings, parsed.mistakes) == ("train", settings, [])


@pytest.mark.parametrize("line", ["train -- --interactive", "train -- --trace", "train -- -i", "- train", "train - x"])
def test_command_line_has_none_of_fires_own_flags(line, capsys):
    assert parse(line).mistakes
    assert capsys.readouterr() == ("", "")


def test_command_line_takes_every_setting_in_both_spellings():
    for name, field in Config.model_fields.items():
        if name == "options":
            continue
        for spelling in (name, name.replace("_", "-")):
            text = "true" if field.annotation is bool else "1"
            assert parse(f"train --{spelling}={text}").settings == {name: text}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help_of_each_command_fits_the_width_and_a_screen(command, width):
    text = help_text(command, width=width, choices=CHOICES)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 40
    if command:
        for name in fields_of(OPTIONS[command]):
            assert f"--{name.replace('_', '-')}" in text
        assert text.count(f"  python -m train.main {command}") >= 1
    else:
        assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in OPTIONS)


# --- the nearest name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("stpes", "max_steps"), ("batchsize", "batch_size"), ("bacth-size", "batch_size"), ("learning_rate", "lr"),
        ("optimiser", "optimizer"), ("workers", "num_workers"), ("Seed", "seed"), ("zzz", None), ("", None),
    ],
)
def test_nearest_name_is_found(name, near):
    assert nearest(name, list(Config.model_fields)) == near


