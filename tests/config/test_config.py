"""Settings: the model, YAML, flags, their precedence, and that every mistake is reported at once in the house form."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from train.config import Config, changed_settings, check_world_size, load_config, to_yaml
from train.config.command_line import parse_args
from train.config.help_text import help_text
from train.config.options import Options
from train.config.schema import nearest
from train.config.settings import setting
from train.config.yaml_text import parse_yaml
from train.errors import ConfigError
from train.run.choices import CHOICES

ROOT = Path(__file__).parents[2]


class Train(Options):
    """Train."""

    timeout: float = setting(1.5, "Seconds.")
    quiet: bool = setting(False, "Say less.")


class Read(Options):
    """Read."""

    positional = "names"
    names: tuple[str, ...] = setting((), "What to read.", metavar="NAME...")
    follow: bool = setting(False, "Go on.")


class Show(Options):
    """Show."""

    positional = "name"
    name: str = setting("", "What to show.", metavar="[NAME]")


class Launch(Train):
    """Start processes."""

    nproc: int = setting(2, "Processes.", ge=1)


class Predict(Train):
    """Predict."""

    checkpoint: str | None = setting(None, "A checkpoint.", metavar="DIR")
    format: Literal["csv", "jsonl"] = setting("csv", "The output.")

    def mistakes(self):
        if self.quiet and self.format == "jsonl":
            yield "--format must be csv with --quiet, got jsonl."


COMMANDS = {"train": Train, "launch": Launch, "predict": Predict, "read": Read, "show": Show}


def mistakes(settings=None, *, file=None, earlier=()):
    """The lines of the report that these settings cause."""
    with pytest.raises(ConfigError) as caught:
        load_config(settings or {}, file=file, mistakes=earlier)
    assert caught.value.code == 2
    return str(caught.value).splitlines()


def one(settings=None, **more):
    (line,) = mistakes(settings, **more)
    return line


def parse(line):
    return parse_args(line.split(), commands=COMMANDS)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write tiny.yaml in an empty current directory, so that messages name it as the user would."""
    monkeypatch.chdir(tmp_path)

    def _write(text):
        data = text if isinstance(text, bytes) else text.encode()
        Path("tiny.yaml").write_bytes(data)
        return "tiny.yaml"

    return _write


# --- the model -------------------------------------------------------------------------------------------------------


def test_import_pays_for_no_torch():
    code = "import sys, train.config; assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy import'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_defaults_are_valid_and_of_their_type():
    # pydantic does not validate defaults: dump and build again.
    config = Config()
    again = Config(**config.model_dump())
    assert again == config
    for name in Config.model_fields:
        assert type(getattr(again, name)) is type(getattr(config, name)), name


@pytest.mark.parametrize("name", Config.model_fields)
def test_field_says_what_it_is(name):
    field = Config.model_fields[name]
    assert field.description
    assert len(field.description) > 10
    assert "\n" not in field.description
    assert isinstance(field.json_schema_extra["affects_result"], bool)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        assert field.json_schema_extra["unit"]
        assert any(getattr(m, "ge", getattr(m, "gt", None)) is not None for m in field.metadata), "no lower bound"
    if field.annotation in (str, str | None, dict):
        assert field.json_schema_extra["rule"]


def test_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        Config().lr = 1.0  # type: ignore[misc]


def test_config_built_directly_refuses_contradictions():
    with pytest.raises(ValidationError, match="static_graph"):
        Config(static_graph=True, accumulate=2)


