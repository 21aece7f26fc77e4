"""A BERT from a local folder, for `--workload text`: config.json, vocabulary and weights, as transformers stores them.

Nothing is downloaded unless `bert_download` asks for it. Needs the extra `text`: pip install 'rankup[text]'.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankup.errors import ConfigError, DataError
from train.config import Config
from train.workloads import bert_files
from train.workloads.bert_files import LAYOUT, one_line, read_json, read_text

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
TOKENIZED_AT_ONCE = 1000  # texts: enough for its threads, and not a second copy of all texts in memory
HIGHEST_LR = 1e-3
HEADS = ("cls", "classifier", "qa_outputs")  # of the pre-training, and of other tasks
COUNTERS = ("position_ids", "embeddings.token_type_ids")  # 0, 1, 2, ...: older versions saved them as weights


class WordPieceTokenizer:
    """Text -> the numbers of its word pieces between [CLS] and [SEP].

    The vocabulary is the folder's vocab.txt, else its tokenizer.json.
    """

    def __init__(self, folder: Path, *, max_seq_len: int) -> None:
        """Raises DataError, one line with the file's name, for a vocabulary that is missing or no BERT's."""
        self.max_seq_len = max_seq_len
        plain = folder / "vocab.txt"
        self.path = plain if plain.exists() else folder / "tokenizer.json"
        try:
            self.tokenizer, vocabulary = _from_vocab_txt(folder) if plain.exists() else _from_json(self.path)
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exceptions
            problem = f"must be a vocabulary of word pieces, got: {one_line(error)}"
            raise DataError(f"{self.path}: {problem}. {LAYOUT}") from None
        self.size = max(vocabulary.values()) + 1
        self.tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text, not padding
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.pad, self.end = vocabulary["[PAD]"], vocabulary["[SEP]"]

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The token numbers of each text, at most max_seq_len, and how many texts were cut; those end in [SEP] too."""
        rows, num_cut = [], 0
        for start in range(0, len(texts), TOKENIZED_AT_ONCE):
            for found in self.tokenizer.encode_batch(list(texts[start : start + TOKENIZED_AT_ONCE])):
                row = found.ids
                if len(row) > self.max_seq_len:
                    row, num_cut = [*row[: self.max_seq_len - 1], self.end], num_cut + 1
                rows.append(row)
        return rows, num_cut


