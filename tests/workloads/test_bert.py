"""A BERT's folder: its vocabulary, its weights, and mistakes in it. test_bert_runs.py trains with it."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rankup.errors import UserError
from tests.rigs.tiny_bert import change_json, change_weights, make_bert, of_transformers, sample_texts
from train.config import Config
from train.workloads import load
from train.workloads.bert import Bert, WordPieceTokenizer, build_bert
from train.workloads.workload import LOG

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "small")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "bert"))


def config_of(folder: Path | str, **settings: Any) -> Config:
    return Config(workload="text", bert_dir=str(folder), **{"max_seq_len": 48, "lr": 1e-4, **settings})


def build(
    folder: Path | str, *, seed: int = 0, pretrained: bool = True, **settings: Any
) -> tuple[WordPieceTokenizer, Bert]:
    torch.manual_seed(seed)
    words, model, _ = build_bert(config_of(folder, **settings), num_classes=5, pretrained=pretrained)
    return words, model.eval()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the messages that are logged from now on."""
    told: list[str] = []
    monkeypatch.setattr(LOG, "info", told.append)
    return told


# Words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"do_lower_case": False}, {"tokenize_chinese_chars": False, "strip_accents": False}]
)
def test_tokenizer_gives_the_tokens_of_transformers(folder: Path, options: dict[str, bool]) -> None:
    from transformers import BertTokenizer

    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    texts = [*sample_texts(), "Ünïcode Café", "  \t ", "汤soup汤", "\u3000全角ＡＢ"]
    tokens = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    theirs = BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}, **options)
    expected = theirs(texts, split_special_tokens=True).input_ids
    words = WordPieceTokenizer(folder, max_seq_len=1000)
    assert words(texts) == (expected, 0)
    assert sum(token == 1 for row in expected[:900] for token in row) < 0.2 * sum(map(len, expected[:900]))
    theirs.save_pretrained(folder)
    (folder / "vocab.txt").unlink()  # transformers 5 saves only tokenizer.json
    assert WordPieceTokenizer(folder, max_seq_len=1000)(texts) == (expected, 0)


def test_words_that_look_like_special_tokens_are_plain_text(made: Path) -> None:
    ((row,), _) = WordPieceTokenizer(made, max_seq_len=20)(["a [PAD] [SEP] b"])
    assert row.count(0) == 0
    assert row.count(3) == 1


def test_long_texts_are_cut_and_keep_their_end_token(made: Path) -> None:
    long, short = "a soup " * 30, "soup"
    rows, num_cut = WordPieceTokenizer(made, max_seq_len=10)([long, short])
    whole, _ = WordPieceTokenizer(made, max_seq_len=1000)([long, short])
    assert rows == [[*whole[0][:9], 3], whole[1]]
    assert num_cut == 1


def test_cut_texts_are_reported_once_for_each_part(made: Path, notes: list[str]) -> None:
    load(config_of(made, max_seq_len=12))
    assert [sum(f"{part}.txt" in note and "longer than max_seq_len=12: cut" in note for note in notes) for part in
            ("train", "dev")] == [1, 1]
    notes.clear()
    load(config_of(made, max_seq_len=64))
    assert not any("longer than" in note for note in notes)
    load(Config(workload="text", max_seq_len=12))
    assert any("longer than" in note for note in notes)


# Weights --------------------------------------------------------------------------------------------------------


def test_bert_equals_that_of_transformers_and_ignores_padding(made: Path) -> None:
    words, model = build(made)
    theirs = of_transformers(made).eval()
    theirs.load_state_dict(model.state_dict())  # strict: the same names
    rows, _ = words(sample_texts()[:6])
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask).logits
        torch.testing.assert_close(model(tokens), expected)
        torch.testing.assert_close(model(torch.nn.functional.pad(tokens, (0, 7))), expected)
        torch.testing.assert_close(model(tokens[:1, : len(rows[0])]), expected[:1])
        assert not torch.allclose(theirs(input_ids=tokens).logits, expected)  # the mask matters