def test_settings_that_may_change_on_resume_are_exactly_these():
    free = {n for n, f in Config.model_fields.items() if not f.json_schema_extra["affects_result"]}
    assert free == {
        "data_dir", "epochs", "max_steps", "in_memory", "num_workers", "prefetch_factor", "eval_batch_size",
        "join_timeout_s", "download_timeout_s", "setup_timeout_s", "step_timeout_s", "eval_timeout_s", "save_timeout_s",
        "name", "run_dir", "fresh", "save", "keep", "save_every_steps", "evaluate_every_epochs", "report_every_s",
        "log_every_steps", "tensorboard", "progress", "simulated_nodes", "labels_file", "eval_split", "max_bad_lines",
        "cache_images", "cache_max_gb", "train_shards", "eval_shards", "preemption_notices",
        "parallel", "bert_dir", "bert_download", "checkpoint_format", "profile", "advice", "shares",
        "hf_eval_split", "hf_download", "tracker", "mirror",
    }


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1e5", 1e5), ("1E+5", 1e5), (".5", 0.5), ("1.", 1.0), ("-0.1", -0.1), ("+2", 2), ("010", 10),
        ("1_000", "1_000"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0b1", "0b1"),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("true", True), ("True", True),
        ("FALSE", False), ("tRue", "tRue"), ("null", None), ("~", None), ("", None), ("none", "none"), ("'1e5'", "1e5"),
        ("1e", "1e"), ("e5", "e5"), (".", "."), ("1.2.3", "1.2.3"), ("<<", "<<"), (".inf", float("inf")),
        ("-.INF", float("-inf")), ("[1, 2e1, no]", [1, 20.0, "no"]), ("{a: 1}", {"a": 1}), ("9" * 5000, "9" * 5000),
    ],
)
def test_yaml_scalar_follows_the_core_schema(text, value):
    found = parse_yaml(f"x: {text}", "x.yaml")["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_yaml_empty_file_holds_no_settings(text, write):
    assert load_config({}, file=write(text)) == Config()


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("lr: 0.1\nseed: 1\nlr: 0.2\nseed: 2\n", ['tiny.yaml:3: duplicate "lr", first on line 1.',
                                                 'tiny.yaml:4: duplicate "seed", first on line 2.']),
        ("options:\n  a: 1\n  a: 2\n", ['tiny.yaml:3: duplicate "a", first on line 2.']),
        ('lr: 0.1\n"lr": 0.2\n', ['tiny.yaml:2: duplicate "lr", first on line 1.']),
        ("- lr\n", ["tiny.yaml:1: settings must be lines of `name: value`, got a list."]),
        ("\n\nlr 0.1\n", ["tiny.yaml:3: settings must be lines of `name: value`, got a single value."]),
        ("5\n", ["tiny.yaml:1: settings must be lines of `name: value`, got a single value."]),
        ("lr: 0.1\n5: x\n", ["tiny.yaml:2: the name of a setting must be a word, got 5."]),
        ("? [a]\n: 1\n", ["tiny.yaml:1: the name of a setting must be a word, got no plain text."]),
        ("options: {a: {1: 2}}", ["tiny.yaml:1: the name of a setting must be a word, got 1."]),
        ("options:\n\ta: 1\n", ["tiny.yaml:2: not valid YAML: a tab; indent with spaces."]),
        ("lr: [1\nseed: 2\n", ["tiny.yaml:2: not valid YAML: *"]),
        ("lr: 0.1\n  seed: 2\n", ["tiny.yaml:2: not valid YAML: mapping values are not allowed here."]),
        ("lr: 0.1\n---\nlr: 0.2\n", ["tiny.yaml:2: not valid YAML: but found another document."]),
        ("lr: !!python/object:os.system 1\n", ["tiny.yaml:1: not valid YAML: the tag !!python/object:os.system."]),
        ("options: {a: !!timestamp soon}\n", ["tiny.yaml:1: not valid YAML: the tag !!timestamp."]),
        ("!!set {lr}\n", ["tiny.yaml:1: not valid YAML: the tag !!set."]),
        ("lr: !!map 5\n", ["tiny.yaml:1: not valid YAML: expected a mapping."]),
        ("lr: *base\n", ["tiny.yaml:1: not valid YAML: found undefined alias*"]),
        ("options: &a {x: *a}\n", ["tiny.yaml:1: not valid YAML: an alias that contains itself."]),
        ("lr: 0.1\nname: a\x07b\n", ["tiny.yaml:2: not valid YAML: character U+0007."]),
        ("lr: " + "[" * 5000, ["tiny.yaml: not valid YAML: nested too deeply."]),
        (b"name: \xff\n", ["tiny.yaml: not a text file in UTF-8 (byte 6)."]),
    ],
)
def test_yaml_mistake_names_file_and_line(text, messages, write):
    found = mistakes(file=write(text))
    assert len(found) == len(messages), found
    for line, message in zip(found, messages, strict=True):
        assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), line), line


