"""A BERT from a local folder, for `workload text`: config.json, a vocabulary and weights, as Hugging Face's transformers keeps
them. Nothing is downloaded unless `bert_download` asks for it. Needs the extra `text`."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.config import Config
from train.errors import ConfigError, DataError
from train.workloads.bert_files import (
    LAYOUT,
    WEIGHTS,
    WORDS,
    find_folder,
    need_transformers,
    one_line,
    read_json,
    read_text,
    read_weights,
    weight_files,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
AT_ONCE = 1000  # texts tokenized together


class WordPieces:
    """Text -> numbers of its word pieces between [CLS] and [SEP], by the folder's vocab.txt, else its tokenizer.json."""

    def __init__(self, folder: Path, *, max_seq_len: int) -> None:
        from tokenizers import BertWordPieceTokenizer, Tokenizer

        self.max_seq_len = max_seq_len
        self.path = folder / "vocab.txt"
        try:
            if self.path.exists():
                vocabulary = {token: number for number, token in enumerate(read_text(self.path).removesuffix("\n").split("\n"))}
                options = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
                lowercase, accents = options.get("do_lower_case", True), options.get("strip_accents")
                _check_special(self.path, vocabulary)
                self.tokenizer = BertWordPieceTokenizer(
                    vocabulary, lowercase=lowercase, strip_accents=accents,
                    handle_chinese_chars=options.get("tokenize_chinese_chars", True),
                )._tokenizer
                self.size = max(vocabulary.values()) + 1
            else:
                self.path = folder / "tokenizer.json"
                self.tokenizer = Tokenizer.from_str(read_text(self.path))
                vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
                _check_special(self.path, vocabulary)
                self.size = max(vocabulary.values()) + 1
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"{self.path}: must be a vocabulary of word pieces, got: {one_line(error)}. {LAYOUT}") from None
        self.tokenizer.encode_special_tokens = True  # a text that reads "[PAD]" is a text, and no padding
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.pad, self.end = vocabulary["[PAD]"], vocabulary["[SEP]"]

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        rows, num_cut = [], 0
        for start in range(0, len(texts), AT_ONCE):
            for found in self.tokenizer.encode_batch(list(texts[start : start + AT_ONCE])):
                row = found.ids
                if len(row) > self.max_seq_len:
                    row, num_cut = [*row[: self.max_seq_len - 1], self.end], num_cut + 1
                rows.append(row)
        return rows, num_cut


class Bert(nn.Module):
    """int64 [B, T], filled up with `pad` -> logits [B, C]. Its weights have the names of BertForSequenceClassification's."""

    def __init__(self, encoder: nn.Module, head: nn.Linear, *, dropout: float, pad: int) -> None:
        super().__init__()
        self.bert, self.dropout, self.classifier, self.pad = encoder, nn.Dropout(dropout), head, pad

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.bert(input_ids=tokens, attention_mask=(tokens != self.pad).long())
        logits: torch.Tensor = self.classifier(self.dropout(found.pooler_output))
        return logits


def build_bert(config: Config, *, num_classes: int, pretrained: bool) -> tuple[WordPieces, Bert, list[str], str]:
    """The tokenizer and the model of `bert_dir`, lines to tell, and a digest of what shapes both, weights left out.

    `pretrained`: with the folder's weights; without them it is for a checkpoint's, and the folder needs none. The head is
    random, by the seed alone. Raises ConfigError and DataError, one line that names the file.
    """
    assert config.bert_dir is not None
    need_transformers()
    folder = find_folder(config.bert_dir, download=config.bert_download, pretrained=pretrained)
    shape = _shape(folder, config.dropout)
    words = WordPieces(folder, max_seq_len=config.max_seq_len)
    if words.size > shape.vocab_size:
        raise DataError(
            f"{words.path}: must have at most the {shape.vocab_size} tokens that config.json says (vocab_size), got "
            f"{words.size}. They are of two models: put those of one into a folder."
        )
    if config.max_seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"max_seq_len must be <= {shape.max_position_embeddings}, the positions that {folder}/config.json has "
            f"(max_position_embeddings), got {config.max_seq_len}. Longer texts are cut; set --max-seq-len."
        )
    from transformers import BertModel

    head = nn.Linear(shape.hidden_size, num_classes)
    nn.init.normal_(head.weight, std=shape.initializer_range)
    nn.init.zeros_(head.bias)
    encoder = BertModel(shape)
    notes = _load(encoder, folder) if pretrained else []
    if words.size < shape.vocab_size:
        notes.append(f"{words.path}: {words.size:,} tokens for {shape.vocab_size:,} embeddings, the rest is never used")
    if pretrained and config.lr > 1e-3:
        notes.append(f"lr {config.lr:g} is far above what a trained BERT bears, 1e-5 to 5e-5 with adamw: train/configs/bert.yaml")
    contents = b"".join((folder / name).read_bytes() for name in WORDS if (folder / name).exists())
    return words, Bert(encoder, head, dropout=config.dropout, pad=words.pad), notes, hashlib.sha256(contents).hexdigest()[:8]