def test_head_comes_from_the_seed_and_the_encoder_from_the_folder(made: Path) -> None:
    saved = {key.removeprefix("bert."): value for key, value in load_file(made / "model.safetensors").items()}
    one, again, other = (build(made, seed=seed)[1] for seed in (1, 1, 2))
    for key, value in one.bert.state_dict().items():
        assert torch.equal(value, saved[key])
        assert torch.equal(value, other.bert.state_dict()[key])
    assert torch.equal(one.classifier.weight, again.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_setting_of_dropout_applies_to_all_layers(made: Path) -> None:
    for dropout in (0.0, 0.25):
        model = build(made, dropout=dropout)[1]
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert len(rates) > 5
        assert set(rates) == {dropout}
        assert model.bert.config.attention_probs_dropout_prob == dropout


def old_names(weights: Weights) -> Weights:
    return {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in weights.items()}


CHANGES: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "published for TensorFlow first": (old_names, "pytorch_model.bin"),
    "of the encoder alone": (
        lambda w: {key.removeprefix("bert."): value for key, value in w.items() if key.startswith("bert.")},
        "model.safetensors",
    ),
    "with numbers that newer ones leave out": (
        lambda w: w | {"bert.embeddings.position_ids": torch.arange(64)[None]}, "pytorch_model.bin"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_read_in_each_published_form(made: Path, folder: Path, change: str) -> None:
    function, name = CHANGES[change]
    change_weights(folder, function, name=name)
    given, expected = build(folder)[1].state_dict(), build(made)[1].state_dict()
    assert all(torch.equal(given[key], value) for key, value in expected.items())


def test_weights_in_several_files_and_half_precision_are_read(made: Path, folder: Path) -> None:
    weights = {key: value.half() for key, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    keys = sorted(weights)
    for number, part in enumerate((keys[:20], keys[20:])):
        save_file({key: weights[key] for key in part}, folder / f"model-{number}.safetensors")
    listed = {key: f"model-{int(key in keys[20:])}.safetensors" for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    given, expected = build(folder)[1].state_dict(), build(made)[1].state_dict()
    for key, value in expected.items():
        assert given[key].dtype == torch.float32
        torch.testing.assert_close(given[key], value, atol=1e-3, rtol=1e-3)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"bert: must hold weights that load, got: .*model-1.safetensors"):
        build(folder)


def test_skipped_weights_and_a_missing_pooler_are_reported(
    made: Path, folder: Path, notes: list[str]
) -> None:
    build(made)
    assert notes.pop().startswith(f"{made}: left out what config.json does not describe (cls.predictions.bias, ")
    change_json(folder / "config.json", num_hidden_layers=1)
    change_weights(folder, lambda w: {key: value for key, value in w.items() if not key.startswith("cls.")})
    build(folder)
    assert notes.pop().startswith(f"{folder}: left out what config.json does not describe (bert.encoder.layer.1.")
    change_weights(folder, lambda w: {key: value for key, value in w.items() if "pooler" not in key})
    build(folder)
    assert "no pooler.dense.bias, pooler.dense.weight, which start at random as the head does" in notes[1]


# Mistakes -------------------------------------------------------------------------------------------------------


def drop(*keys: str) -> Callable[[Path], None]:
    return lambda folder: change_weights(folder, lambda w: {k: v for k, v in w.items() if not k.endswith(keys)})


def drop_tokens(folder: Path, *tokens: str) -> None:
    path = folder / "vocab.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line for line in lines if line not in tokens) + "\n", encoding="utf-8")


def add_token(folder: Path) -> None:
    with (folder / "vocab.txt").open("a") as file:
        file.write("extra\n")


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json: must be a BERT's, got: .*No such file"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), r"config.json: must be a BERT's, got: Expecting"),
    "other model": (lambda f: change_json(f / "config.json", model_type="roberta"),
                    r"config.json: must be a BERT's, got: model_type roberta"),
    "no vocabulary": (lambda f: (f / "vocab.txt").unlink(),
                      r"must hold vocab.txt or tokenizer.json, got neither. A BERT's folder holds"),
    "damaged tokenizer": (lambda f: ((f / "vocab.txt").unlink(), (f / "tokenizer.json").write_text("{}")),
                          r"tokenizer.json: must be a vocabulary of word pieces, got: "),
    "no token that begins a text": (lambda f: drop_tokens(f, "[CLS]"),
                                    r"vocab.txt: must hold the tokens of a BERT, got no \[CLS\]\."),
    "no tokens of a BERT": (lambda f: drop_tokens(f, "[PAD]", "[UNK]", "[SEP]"),
                            r"must hold the tokens of a BERT, got no \[SEP\], \[UNK\], \[PAD\]\."),
    "larger vocabulary": (
        add_token, r"vocab.txt: must have at most the \d+ tokens that config.json says \(vocab_size\), got \d+\."),
    "embeddings of another size": (lambda f: change_json(f / "config.json", vocab_size=900),
                                   r"must hold weights that load, got: "),
    "lost layer": (drop("layer.1.output.dense.weight"),
                   r"got no encoder.layer.1.output.dense.weight\."),
    "fewer positions": (lambda f: change_json(f / "config.json", max_position_embeddings=40),
                        r"max_seq_len must be <= 40, as .*config.json says .*, got 48"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 2000),
                        r"must hold weights that load, got: .*header too large\. A BERT"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_folder_that_is_no_bert_gives_one_line(folder: Path, mistake: str) -> None:
    spoil, message = MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        build(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hfl/chinese-bert-wwm-ext", "/no/such/folder/at/all", __file__])
def test_missing_bert_folder_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"bert_dir must be a folder, got {name}, which is not one here") as caught:
        build(name)
    assert "\n" not in str(caught.value)


def test_missing_package_transformers_gives_one_line_with_the_way_out(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"the package transformers must be installed.*-e '.\[text\]'"):
        build(made)