def test_yaml_file_missing_or_a_directory_is_one_line(write):
    assert one(file="absent.yaml") == "absent.yaml: cannot be read: No such file or directory."
    Path("folder").mkdir()
    assert one(file="folder") == "folder: cannot be read: Is a directory."
    assert "cannot be read" in one(file="a\0b")


def test_yaml_many_aliases_cost_nothing(write):
    layers = "\n".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 6))
    load_config({}, file=write(f"options:\n  l0: &l0 [1]\n{layers}\n"))


# --- precedence and types --------------------------------------------------------------------------------------------


def test_precedence_is_defaults_then_file_then_flags(write):
    file = write("lr: 0.2\nepochs: 7\noptions: {width: 1, depth: 2}\n")
    config = load_config({"lr": "3e-4", "augment": "true", "options.width": "64"}, file=file)
    assert (config.lr, config.epochs, config.augment, config.momentum) == (3e-4, 7, True, 0.9)
    assert config.options == {"width": 64, "depth": 2}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("name", "1e5", "1e5"), ("name", "true", "true"), ("run_dir", "007", "007"), ("run_dir", "null", "null"),
        ("data_dir", "null", None), ("data_dir", "none", None), ("data_dir", "1", "1"), ("image_size", "none", None),
        ("image_size", "null", None), ("image_size", "32", 32), ("lr", "1", 1.0), ("lr", "1e-3", 1e-3),
        ("augment", "true", True), ("augment", "false", False), ("compile", "true", True),
        ("channels_last", "auto", "auto"), ("channels_last", "true", True), ("channels_last", "false", False),
        ("in_memory", "never", "never"), ("options.a", "no", "no"), ("options.a", "[1, 2]", "[1, 2]"),
        ("options.a", "null", None), ("options.a", "1e-3", 1e-3), ("options.a-b", "x", "x"), ("options.a.b", "1", 1),
    ],
)
def test_flag_is_read_by_the_type_of_its_field(name, text, value):
    head, _, key = name.partition(".")
    found = getattr(load_config({name: text}), head)
    found = found[key] if key else found
    assert found == value
    assert type(found) is type(value)


