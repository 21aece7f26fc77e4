"""YAML: what a scalar means, and that each mistake names its file and line."""

import re
from pathlib import Path

import pytest

from tests.rigs.refused import one
from train.config import Config, load_config
from train.config.yaml_text import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), (".5", 0.5), ("+2", 2), ("010", 10), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ("0b1", "0b1"), ("no", "no"), ("on", "on"), ("True", True), ("tRue", "tRue"),
        ("null", None), ("~", None), ("", None), ("none", "none"), ("'1e5'", "1e5"), ("1e", "1e"), (".", "."),
        ("<<", "<<"), ("-.INF", float("-inf")), ("[1, 2e1, no]", [1, 20.0, "no"]), ("9" * 5000, "9" * 5000),
    ],
)
def test_yaml_scalar_follows_the_core_schema(text, value):
    found = parse_yaml(f"x: {text}", "x.yaml")["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_yaml_empty_file_holds_no_settings(text, write):
    assert load_config({}, file=write(text)) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.1\nseed: 1\nlr: 0.2\nseed: 2\n", 'tiny.yaml:3: not valid YAML: duplicate "lr".'),
        ("options:\n  a: 1\n  a: 2\n", 'tiny.yaml:3: not valid YAML: duplicate "a".'),
        ("- lr\n", "tiny.yaml: settings must be lines of `name: value`, got [lr]."),
        ("lr: 0.1\n5: x\n", "tiny.yaml:2: not valid YAML: the name of a setting must be a word."),
        ("options: {a: {1: 2}}", "tiny.yaml:1: not valid YAML: the name of a setting must be a word."),
        ("options:\n\ta: 1\n", "tiny.yaml:2: not valid YAML: found character '\\t' that cannot start any token."),
        ("lr: 0.1\n  seed: 2\n", "tiny.yaml:2: not valid YAML: mapping values are not allowed here."),
        ("lr: 0.1\n---\nlr: 0.2\n", "tiny.yaml:2: not valid YAML: but found another document."),
        ("lr: !!python/object:os.system 1\n", "tiny.yaml:1: not valid YAML: could not determine a*"),
        ("lr: !!map 5\n", "tiny.yaml:1: not valid YAML: expected a mapping."),
        ("lr: *base\n", "tiny.yaml:1: not valid YAML: found undefined alias*"),
        ("options: &a {x: *a}\n", "tiny.yaml:1: not valid YAML: found unconstructable recursive node."),
        ("lr: 0.1\nname: a\x07b\n", "tiny.yaml: not valid YAML: *special characters are not allowed*"),
        ("lr: " + "[" * 5000, "tiny.yaml: not valid YAML: nested too deeply."),
        (b"name: \xff\n", "tiny.yaml: not a text file in UTF-8 (byte 6)."),
    ],
)
def test_yaml_mistake_names_file_and_line(text, message, write):
    found = one(file=write(text))
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


def test_yaml_file_missing_or_a_directory_is_one_line(write):
    assert one(file="absent.yaml") == "absent.yaml: cannot be read: No such file or directory."
    Path("folder").mkdir()
    assert one(file="folder") == "folder: cannot be read: Is a directory."
    assert "cannot be read" in one(file="a\0b")


def test_yaml_many_aliases_cost_nothing(write):
    layers = "\n".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 6))
    load_config({}, file=write(f"options:\n  l0: &l0 [1]\n{layers}\n"))
