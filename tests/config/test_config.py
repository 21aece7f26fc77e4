"""Settings: their model, types and precedence, and that all mistakes are reported together in the project's form."""

import json
import re
from pathlib import Path

import pytest

from rankup.errors import UserError
from tests.rigs.refused import mistakes, one
from train.config import Config, changed_settings, check_run, load_config, to_yaml
from train.config.data import SOURCES
from train.config.load import read_yaml
from train.config.method import METHODS
from train.config.workload import WORKLOADS

ROOT = Path(__file__).parents[2]


# --- the model -------------------------------------------------------------------------------------------------------


def test_defaults_are_valid_and_have_the_right_type():
    # pydantic does not validate defaults, so build the config again from its dump
    config = Config()
    again = Config(**config.model_dump())
    assert again == config
    for name in Config.model_fields:
        assert type(getattr(again, name)) is type(getattr(config, name)), name


@pytest.mark.parametrize("name", Config.model_fields)
def test_field_has_a_description_and_a_rule(name):
    field = Config.model_fields[name]
    assert field.description
    assert len(field.description) > 10
    assert "\n" not in field.description
    assert isinstance(field.json_schema_extra["free"], bool)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        assert any(getattr(m, "ge", getattr(m, "gt", None)) is not None for m in field.metadata), "no lower bound"
    if field.annotation in (str, str | None, dict):
        assert field.json_schema_extra["rule"]


def test_exactly_these_settings_may_change_on_resume():
    free = {n for n, f in Config.model_fields.items() if f.json_schema_extra["free"]}
    assert free == {
        "data_dir", "epochs", "max_steps", "num_workers", "eval_batch_size",
        "join_timeout_s", "setup_timeout_s", "step_timeout_s", "eval_timeout_s", "save_timeout_s",
        "name", "run_dir", "save", "keep", "save_every_steps", "evaluate_every_epochs",
        "log_every_steps", "compare_every_steps", "recompute_every_steps", "memory_every_steps", "tensorboard",
        "eval_split",
        "parallel", "bert_dir", "checkpoint_format",
        "hf_eval_split", "hf_download", "tracker", "mirror", "on_end",
    }


# --- precedence and types --------------------------------------------------------------------------------------------


def test_precedence_is_defaults_then_file_then_flags(write):
    file = write("lr: 0.2\nepochs: 7\noptions: {width: 1, depth: 2}\n")
    config = load_config({"lr": "3e-4", "augment": "true", "options.width": "64"}, file=file)
    assert (config.lr, config.epochs, config.augment, config.momentum) == (3e-4, 7, True, 0.9)
    assert config.options == {"width": 64, "depth": 2}