def test_integer_in_file_becomes_a_float_where_a_float_is_wanted(write):
    found = load_config({}, file=write("step_timeout_s: 60\n")).step_timeout_s
    assert found == 60.0
    assert type(found) is float


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr: -0.1", "tiny.yaml: lr must be > 0, got -0.1."),
        ("lr: fast", 'tiny.yaml: lr must be a number > 0 and <= 1000, got "fast".'),
        ('lr: "0.1"', 'tiny.yaml: lr must be a number > 0 and <= 1000, got "0.1".'),
        ("lr: .nan", "tiny.yaml: lr must be finite, got .nan."),
        ("lr: -.inf", "tiny.yaml: lr must be finite, got -.inf."),
        ("lr: 1e999", "tiny.yaml: lr must be finite, got .inf."),
        ("lr: true", "tiny.yaml: lr must be a number > 0 and <= 1000, got true."),
        ("lr:", "tiny.yaml: lr must be a number > 0 and <= 1000, got null."),
        ("epochs: true", "tiny.yaml: epochs must be an integer >= 1, got true."),
        ("epochs: 1.0", "tiny.yaml: epochs must be an integer >= 1, got 1.0."),
        ("epochs: 1e3", "tiny.yaml: epochs must be an integer >= 1, got 1000.0."),
        ("epochs: 1_000", 'tiny.yaml: epochs must be an integer >= 1, got "1_000".'),
        ("epochs: 0", "tiny.yaml: epochs must be >= 1, got 0."),
        ("epochs: 99999999999999999999", "tiny.yaml: epochs must be <= 2147483647, got 99999999999999999999."),
        ("dropout: 1", "tiny.yaml: dropout must be < 1, got 1."),
        ("augment: yes", 'tiny.yaml: augment must be one of imagenet, trivial, true, false, got "yes".'),
        ("augment: 1", "tiny.yaml: augment must be one of imagenet, trivial, true, false, got 1."),
        ("compile: yes", 'tiny.yaml: compile must be true or false, got "yes".'),
        ("compile: 1", "tiny.yaml: compile must be true or false, got 1."),
        ("image_size: 4", "tiny.yaml: image_size must be >= 8, got 4."),
        ("image_size: big", 'tiny.yaml: image_size must be an integer >= 8 and <= 1024 or null, got "big".'),
        ("optimizer: adam", 'tiny.yaml: optimizer must be one of sgd, adamw, got "adam".'),
        ("workload: nothing", 'tiny.yaml: workload must be "images", "text" or module:function, got "nothing".'),
        ("device: 1", "tiny.yaml: device must be auto, cpu, cuda or another accelerator's name, got 1."),
        ('data_dir: ""', 'tiny.yaml: data_dir must be a path or null, got "".'),
        ("run_dir:", "tiny.yaml: run_dir must be a path or an address, got null."),
        ("options: 5", "tiny.yaml: options must be a mapping of *, got 5."),
        ("options: {a: .nan}", "tiny.yaml: options must be a mapping of *, got {a: .nan}."),
        ("options: {a: " + "[" * 30 + "]" * 30 + "}", "tiny.yaml: options must be a mapping of *, got {a: [[*."),
        ("name: " + "a" * 201, 'tiny.yaml: name must be at most 200 letters, *, got "aaa*....'),
        ('stpes: 3', 'tiny.yaml: unknown setting "stpes"; did you mean "max_steps"? '
                     "(python -m train.main show lists all)"),
        ("batch-size: 3", 'tiny.yaml: unknown setting "batch-size"; did you mean "batch_size"? (*)'),
        (r'"a\nb": 3', r'tiny.yaml: unknown setting "a\nb". (*)'),
        ("qqqqqq: 3", 'tiny.yaml: unknown setting "qqqqqq". (python -m train.main show lists all)'),
    ],
)
def test_file_value_is_refused_in_the_house_form(line, message, write):
    found = one(file=write(line + "\n"))
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "-x", "a/b", "a b", "a\n", "ä"])
def test_name_that_is_no_safe_folder_is_refused(name):
    assert "--name must be at most 200 letters, digits and . _ -" in one({"name": name})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lr", "-0.1", "--lr must be > 0, got -0.1."),
        ("lr", ".inf", "--lr must be finite, got .inf."),
        ("batch_size", "1e3", "--batch-size must be an integer >= 1, got 1e3."),
        ("batch_size", "many", '--batch-size must be an integer >= 1, got "many".'),
        ("batch_size", "", '--batch-size must be an integer >= 1, got "".'),
        ("batch_size", "true", "--batch-size must be an integer >= 1, got true."),
        ("epochs", "9" * 5000, '--epochs must be an integer >= 1, got "' + "9" * 76 + "...."),
        ("channels_last", "yes", '--channels-last must be one of auto, true, false, got "yes".'),
        ("augment", "yes", '--augment must be one of imagenet, trivial, true, false, got "yes".'),
        ("augment", "imagnet", '--augment must be one of imagenet, trivial, true, false, got "imagnet".'),
        ("compile", "yes", '--compile must be true or false, got "yes".'),
        ("data_dir", "", '--data-dir must be a path or null, got "".'),
        ("options.a", ".nan", "--options.a must be finite, got .nan."),
        ("options", "x", '--options must be a mapping of words to *, got "x".'),
        ("options.", "x", 'unknown setting "--options."*'),
        ("lr.x", "1", 'unknown setting "--lr.x"*'),
        ("stpes", "1", 'unknown setting "--stpes"; did you mean "--max-steps"? (python -m train.main show lists all)'),
    ],
)
def test_flag_value_is_refused_in_the_house_form(name, text, message):
    found = one({name: text})
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


def test_all_mistakes_are_reported_at_once(write):
    file = write("stpes: 3\nlr: -1\nsync_bn: true\ndevice: cpu\nseed: x\noptions: 5\n")
    found = mistakes({"epochs": "0", "bogus": "1", "options.a": ".inf"}, file=file, earlier=["from the command line"])
    starts = [
        "from the command line", 'tiny.yaml: unknown setting "stpes"', 'unknown setting "--bogus"', "--options.a must",
        "tiny.yaml: options must", "tiny.yaml: seed must", "--epochs must", "tiny.yaml: lr must",
        "tiny.yaml: sync_bn must",
    ]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), line


