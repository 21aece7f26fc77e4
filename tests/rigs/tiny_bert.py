"""A small BERT for tests: a real transformers model with random weights and the vocabulary of the shipped texts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from train.data.sources.texts import SAMPLE

# Imported once by the forking process, not by each of its jobs
SLOW = ("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert", "safetensors.torch")
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
         "max_position_embeddings": 64, "initializer_range": 0.1}


def of_transformers(folder: Path) -> Any:
    """Return transformers' own classifier for the folder. Only the process that needs transformers imports it, not
    every process that collects tests."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(folder, num_labels=5, local_files_only=True)


def sample_texts(part: str = "train") -> list[str]:
    lines = (SAMPLE / f"{part}.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition("\t")[2] for line in lines]


def vocabulary() -> list[str]:
    """Return special tokens, the sample's characters, their forms inside words, and its most frequent words."""
    texts = [text.lower() for text in sample_texts()]
    words = Counter(word for text in texts for word in text.split() if word.isascii() and word.isalpha() and word[1:])
    characters = sorted({character for text in texts for character in text if not character.isspace()})
    inside = [f"##{character}" for character in characters if character.isascii() and character.isalnum()]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *inside, *sorted(words)[:100]]


def make_bert(folder: Path, **shape: Any) -> Path:
    """Write a folder like a published BERT's: config.json, vocab.txt, and weights with the pre-training's head."""
    from transformers import BertConfig, BertForPreTraining
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = vocabulary()
    torch.manual_seed(1)
    model = BertForPreTraining(BertConfig(vocab_size=len(tokens), **{**SHAPE, **shape}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path, change: Any, *, name: str = "model.safetensors") -> None:
    """Write what `change` returns for the weights to the file `name`."""
    from safetensors.torch import load_file, save_file

    source = folder / "model.safetensors"
    weights = {key: value.clone() for key, value in load_file(source).items()}
    source.unlink()
    weights = change(weights)
    torch.save(weights, folder / name) if name.endswith(".bin") else save_file(weights, folder / name)