@pytest.mark.parametrize(("name", "text", "value"), [
    ("name", "1e5", "1e5"), ("run_dir", "null", "null"), ("data_dir", "none", None), ("data_dir", "1", "1"),
    ("image_size", "null", None), ("image_size", "32", 32), ("lr", "1", 1.0), ("lr", "1e-3", 1e-3),
    ("augment", "false", False), ("compile", "true", True),
    ("options.a", "no", "no"), ("options.a", "[1, 2]", "[1, 2]"),
    ("options.a", "null", None), ("options.a", "1e-3", 1e-3), ("options.a.b", "1", 1),
])
def test_flag_is_parsed_by_the_type_of_its_field(name, text, value):
    head, _, key = name.partition(".")
    found = getattr(load_config({name: text}), head)
    found = found[key] if key else found
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("line", "message"), [
    ("lr: -0.1", "tiny.yaml: lr must be greater than 0, got -0.1."),
    ("lr: 1e999", "tiny.yaml: lr must be a finite number, got .inf."),
    ("lr:", "tiny.yaml: lr must be a valid number, got null."),
    ("epochs: 1.5", "tiny.yaml: epochs must be a valid integer, got a number with a fractional part, got 1.5."),
    ("augment: maybe", 'tiny.yaml: augment must be true, false, imagenet or trivial, got "maybe".'),
    ("image_size: big", "tiny.yaml: image_size must be a valid integer, * or null, got \"big\"."),
    ("optimizer: adam", "tiny.yaml: optimizer must be 'sgd' or 'adamw', got \"adam\"."),
    *((f"workload: {form!r}", f'tiny.yaml: workload must be images, text or module:function, got "{form}".')
      for form in ("throws", ":build", "throws:", "a b:c", "throws.py", "dir/throws:build")),
    ("device: 1", "tiny.yaml: device must be auto, cpu, cuda or another accelerator's name, got 1."),
    ('data_dir: ""', 'tiny.yaml: data_dir must be a path or null, got "".'),
    ("options: {a: .nan}", "tiny.yaml: options must be a mapping of *, got {a: .nan}."),
    ("options: {a: {1: 2}}", "tiny.yaml: options must be a mapping of *, got {a: {1: 2}}."),
    ("options: {a: 2024-01-01, b: !!set {c}}", "tiny.yaml: options must be a mapping of *."),
    ("name: " + "a" * 201, 'tiny.yaml: name must be at most 200 letters, *, got "aaa*....'),
    ("batch-size: 3", 'tiny.yaml: unknown setting "batch-size"; did you mean "batch_size"? (*)'),
    (r'"a\nb": 3', r'tiny.yaml: unknown setting "a\nb". (*)'),
    ("5: x", 'tiny.yaml: unknown setting "5". (*)'),
])
def test_file_value_is_refused_in_the_projects_form(line, message, write):
    found = one(file=write(line + "\n"))
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "-x", "a/b", "a b", "a\n", "ä"])
def test_name_that_is_no_safe_folder_is_refused(name):
    assert "--name must be at most 200 letters, digits and . _ -" in one({"name": name})


@pytest.mark.parametrize(("name", "text", "message"), [
    ("lr", "inf", '--lr must be a finite number, got "inf".'),
    ("batch_size", "", '--batch-size must be a valid integer, unable to parse string as an integer, got "".'),
    ("options", "x", '--options must be a mapping of words to *, got "x".'),
])
def test_flag_value_is_refused_in_the_projects_form(name, text, message):
    found = one({name: text})
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


def test_all_mistakes_are_reported_together(write):
    file = write("stpes: 3\nlr: -1\nmax_steps: 3\nwarmup_steps: 3\nseed: x\noptions: 5\n")
    found = mistakes({"epochs": "0", "options.a": "1"}, file=file, earlier=["from the command line"])
    starts = ["from the command line", 'tiny.yaml: unknown setting "stpes"', "tiny.yaml: options must",
              "tiny.yaml: seed must", "--epochs must", "tiny.yaml: lr must"]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), line


def test_messages_never_mention_pydantic(write):
    found = mistakes(file=write("\n".join(f"{name}: {{x: [.nan]}}" for name in Config.model_fields)))
    assert len(found) == len(Config.model_fields)
    assert not [line for line in found if re.search(r"pydantic|Input should|validation|type=", line)]
    assert all(re.match(r"tiny\.yaml: \w+ must be .+, got \{.*\.$", line) for line in found)


def test_broken_file_is_reported_with_the_mistakes_of_flags():
    found = mistakes({"lr": "-1", "dataset": "imagefolder"}, file="absent.yaml")
    # A missing data_dir is no mistake here: the file that could not be read may have it
    assert found == ["absent.yaml: cannot be read: No such file or directory.",
                     '--lr must be greater than 0, got "-1".']


# --- saved settings --------------------------------------------------------------------------------------------------


def test_changed_settings_lists_only_settings_that_affect_the_result():
    old = Config(lr=0.1, dropout=0.5, options={"a": 1, "b": [1], "c": "x"}).model_dump()
    new = Config(lr=0.2, dropout=0.5, epochs=9, keep=5, name="x", options={"a": 1, "b": [2], "d": "1"})
    assert changed_settings(old, new) == ["options: {a: 1, b: [1], c: x} -> {a: 1, b: [2], d: '1'}", "lr: 0.1 -> 0.2"]