def test_report_never_shows_the_validators_own_words(write):
    lines = "\n".join(f"{name}: {{x: [.nan]}}" for name in Config.model_fields)
    found = mistakes(file=write(lines))
    assert len(found) == len(Config.model_fields)
    assert not [line for line in found if re.search(r"pydantic|Input should|validation|type=", line)]
    assert all(re.match(r"tiny\.yaml: \w+ must be .+, got \{.*\.$", line) for line in found)


def test_broken_file_is_reported_with_the_mistakes_of_flags():
    found = mistakes({"lr": "-1", "dataset": "imagefolder"}, file="absent.yaml")
    # data_dir may stand in the file that could not be read, so its absence is no mistake.
    assert found == ["absent.yaml: cannot be read: No such file or directory.", "--lr must be > 0, got -1."]


# --- settings that contradict each other -----------------------------------------------------------------------------

FOLDER = {"dataset": "imagefolder", "data_dir": "x"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"static_graph": "true", "accumulate": "2"},
         "--accumulate must be 1 with static_graph, got 2. Under no_sync *"),
        ({"static_graph": "true", "find_unused_parameters": "true"},
         "--find-unused-parameters must be false with static_graph, got true. A static graph finds *"),
        ({"accumulate": "65"}, "batch_size must be >= accumulate=65, got 64. Each micro-batch *"),
        ({"max_steps": "10", "warmup_steps": "10"}, "--warmup-steps must be < max_steps=10, got 10. The run *"),
        ({"sync_bn": "true", "device": "cpu"}, "--sync-bn must be false with device cpu, got true. *"),
        ({"backend": "nccl", "device": "cpu"}, '--backend must be gloo or auto with device cpu, got "nccl". *'),
        ({"device_ids": "1,0"}, '--device-ids must be empty without parallel dp, got "1,0". *'),
        ({"output_device": "1"}, "--output-device must be null without parallel dp, got 1. *"),
        ({"parallel": "dp", "device_ids": "0", "device": "cpu"},
         '--device-ids must be empty with device cpu, got "0". *'),
        ({"parallel": "dp", "compile": "true"}, "--compile must be false with parallel dp, got true. *"),
        ({"parallel": "dp", "sync_bn": "true"}, "--sync-bn must be false with parallel dp, got true. *"),
        ({"parallel": "fsdp", "precision": "fp16"},
         '--precision must be fp32 or bf16 with parallel fsdp, got "fp16". *'),
        ({"parallel": "fsdp", "compile": "true"}, "--compile must be false with parallel fsdp, got true. *"),
        ({"parallel": "fsdp", "channels_last": "true"},
         "--channels-last must be false with parallel fsdp, got true. *"),
        ({"parallel": "fsdp", "find_unused_parameters": "true"},
         "--find-unused-parameters must be false with parallel fsdp, got true. *"),
        ({"parallel": "fsdp", "static_graph": "true"}, "--static-graph must be false with parallel fsdp, got true. *"),
        ({"parallel": "fsdp", "save": "async"}, '--save must be auto or sync with parallel fsdp, got "async". *'),
        ({"parallel": "none", "compress": "fp16"},
         '--compress must be none with parallel none, got "fp16". Only ddp *'),
        ({"compress": "powersgd", "precision": "fp16"},
         '--compress must be another than powersgd with precision fp16, got "powersgd". *'),
        ({"augment": "imagenet"}, '--augment must be true or false with dataset fashion-mnist, got "imagenet". *'),
        ({"cache_images": "true"}, "--cache-images must be false with dataset fashion-mnist, got true. *"),
        ({**FOLDER, "augment": "imagenet", "cache_images": "true"},
         "--cache-images must be false with augment imagenet, got true. Random crops *. Set --augment=true."),
        ({**FOLDER, "augment": "trivial", "in_memory": "always"},
         '--in-memory must be auto or never with augment trivial, got "always". Random crops *'),
        ({"dataset": "shards"}, "data_dir must be a folder or URL of shards with dataset shards, got null. *"),
        ({"dataset": "imagefolder"}, "data_dir must be a folder * with dataset imagefolder, got null. Set it with *"),
    ],
)
def test_contradiction_is_refused(settings, message):
    found = one(settings)
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