def _from_vocab_txt(folder: Path) -> tuple[Any, dict[str, int]]:
    """A tokenizer, and token -> number. Its options are those of tokenizer_config.json, if there is one."""
    from tokenizers import BertWordPieceTokenizer

    path = folder / "vocab.txt"
    lines = read_text(path).removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(lines)}
    _check_special(path, vocabulary)
    given = folder / "tokenizer_config.json"
    options = read_json(given) if given.exists() else {}
    tokenizer = BertWordPieceTokenizer(
        vocabulary, lowercase=options.get("do_lower_case", True), strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    return tokenizer._tokenizer, vocabulary  # the wrapper does not pass encode_special_tokens on


def _from_json(path: Path) -> tuple[Any, dict[str, int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read_text(path))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    _check_special(path, vocabulary)
    return tokenizer, vocabulary


def _check_special(path: Path, vocabulary: dict[str, int]) -> None:
    if missing := [token for token in SPECIAL if token not in vocabulary]:
        raise DataError(f"{path}: must hold the tokens {', '.join(SPECIAL)}, got no {missing[0]}. {LAYOUT}")


class Bert(nn.Module):
    """int64 [B, T], padded with `pad` -> logits [B, C]. Its weights are named as in BertForSequenceClassification."""

    def __init__(self, encoder: nn.Module, head: nn.Linear, *, dropout: float, pad: int) -> None:
        super().__init__()
        self.bert, self.dropout, self.classifier, self.pad = encoder, nn.Dropout(dropout), head, pad

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.bert(input_ids=tokens, attention_mask=(tokens != self.pad).long())
        logits: torch.Tensor = self.classifier(self.dropout(found.pooler_output))
        return logits


def build_bert(
    config: Config, *, num_classes: int, pretrained: bool
) -> tuple[WordPieceTokenizer, Bert, list[str], str]:
    """The tokenizer and the model of `bert_dir`, notes for the log, and a digest of the vocabulary and the config.

    `pretrained`: with the folder's weights. Without, a checkpoint's will follow, and the folder needs none. The head is
    random, by the seed alone. Raises ConfigError and DataError, one line that names the file.
    """
    assert config.bert_dir is not None
    bert_files.need_transformers()
    folder = bert_files.find_folder(config.bert_dir, download=config.bert_download, pretrained=pretrained)
    shape = _shape(folder, config.dropout)
    tokenizer = WordPieceTokenizer(folder, max_seq_len=config.max_seq_len)
    if tokenizer.size > shape.vocab_size:
        raise DataError(
            f"{tokenizer.path}: must have at most the {shape.vocab_size} tokens that config.json says (vocab_size), "
            f"got {tokenizer.size}. They are of two models: put those of one into a folder."
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
    notes = _load_weights(encoder, folder) if pretrained else []
    if tokenizer.size < shape.vocab_size:
        tokens = f"{tokenizer.size:,} tokens for {shape.vocab_size:,} embeddings"
        notes.append(f"{tokenizer.path}: {tokens}, the rest is never used")
    if pretrained and config.lr > HIGHEST_LR:
        notes.append(
            f"lr {config.lr:g} is far above what suits a trained BERT, 1e-5 to 5e-5 with adamw: train/configs/bert.yaml"
        )
    contents = b"".join((folder / name).read_bytes() for name in bert_files.VOCABULARY if (folder / name).exists())
    model = Bert(encoder, head, dropout=config.dropout, pad=tokenizer.pad)
    return tokenizer, model, notes, hashlib.sha256(contents).hexdigest()[:8]


def _shape(folder: Path, dropout: float) -> Any:
    """config.json as transformers' BertConfig, with our dropout in place of its own. Raises DataError."""
    from transformers import BertConfig

    path = folder / "config.json"
    given = read_json(path)
    kind = given.get("model_type", "bert")  # the first BERTs' files do not have it
    if kind != "bert":
        raise DataError(f'{path}: model_type must be bert, got "{kind}". Other models need a workload of your own.')
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    try:
        shape = BertConfig.from_dict({**given, **rates})
        if shape.hidden_size % shape.num_attention_heads:
            heads = shape.num_attention_heads
            raise ValueError(f"hidden_size {shape.hidden_size} is no multiple of num_attention_heads {heads}")
    except Exception as error:  # the library's own checks raise their own types
        raise DataError(f"{path}: must be a BERT's, got: {one_line(error)}.") from None
    return shape


def _load_weights(encoder: nn.Module, folder: Path) -> list[str]:
    """Load the folder's weights into the encoder; returns notes on what was left out or starts at random.

    Raises DataError where one of the encoder's weights is missing, unknown or of another shape: transformers itself
    would go on with random numbers there.
    """
    name = next((name for name in bert_files.WEIGHTS if bert_files.weight_files(folder, name)), None)
    if name is None:
        raise DataError(f"{folder}: must hold weights, got none. {LAYOUT}")
    path = folder / name
    given: dict[str, torch.Tensor] = {}
    for part in bert_files.weight_files(folder, name):
        given |= bert_files.read_weights(part)
    own = encoder.state_dict()
    known, heads = _encoder_weights(given)
    missing = [key for key in own if key not in known]
    # Only the pooler may be missing: it belongs to a head, and encoders are published without it.
    if lacking := [key for key in missing if not key.startswith("pooler.")]:
        raise DataError(
            f"{path}: must hold all of the encoder that config.json describes, got no {_some(lacking)}. It is of "
            "another model, or of another library."
        )
    if extra := [key for key in known if key not in own]:
        raise DataError(f"{path}: must hold the encoder that config.json describes, got also {_some(extra)}.")
    for key, value in known.items():
        if value.shape != own[key].shape:
            expected, got = tuple(own[key].shape), tuple(value.shape)
            raise DataError(f"{path}: {key} must have shape {expected} by config.json, got {got}.")
    encoder.load_state_dict(known, strict=False)
    notes = [f"{path}: left out what belongs to other heads ({_some(heads)})"] if heads else []
    if missing:
        notes.append(f"{path}: no {_some(missing)}, which start at random as the head does")
    return notes


def _encoder_weights(given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The encoder's weights under today's names, and the names of those that belong to heads."""
    whole_model = any(key.startswith("bert.") for key in given)  # else it is the encoder alone, without the prefix
    known, heads = {}, []
    for key, value in given.items():
        # The first checkpoints, converted from TensorFlow, have its names.
        plain = key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if whole_model != key.startswith("bert.") or plain.split(".")[0] in HEADS:
            heads.append(key)
        elif not plain.endswith(COUNTERS):
            known[plain.removeprefix("bert.")] = value
    return known, heads


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
