"""A BERT from a local folder, for `--workload text`: config.json, vocabulary and weights, read by transformers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from transformers.utils import logging

from rankup import UserError

from ..config import Config
from ..data import one_line

LAYOUT = "A BERT's folder holds config.json, vocab.txt (or tokenizer.json) and model.safetensors or pytorch_model.bin."
VOCABULARY = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")


class WordPieceTokenizer:
    """Text -> the numbers of its word pieces between [CLS] and [SEP]."""

    def __init__(self, folder: Path, *, max_seq_len: int) -> None:
        """Raises UserError for a vocabulary that is missing or no BERT's."""
        self.max_seq_len = max_seq_len
        self.path = next((path for name in VOCABULARY[1:3] if (path := folder / name).exists()), None)
        if self.path is None:  # transformers would go on with an empty one
            raise UserError(f"{folder}: must hold vocab.txt or tokenizer.json, got neither. {LAYOUT}")
        try:
            # "[PAD]" in a text is text, not padding
            self.tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True, split_special_tokens=True)
            vocabulary = self.tokenizer.get_vocab()
            self.size, self.pad = max(vocabulary.values()) + 1, vocabulary["[PAD]"]
        except Exception as error:  # many types
            raise UserError(f"{self.path}: must be a vocabulary of word pieces, got: {one_line(error)}.") from None
        held = self.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        if missing := [token for token in ("[CLS]", "[SEP]", "[UNK]", "[PAD]") if token not in held]:
            # transformers adds them with numbers that the weights do not know
            raise UserError(f"{self.path}: must hold the tokens of a BERT, got no {', '.join(missing)}.")

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The token numbers of each text, at most max_seq_len, and how many texts were cut; those end in [SEP] too."""
        rows = self.tokenizer(list(texts), verbose=False).input_ids
        cut = [[*row[: self.max_seq_len - 1], row[-1]] if len(row) > self.max_seq_len else row for row in rows]
        return cut, sum(len(row) > self.max_seq_len for row in rows)


class Bert(BertForSequenceClassification):  # type: ignore[misc]  # mypy does not read its types
    """int64 [B, T], padded with the config's `pad_token_id` -> logits [B, C]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().forward(tokens, attention_mask=(tokens != self.config.pad_token_id).long())
        logits: torch.Tensor = found.logits
        return logits


def build_bert(
    config: Config, *, num_classes: int, pretrained: bool
) -> tuple[WordPieceTokenizer, Bert, list[str], str]:
    """The tokenizer and the model of `bert_dir`, notes for the log, and a digest of the vocabulary and the config.
    `pretrained`: with the folder's weights; else a checkpoint's will follow. Raises UserError that names the file."""
    logging.set_verbosity_error()  # what it reports of weights, the notes say
    logging.disable_progress_bar()
    assert config.bert_dir is not None
    folder = Path(config.bert_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"bert_dir must be a folder, got {config.bert_dir}, which is not one here. {LAYOUT}")
    shape = _shape(folder, config.dropout, num_classes)
    tokenizer = WordPieceTokenizer(folder, max_seq_len=config.max_seq_len)
    if tokenizer.size > shape.vocab_size:
        rule = f"at most the {shape.vocab_size} tokens that config.json says (vocab_size)"
        raise UserError(f"{tokenizer.path}: must have {rule}, got {tokenizer.size}.")
    if config.max_seq_len > shape.max_position_embeddings:
        rule = f"<= {shape.max_position_embeddings}, as {folder}/config.json says (max_position_embeddings)"
        raise UserError(f"max_seq_len must be {rule}, got {config.max_seq_len}. Longer texts are cut.")
    shape.pad_token_id = tokenizer.pad
    model, notes = _read_weights(folder, shape) if pretrained else (Bert(shape), [])
    contents = b"".join((folder / name).read_bytes() for name in VOCABULARY if (folder / name).exists())
    return tokenizer, model, notes, hashlib.sha256(contents).hexdigest()[:8]


def _shape(folder: Path, dropout: float, num_classes: int) -> BertConfig:
    """config.json as transformers has it, with our dropout in place of its own. Raises UserError."""
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if (kind := given.get("model_type", "bert")) != "bert":  # the first BERTs' files do not have it
            raise ValueError(f"model_type {kind}; other models need a workload of your own")
        ours = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), dropout)
        return BertConfig.from_dict({**given, **ours}, num_labels=num_classes)
    except Exception as error:  # many types
        raise UserError(f"{path}: must be a BERT's, got: {one_line(error)}. {LAYOUT}") from None


def _read_weights(folder: Path, shape: BertConfig) -> tuple[Bert, list[str]]:
    """The model with the folder's weights, and notes on what was left out or starts at random: beside the head only the
    pooler, without which encoders are published. For others transformers itself would go on with random numbers."""
    try:
        model, info = Bert.from_pretrained(
            folder, config=shape, local_files_only=True, dtype=torch.float32, weights_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file raises one of half a dozen unrelated types
        raise UserError(f"{folder}: must hold weights that load, got: {one_line(error)}. {LAYOUT}") from None
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("classifier."))
    extra = sorted(info["unexpected_keys"])
    if lacking := [key for key in missing if not key.startswith("bert.pooler.")]:
        raise UserError(f"{folder}: must hold all of the encoder that config.json describes, got no {_some(lacking)}.")
    notes = [f"{folder}: left out what config.json does not describe ({_some(extra)})"] if extra else []
    if missing:
        notes.append(f"{folder}: no {_some(missing)}, which start at random as the head does")
    return model.train(), notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