@pytest.mark.parametrize(
    "settings",
    [
        {"static_graph": "true"}, {"accumulate": "3"}, {"accumulate": "64"}, {"shares": "2,1"},
        {"max_steps": "10", "warmup_steps": "9"}, {"warmup_steps": "9"},
        {"parallel": "dp", "device_ids": "1,0", "output_device": "0"},
        {"sync_bn": "true"}, {"backend": "nccl"}, {"precision": "fp16", "device": "cpu"},
        FOLDER, {**FOLDER, "augment": "imagenet"}, {**FOLDER, "augment": "true", "cache_images": "true"},
        {"dataset": "imagefolder", "workload": "my.job:build"},
    ],
)
def test_settings_that_go_together_are_taken(settings):
    load_config(settings)


def test_contradiction_with_a_wrong_value_is_not_guessed():
    # accumulate=65 contradicts the default batch of 64, but the user gave another batch, which is wrong by itself.
    assert mistakes({"batch_size": "x", "accumulate": "65"}) == [
        '--batch-size must be an integer >= 1, got "x".'
    ]


# --- world size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({"batch_size": 128}, 200, "batch_size must be at least 200 (200 processes), got 128. "
                                   "Start at most 128, or set --batch-size 200."),
        ({"batch_size": 1}, 2, "batch_size must be at least 2 (2 processes), got 1. Start at most 1, or *"),
        ({"batch_size": 12, "accumulate": 5}, 4, "batch_size must be at least 20 (4 processes x accumulate=5), "
                                                 "got 12. Start at most 2, or set --batch-size 20."),
        ({"shares": "2,1"}, 3, 'shares must be one number for each of 3 processes, got "2,1". Set --shares for as '
                               "many, or leave it out: equal shares fit any number."),
        ({"shares": "2,1"}, 1, 'shares must be one number for each of 1 process, got "2,1". *'),
        ({"shares": "1,1000"}, 2, 'shares must leave each process 1 or more of 64 samples, got "1,1000", which leaves '
                                  "rank 0 0. Set nearer numbers, or a larger --batch-size."),
        ({"shares": "2,1", "batch_size": 8, "accumulate": 4}, 2,
         'shares must leave each process 4 or more of 8 samples, got "2,1", which leaves rank 1 3. *'),
        ({"parallel": "none"}, 4, "parallel must be auto or ddp with 4 processes, got none. *"),
        ({"parallel": "dp"}, 2, "parallel must be auto or ddp with 2 processes, got dp. *"),
    ],
)
def test_world_size_that_does_not_fit_is_refused_with_what_would(settings, world_size, message):
    with pytest.raises(ConfigError) as caught:
        check_world_size(Config(**settings), world_size)
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), str(caught.value)), caught.value


def test_any_world_size_that_leaves_each_micro_batch_a_sample_is_taken():
    for world_size in range(1, 130):
        try:
            check_world_size(Config(batch_size=95, accumulate=2), world_size)
            assert world_size <= 47
        except ConfigError as error:
            assert world_size > 47
            most, batch = map(int, re.search(r"at most (\d+), or set --batch-size (\d+)\.$", str(error)).groups())
            check_world_size(Config(batch_size=95, accumulate=2), most)
            check_world_size(Config(batch_size=batch, accumulate=2), world_size)
    check_world_size(Config(shares="2,1.5,1"), 3)
    check_world_size(Config(parallel="none"), 1)
    check_world_size(Config(parallel="ddp"), 1)


# --- saved settings --------------------------------------------------------------------------------------------------


def test_changed_settings_names_only_what_affects_the_result():
    old = Config(lr=0.1, dropout=0.5, options={"a": 1, "b": [1], "c": "x"}).model_dump()
    new = Config(lr=0.2, dropout=0.5, epochs=9, keep=5, name="x", options={"a": 1, "b": [2], "d": "1"})
    assert changed_settings(old, new) == [
        "options.b: [1] -> [2]", "options.c: x -> (not set)", "options.d: (not set) -> '1'", "lr: 0.1 -> 0.2",
    ]


