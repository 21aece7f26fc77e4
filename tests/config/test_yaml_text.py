"""YAML: what a scalar means, and that each mistake names its file and line."""

import re
from pathlib import Path

import pytest

from tests.rigs.refused import one
from train.config import Config, load_config
from train.config.load import read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), (".5", 0.5), ("+2", 2), ("0", 0), ("010", 10.0), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ("no", "no"), ("on", "on"), ("True", True), ("null", None), ("~", None),
        ("", None), ("'1e5'", "1e5"), ("1e", "1e"), ("<<", "<<"), ("-.INF", float("-inf")),
        ("[1, 2e1, no]", [1, 20.0, "no"]),
    ],
)
def test_yaml_scalar_follows_the_core_schema(text, value, write):
    found = read_yaml(write(f"x: {text}"))["x"]
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
    ],
)
def test_yaml_mistake_names_file_and_line(text, message, write):
    found = one(file=write(text))
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


def test_yaml_file_missing_or_a_directory_is_one_line(write):
    assert one(file="absent.yaml") == "absent.yaml: cannot be read: No such file or directory."
    Path("folder").mkdir()
    assert one(file="folder") == "folder: cannot be read: Is a directory."


def test_yaml_many_aliases_cost_nothing(write):
    layers = "\n".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 6))
    load_config({}, file=write(f"options:\n  l0: &l0 [1]\n{layers}\n"))