def _shape(folder: Path, dropout: float) -> Any:
    """config.json as transformers' BertConfig, with our dropout in place of its own."""
    from transformers import BertConfig

    path = folder / "config.json"
    given = read_json(path)
    kind = given.get("model_type", "bert")  # the first BERTs' have none
    if kind != "bert":
        raise DataError(f'{path}: model_type must be bert, got "{kind}". Other models need a workload of your own.')
    try:
        shape = BertConfig.from_dict({**given, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
        if shape.hidden_size % shape.num_attention_heads:
            raise ValueError(f"hidden_size {shape.hidden_size} is no multiple of num_attention_heads {shape.num_attention_heads}")
    except Exception as error:  # the library's own checks raise their own types
        raise DataError(f"{path}: must be a BERT's, got: {one_line(error)}.") from None
    return shape


def _load(encoder: nn.Module, folder: Path) -> list[str]:
    """The folder's weights into the encoder; lines that say what was left out or starts at random. Raises DataError where one
    of the encoder's is missing, left over or of another shape: transformers would go on with random numbers there."""
    name = next((name for name in WEIGHTS if weight_files(folder, name)), None)
    if name is None:
        raise DataError(f"{folder}: must hold weights, got none. {LAYOUT}")
    path = folder / name
    given: dict[str, torch.Tensor] = {}
    for part in weight_files(folder, name):
        given |= read_weights(part)
    own = encoder.state_dict()
    inside = any(key.startswith("bert.") for key in given)
    known, heads = {}, []
    for key, value in given.items():
        # The first checkpoints, made from TensorFlow's, call them gamma and beta
        plain = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[1] == 'gamma' else 'bias'}", key)
        if inside != key.startswith("bert.") or plain.split(".")[0] in ("cls", "classifier", "qa_outputs"):
            heads.append(key)
        elif not plain.endswith(("position_ids", "embeddings.token_type_ids")):  # numbers that count up, saved long ago
            known[plain.removeprefix("bert.")] = value
    missing = [key for key in own if key not in known]
    lacking = [key for key in missing if not key.startswith("pooler.")]
    if lacking:
        raise DataError(
            f"{path}: must hold all of the encoder that config.json describes, got no {_some(lacking)}. It is of "
            "another model, or of another library."
        )
    if extra := [key for key in known if key not in own]:
        raise DataError(f"{path}: must hold the encoder that config.json describes, got also {_some(extra)}.")
    for key, value in known.items():
        if value.shape != own[key].shape:
            raise DataError(f"{path}: {key} must have shape {tuple(own[key].shape)} by config.json, got {tuple(value.shape)}.")
    encoder.load_state_dict(known, strict=False)
    notes = [f"{path}: left out what belongs to other heads ({_some(heads)})"] if heads else []
    return notes + ([f"{path}: no {_some(missing)}, which start at random as the head does"] if missing else [])


def _check_special(path: Path, vocabulary: dict[str, int]) -> None:
    if missing := [token for token in SPECIAL if token not in vocabulary]:
        raise DataError(f"{path}: must hold the tokens {', '.join(SPECIAL)}, got no {missing[0]}. {LAYOUT}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