def test_changed_settings_survives_json_and_older_versions():
    config = Config(lr=1.0, image_size=None, options={"a": [1, None]})
    old = json.loads(json.dumps(config.model_dump()))
    assert changed_settings(old, config) == []
    del old["seed"]  # the older version had no such setting: what it did is the default
    old["gone"] = 1
    assert changed_settings(old, config) == []
    assert changed_settings(old, config.model_copy(update={"seed": 3})) == ["seed: 0 -> 3"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "1e5", "data_dir": "null", "run_dir": "a: b # c\n\t'\"\\é😀\x7f\u2028\x85", "lr": 1e-5},
        {"run_dir": "a\x85b"},
        {"run_dir": "a\nb \n"},
        {"data_dir": "yes", "run_dir": "~", "options": {"a b": [1, "2", None, True, {"x": "no"}], "e": 1e-9, "s": ""}},
        {"run_dir": "word " * 60, "options": {"long": list(range(200)), "text": "word " * 60}},
    ],
)
def test_yaml_of_a_config_reads_back_equal(settings, write):
    config = Config(**settings)
    text = to_yaml(config)
    assert load_config({}, file=write(text)) == config
    assert [line.split(":")[0] for line in text.split("\n") if line[:1] not in ("", "#")] == list(Config.model_fields)


def test_yaml_of_a_config_explains_each_setting():
    text = to_yaml(Config())
    for name, field in Config.model_fields.items():
        (line,) = re.findall(rf"^{name}: .*$", text, re.MULTILINE)
        assert field.description in line
        assert field.json_schema_extra["unit"] in line
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 5


@pytest.mark.parametrize("file", sorted((ROOT / "train/configs").glob("*.yaml")), ids=lambda f: f.name)
def test_config_file_that_ships_is_valid(file):
    load_config({}, file=str(file))


def test_config_files_that_ship_are_there():
    assert {"tiny.yaml", "digits.yaml", "fashion.yaml"} <= {f.name for f in (ROOT / "train/configs").glob("*.yaml")}
    assert load_config({}, file=str(ROOT / "train/configs/fashion.yaml")) == Config()


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("train --batch-size 64", {"batch_size": "64"}), ("train --batch_size=64", {"batch_size": "64"}),
        ("--batch-size 64 train", {"batch_size": "64"}), ("train --lr -0.1", {"lr": "-0.1"}),
        ("train --lr 1 --lr 2", {"lr": "2"}), ("train --name=a=b", {"name": "a=b"}), ("train --name=", {"name": ""}),
        ("train --name=--x", {"name": "--x"}), ("--augment train", {"augment": "true"}),
        ("train --augment=true", {"augment": "true"}), ("--augment false train", {"augment": "false"}),
        ("train --no-augment", {"augment": "false"}), ("train --no_augment", {"augment": "false"}),
        ("train --augment --no-augment", {"augment": "false"}), ("--augment trivial train", {"augment": "trivial"}),
        ("train --augment imagenet", {"augment": "imagenet"}), ("train --options.width 64", {"options.width": "64"}),
        ("train --options.a-b_c=1", {"options.a-b_c": "1"}), ("--local-rank=0 train --epochs 2", {"epochs": "2"}),
        ("--local-rank 0 train --epochs 2", {"epochs": "2"}), ("--local_rank=3 train", {}),
        ("--local_rank 3 train", {}), ("train", {}), ("--channels-last train", {"channels_last": "true"}),
        ("train --channels-last --no-augment", {"channels_last": "true", "augment": "false"}),
        ("--channels-last auto train", {"channels_last": "auto"}),
        ("train --no-channels-last", {"channels_last": "false"}),
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
        ("train -epochs 3", ['unknown setting "-epochs"; did you mean "--epochs"? (*)']),
        ("train --no-lr", ['unknown setting "--no-lr"*']),
        ("--bogus train", ['unknown setting "--bogus"*']),
        ("train --", ['unknown setting "--"*']),
        ("train --lr", ["--lr must be followed by a value. *"]),
        ("train --lr --epochs 3", ["--lr must be followed by a value. (One that begins with a dash: --lr=-x)"]),
        ("train --options.x", ["--options.x must be followed by a value. *"]),
        ("train --options x", ["--options must be --options.NAME VALUE, *"]),
        ("train --no-augment=true", ['--no-augment must be given without a value, got "true".']),
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
        ("predict --quiet --format jsonl", ["--format must be csv with --quiet, got jsonl."]),
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


