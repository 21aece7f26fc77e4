"""A BERT for `--workload text`. transformers reads config.json, vocabulary and weights from a local folder."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankup import UserError

from ..config import Config
from ..data import one_line
from .workload import LOG

LAYOUT = "A BERT's folder holds config.json, vocab.txt (or tokenizer.json) and model.safetensors or pytorch_model.bin."
VOCABULARY = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")


class WordPieceTokenizer:
    """Turns a text into the numbers of its word pieces, between [CLS] and [SEP]."""

    def __init__(self, folder: Path, *, max_seq_len: int) -> None:
        """Raises UserError if the vocabulary is missing or is not a BERT's."""
        from transformers import BertTokenizer

        self.max_seq_len = max_seq_len
        self.path = next((path for name in VOCABULARY[1:3] if (path := folder / name).exists()), None)
        if self.path is None:  # transformers would continue with an empty vocabulary
            raise UserError(f"{folder}: must hold vocab.txt or tokenizer.json, got neither. {LAYOUT}")
        try:
            # split_special_tokens: "[PAD]" in a text is text, not padding
            self.tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True, split_special_tokens=True)
            vocabulary = self.tokenizer.get_vocab()
            self.size, self.pad = max(vocabulary.values()) + 1, vocabulary["[PAD]"]
        except Exception as error:  # of many types
            raise UserError(f"{self.path}: must be a vocabulary of word pieces, got: {one_line(error)}.") from None
        held = self.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        if missing := [token for token in ("[CLS]", "[SEP]", "[UNK]", "[PAD]") if token not in held]:
            # transformers adds missing tokens, with numbers for which there are no weights
            raise UserError(f"{self.path}: must hold the tokens of a BERT, got no {', '.join(missing)}.")

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """Return the token numbers of each text, at most max_seq_len with the [SEP], and how many texts were cut."""
        rows = self.tokenizer(list(texts), verbose=False).input_ids
        cut = [[*row[: self.max_seq_len - 1], row[-1]] if len(row) > self.max_seq_len else row for row in rows]
        return cut, sum(len(row) > self.max_seq_len for row in rows)


class Bert(nn.Module):
    """A BERT: int64 [B, T], padded with `pad` -> logits [B, C], weights named as in BertForSequenceClassification."""

    def __init__(self, encoder: nn.Module, head: nn.Linear, *, dropout: float, pad: int) -> None:
        super().__init__()
        self.bert, self.dropout, self.classifier, self.pad = encoder, nn.Dropout(dropout), head, pad

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.bert(input_ids=tokens, attention_mask=(tokens != self.pad).long())
        logits: torch.Tensor = self.classifier(self.dropout(found.pooler_output))
        return logits


def build_bert(config: Config, *, num_classes: int, pretrained: bool) -> tuple[WordPieceTokenizer, Bert, str]:
    """Return the tokenizer and the model of `bert_dir`, and a digest of vocabulary and config. `pretrained`: load the
    folder's weights; False: the caller loads a checkpoint later. Raises UserError, which names the file."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise UserError(
            "bert_dir: the package transformers must be installed. pip install 'rankup[text]', or -e '.[text]' in a "
            "checkout."
        ) from None
    transformers.logging.set_verbosity_error()  # `_read_encoder` reports missing weights in one line
    transformers.logging.disable_progress_bar()
    assert config.bert_dir is not None
    folder = Path(config.bert_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"bert_dir must be a folder, got {config.bert_dir}, which is not one here. {LAYOUT}")
    shape = _shape(folder, config.dropout)
    tokenizer = WordPieceTokenizer(folder, max_seq_len=config.max_seq_len)
    if tokenizer.size > shape.vocab_size:
        rule = f"at most the {shape.vocab_size} tokens that config.json says (vocab_size)"
        raise UserError(f"{tokenizer.path}: must have {rule}, got {tokenizer.size}.")
    if config.max_seq_len > shape.max_position_embeddings:
        rule = f"<= {shape.max_position_embeddings}, as {folder}/config.json says (max_position_embeddings)"
        raise UserError(f"max_seq_len must be {rule}, got {config.max_seq_len}. Longer texts are cut.")
    head = nn.Linear(shape.hidden_size, num_classes)
    nn.init.normal_(head.weight, std=shape.initializer_range)
    nn.init.zeros_(head.bias)
    encoder = _read_encoder(folder, shape) if pretrained else transformers.BertModel(shape)
    contents = b"".join((folder / name).read_bytes() for name in VOCABULARY if (folder / name).exists())
    model = Bert(encoder, head, dropout=config.dropout, pad=tokenizer.pad)
    return tokenizer, model, hashlib.sha256(contents).hexdigest()[:8]


def _shape(folder: Path, dropout: float) -> Any:
    """Read config.json as transformers' BertConfig, with `dropout` in place of the file's values. Raises UserError."""
    from transformers import BertConfig

    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if (kind := given.get("model_type", "bert")) != "bert":  # files of the first BERTs have no model_type
            raise ValueError(f"model_type {kind}; other models need a workload of your own")
        return BertConfig.from_dict({**given, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    except Exception as error:  # of many types
        raise UserError(f"{path}: must be a BERT's, got: {one_line(error)}. {LAYOUT}") from None


def _read_encoder(folder: Path, shape: Any) -> nn.Module:
    """Load the encoder. Log unused weights, and a missing pooler, which starts at random: many published encoders have
    none. Raises UserError for other missing weights, which transformers would replace with random numbers."""
    from transformers import BertModel

    try:
        encoder, info = BertModel.from_pretrained(
            folder, config=shape, local_files_only=True, dtype=torch.float32, weights_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file raises one of several unrelated types
        raise UserError(f"{folder}: must hold weights that load, got: {one_line(error)}. {LAYOUT}") from None
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lacking := [key for key in missing if not key.startswith("pooler.")]:
        raise UserError(f"{folder}: must hold all of the encoder that config.json describes, got no {_some(lacking)}.")
    if extra:
        LOG.info(f"{folder}: left out what config.json does not describe ({_some(extra)})")
    if missing:
        LOG.info(f"{folder}: no {_some(missing)}, which start at random as the head does")
    trained: nn.Module = encoder.train()
    return trained


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