def test_changed_settings_works_with_json_and_older_versions():
    config = Config(lr=1.0, image_size=None, options={"a": [1, None]})
    old = json.loads(json.dumps(config.model_dump()))
    assert changed_settings(old, config) == []
    del old["seed"]  # an older version had no such setting, and behaved like today's default
    old["gone"] = 1
    assert changed_settings(old, config) == []
    assert changed_settings(old, config.model_copy(update={"seed": 3})) == ["seed: 0 -> 3"]


@pytest.mark.parametrize("settings", [
    {},
    {"name": "1e5", "data_dir": "null", "run_dir": "a: b # c\n\t'\"\\é😀\x7f\u2028\x85", "lr": 1e-5},
    {"data_dir": "yes", "run_dir": "~", "options": {"a b": [1, "2", None, True, {"x": "no"}], "e": 1e-9, "s": ""}},
    {"run_dir": "word " * 60, "options": {"long": list(range(200)), "text": "word " * 60}},
])
def test_yaml_of_a_config_reads_back_equal(settings, write):
    config = Config(**settings)
    text = to_yaml(config)
    assert load_config({}, file=write(text)) == config
    shown = [line.split(":")[0] for line in text.split("\n") if line[:1] not in ("", "#")]
    assert shown == [name for name in Config.model_fields if name in shown]


def test_yaml_of_a_config_explains_each_setting():
    text = "\n".join(to_yaml(Config(workload="my.job:build", schedule="step", parallel=method))
                     for method in ("dp", "fsdp", "ddp"))
    for name, field in Config.model_fields.items():
        line, *_ = re.findall(rf"^{name}: .*$", text, re.MULTILINE)
        assert field.description in line
    assert len(re.findall(r"^# ", to_yaml(Config()), re.MULTILINE)) == 5
    assert len(re.findall(r"^\w+: ", to_yaml(Config()), re.MULTILINE)) < 48


def test_yaml_has_settings_of_other_data_sets_only_if_they_were_set():
    assert "fake_classes" not in to_yaml(Config())
    assert "hf_config: null" in to_yaml(Config(dataset="hf:beans"))
    assert "fake_classes: 3 " in to_yaml(Config(fake_classes=3))


@pytest.mark.parametrize("settings", [
    {"dataset": "fake", "fake_classes": 3},
    {"workload": "text", "dataset": "hf:x", "max_seq_len": 9, "label_column": "y", "eval_split": "test"},
    {"workload": "my.job:build", "max_seq_len": 9, "options": {"a": 1}},
    {"compress": "bf16", "sync_bn": True, "compile": True, "find_unused_parameters": True, "compare_every_steps": 9},
    {"parallel": "fsdp", "sync_bn": True, "checkpoint_format": "sharded", "memory_every_steps": 9},
    {"parallel": "horovod", "compress": "fp16"}, {"parallel": "dp", "device_ids": "1,0"},
    *({"parallel": method, "find_unused_parameters": True} for method in ("none", "dp")),  # resumed with another method
    {"parallel": "none", "sync_bn": True, "compress": "fp16"},  # a run of several processes resumed in one
    {"schedule": "step", "step_epochs": 2},
])
def test_setting_of_a_chosen_part_is_accepted(settings):
    check_run(Config(**settings), 1)


@pytest.mark.parametrize(("settings", "message"), [
    ({"fake_classes": 3}, r"fake_classes must be left out here, got 3\. It belongs to --dataset fake\."),
    ({"eval_split": "test"}, r'eval_split .* got "test"\. It belongs to --workload text or --dataset hf\.'),
    ({"options": {"a": 1}}, "belongs to --workload MODULE:FUNCTION"),
    ({"workload": "text", "model": "mlp", "dataset": "mnist"}, r"workload images\.\ndataset .* images or --dataset hf"),
    ({"step_gamma": 0.5}, "to --schedule step"),
    ({"optimizer": "adamw", "momentum": 0.5}, "to --optimizer sgd"), ({"device_ids": "1,0"}, "to --parallel dp"),
    ({"checkpoint_format": "sharded"}, "to --parallel fsdp"),
    ({"parallel": "fsdp", "compress": "fp16"}, "to --parallel none or ddp or horovod"),
    *(({"parallel": method, name: True}, f"{name} must be left out here, got true") for method, names in {
        "dp": "compile sync_bn", "fsdp": "compile find_unused_parameters",
        "horovod": "compile find_unused_parameters sync_bn"}.items() for name in names.split()),
])
def test_setting_of_a_part_that_was_not_chosen_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        check_run(Config(**settings), 1)