def test_command_line_gives_words_to_a_command_that_takes_them():
    parsed = parse("read a --follow b - --lr 0.5 5")
    assert (parsed.options.names, parsed.options.follow, parsed.mistakes) == (("a", "b", "-", "5"), True, [])
    assert parsed.settings == {"lr": "0.5"}
    assert parse("read").options.names == ()
    parsed = parse("show a b")
    assert (parsed.options.name, parsed.mistakes) == ("a", ['unexpected argument "b".'])
    # It has no flag
    assert parse("show --name a").options.name == ""
    assert 'unknown setting "--names"' in parse("read --names a").mistakes[0]


def test_command_line_finds_the_command_behind_an_unknown_option():
    assert parse("--bogus train").command == "train"
    assert parse("--bogus 3 train").command == "train"


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("train --name True", {"name": "True"}), ("train --name=False", {"name": "False"}),
        ("train --data-dir -", {"data_dir": "-"}), ("train --lr -1e-3", {"lr": "-1e-3"}),
        ("train --name [1,2]", {"name": "[1,2]"}), ("train --augment --no-augment --augment", {"augment": "true"}),
        ("train --batch-size 1 --batch_size 2 --batch-size 3", {"batch_size": "3"}),
        ("train --name train", {"name": "train"}), ("--name launch train", {"name": "launch"}),
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


def test_command_line_names_an_option_that_begins_with_no():
    """Fire takes a leading "no" for False: --node-rank without a value would be de_rank=False."""
    assert parse_args(["launch", "--nnodes=2", "--master-addr=a", "--node-rank"]).mistakes == [
        "--node-rank must be followed by a value. (One that begins with a dash: --node-rank=-x)"
    ]
    assert parse_args(["launch", "--nnodes=2", "--master-addr=a", "--node-rank", "1"]).options.node_rank == 1


def test_command_line_of_a_request_gives_the_same_settings():
    line = ["launch", "--nproc=2", "--json", "--lr", "0.5", "--no-tensorboard", "--options.a-b", "x", "--config=c.yaml"]
    words = parse_args(line).words(options=["json"])
    assert words == ["--config", "c.yaml", "--lr=0.5", "--tensorboard=false", "--options.a-b=x", "--json=true"]
    again = parse_args(["bench", *words])
    assert (again.settings, again.config_file, again.mistakes) == (parse_args(line).settings, "c.yaml", [])
    assert again.options.as_json


def test_command_line_takes_every_setting_in_both_spellings():
    for name, field in Config.model_fields.items():
        if name == "options":
            continue
        for spelling in (name, name.replace("_", "-")):
            text = "true" if field.annotation is bool else "1"
            assert parse(f"train --{spelling}={text}").settings == {name: text}


def test_command_line_abbreviations_are_not_guessed():
    assert parse("train --augm").settings == {}
    assert parse("train --augm").mistakes


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
def test_help_shows_every_setting_with_unit_and_default_and_fits_the_width(width):
    text = help_text(commands=COMMANDS, width=width, choices=CHOICES)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for name, field in Config.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(field.description.split()) in flat
    assert "[samples, >= 1, default 64]" in flat
    names = "fashion-mnist, mnist, cifar10, imagefolder, shards, digits, fake, hf:PATH_OR_NAME"
    assert f"[{names}, default fashion-mnist]" in flat
    assert "--no-tensorboard" in text
    for word in [*COMMANDS, "--nproc N", "--checkpoint DIR", "--format {csv,jsonl}", "--config FILE", "NAME..."]:
        assert word in text
    assert "2147483647" not in text


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


def test_nearest_of_nothing_is_nothing():
    assert nearest("x", []) is None
