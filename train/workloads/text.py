"""Classification of texts, Chinese included: by a small encoder of characters, or by a BERT from a local directory."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from train.config import Config
from train.data import Samples
from train.data.sources.texts import TextSet, load_texts, read_lines
from train.workloads.bert import build_bert
from train.workloads.class_scores import class_scores, macro_f1, report
from train.workloads.pictures import confusion_picture
from train.workloads.text_encoder import Characters, Encoder
from train.workloads.workload import Sums, Workload


class Tokenize(Protocol):
    """Texts -> token numbers of each, at most `max_seq_len`, and how many were cut to that; `pad` fills a batch up."""

    pad: int

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]: ...


class TextSamples:
    """Tokenized texts in memory; a batch is as long as the longest of it. `lengths` lets the order put like beside like."""

    in_memory = True

    def __init__(self, texts: Sequence[str], labels: Sequence[int], tokenize: Tokenize) -> None:
        rows, self.num_cut = tokenize(texts)
        self.pad = tokenize.pad
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        # One tensor for all: a list of a million small ones takes ten times the memory
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 [B, T], and labels [B]."""
        lengths = self.lengths[indices]
        columns = torch.arange(int(lengths.max()))
        real = columns < lengths[:, None]
        where = (self.starts[indices][:, None] + columns).clamp(max=len(self.tokens) - 1)
        return torch.where(real, self.tokens[where].long(), self.pad), self.labels[indices]


def build(config: Config, *, pretrained: bool = True) -> Workload:
    """The workload of the texts in `data_dir`, `pretrained` as in `load`. Raises DataError, ConfigError."""
    found = load_texts(config)
    tokenize, model, notes, kind = _model(config, len(found.classes), found.characters, pretrained=pretrained)

    def samples(part: TextSet) -> TextSamples:
        return TextSamples(part.texts, part.labels, tokenize)

    def open_input(path: str) -> tuple[Samples, Callable[[int], str]]:
        lines = read_lines(path)
        return TextSamples(lines, [0] * len(lines), tokenize), lambda index: lines[index]

    train, evaluation = samples(found.train), samples(found.evaluation)
    for part, path in ((train, found.train.path), (evaluation, found.evaluation.path)):
        if part.num_cut:
            notes.append(f"{path}: {part.num_cut:,} of {len(part):,} texts are longer than max_seq_len={config.max_seq_len}: cut")
    task = TextClassification(num_classes=len(found.classes), label_smoothing=config.label_smoothing)
    return Workload(
        model=model,
        train=train,
        evaluation=evaluation,
        loss=task.loss,
        evaluate=task.evaluate,
        predict=task.predict,
        # With a digest: two ranks whose files differ in one character would train two vocabularies
        data_name=f"{found.name}-{found.digest}{kind}",
        data_origin=f"{found.train.path} and {found.evaluation.path.name}",
        classes=found.classes,
        unit="texts",
        input_name=lambda index: found.evaluation.texts[index],
        open_input=open_input,
        pictures=lambda model, sums, device: {"eval/confusion": confusion_picture(sums["confusion"], _plain(found.classes))},
        derived=lambda sums: {"macro_f1": macro_f1(sums["confusion"])},
        report=lambda sums: (report(sums["confusion"], found.classes), _details(sums["confusion"], found.classes)),
        notes=[*found.train.notes, *found.evaluation.notes, *notes],
    )


class TextClassification:
    """What a batch of tokens [B, T] and labels [B] means."""

    def __init__(self, *, num_classes: int, label_smoothing: float) -> None:
        self.num_classes, self.label_smoothing = num_classes, label_smoothing

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = model(batch[0])
        labels = batch[1].to(logits.device)  # DataParallel gathers the outputs where it was told to
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Sums:
        tokens, labels = batch
        logits = model(tokens).float()
        guess = logits.argmax(1)
        pairs = torch.bincount(labels * self.num_classes + guess, minlength=self.num_classes**2)
        return {
            "count": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (guess == labels).sum(),
            "confusion": pairs.view(self.num_classes, self.num_classes),
        }

    def predict(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, labels = model(batch[0]).float().softmax(1).max(1)
        return labels, probabilities


def _model(
    config: Config, num_classes: int, characters: tuple[str, ...], *, pretrained: bool
) -> tuple[Tokenize, nn.Module, list[str], str]:
    """How texts become numbers, the model of these, what to tell, and what the name of the data has for it."""
    if config.bert_dir is not None:
        words, bert, notes, digest = build_bert(config, num_classes=num_classes, pretrained=pretrained)
        return words, bert, notes, f"-bert-{digest}"
    tokenize = Characters(characters, max_seq_len=config.max_seq_len)
    return tokenize, Encoder(vocabulary=tokenize.size, num_classes=num_classes, dropout=config.dropout), [], ""


def _plain(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Names that Pillow's own font can draw."""
    return tuple(name if name.isascii() else f"class {number}" for number, name in enumerate(classes))


def _details(confusion: torch.Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    return {"classes": class_scores(confusion, classes), "confusion": confusion.tolist()}