def test_settings_belong_to_choices_that_exist():
    choices = {*SOURCES, "hf", *METHODS, "auto", *WORKLOADS, "MODULE:FUNCTION", "sgd", "adamw", "step", "or"}
    owners = " ".join(field.json_schema_extra["of"] for field in Config.model_fields.values()).split()
    assert {word for word in owners if word not in choices} == {
        "--dataset", "--workload", "--parallel", "--optimizer", "--schedule"}


def test_config_files_that_ship_are_valid():
    for file in (ROOT / "train/configs").glob("*.yaml"):
        load_config({}, file=str(file))
    assert load_config({}, file=str(ROOT / "train/configs/fashion.yaml")) == Config()


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [
    ("3e-4", 3e-4), (".5", 0.5), ("+2", 2), ("0", 0), ("010", 10.0), ("1_000", "1_000"), ("1:30", "1:30"),
    ("2024-01-01", "2024-01-01"), ("no", "no"), ("on", "on"), ("True", True), ("null", None), ("~", None),
    ("", None), ("'1e5'", "1e5"), ("1e", "1e"), ("<<", "<<"), ("-.INF", float("-inf")),
    ("[1, 2e1, no]", [1, 20.0, "no"]),
])
def test_yaml_scalar_follows_the_core_schema(text, value, write):
    found = read_yaml(write(f"x: {text}"))["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_yaml_empty_file_has_no_settings(text, write):
    assert load_config({}, file=write(text)) == Config()


@pytest.mark.parametrize(("text", "message"), [
    ("lr: 0.1\nseed: 1\nlr: 0.2\nseed: 2\n", 'tiny.yaml:3: not valid YAML: duplicate "lr".'),
    ("options:\n  a: 1\n  a: 2\n", 'tiny.yaml:3: not valid YAML: duplicate "a".'),
    ("- lr\n", "tiny.yaml: settings must be lines of `name: value`, got a list."),
    ("options:\n\ta: 1\n", "tiny.yaml:2: not valid YAML: found character '\\t' that cannot start any token."),
    ("lr: 0.1\n---\nlr: 0.2\n", "tiny.yaml:2: not valid YAML: but found another document."),
    ("lr: !!python/object:os.system 1\n", "tiny.yaml:1: not valid YAML: could not determine a*"),
    ("lr: !!map 5\n", "tiny.yaml:1: not valid YAML: expected a mapping*"),
    ("options: &a {x: *a}\n", "tiny.yaml:1: not valid YAML: found unconstructable recursive node."),
    ("lr: 0.1\nname: a\x07b\n", "tiny.yaml: not valid YAML: *special characters are not allowed*"),
    ("lr: " + "[" * 5000, "tiny.yaml: not valid YAML: *recursion*"),
    ("seed: " + "9" * 5000, "tiny.yaml: not valid YAML: *"),
    (b"name: \xff\n", "tiny.yaml: not valid YAML: 'utf-8' codec can't decode byte 0xff in position 6*"),
])
def test_yaml_mistake_names_file_and_line(text, message, write):
    found = one(file=write(text))
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


def test_yaml_file_that_is_missing_or_a_directory_gives_one_line(write):
    assert one(file="absent.yaml") == "absent.yaml: cannot be read: No such file or directory."
    Path("folder").mkdir()
    assert one(file="folder") == "folder: cannot be read: Is a directory."


def test_yaml_with_many_nested_aliases_is_accepted(write):
    layers = "\n".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 6))
    load_config({}, file=write(f"options:\n  l0: &l0 [1]\n{layers}\n"))
