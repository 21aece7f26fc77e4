"""The workload text: classification of texts, also Chinese, by a small character encoder or a BERT."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..config import Config
from ..data.samples import Samples
from ..data.sources import huggingface
from ..data.sources.texts import load_texts, read_lines
from .bert import WordPieceTokenizer, build_bert
from .classification import Classification, macro_f1
from .workload import LOG, Workload

PAD, UNKNOWN, START = 0, 1, 2
FIRST = 3  # the number of the most frequent character
MOST = 8000  # at most this many characters get a number
KERNEL_SIZES = (2, 3, 4)  # in characters: about a word of Chinese or a syllable of English


class CharacterTokenizer:
    """Turns a text into START and the numbers of its characters. Characters without a number become UNKNOWN."""

    def __init__(self, texts: Sequence[str], *, max_seq_len: int) -> None:
        """`texts`: the training texts, whose most frequent characters get numbers."""
        counts = Counter(character for text in texts for character in text)
        characters = sorted(counts, key=lambda character: (-counts[character], character))
        self.number = {character: FIRST + index for index, character in enumerate(characters[:MOST])}
        self.max_seq_len, self.size, self.pad = max_seq_len, FIRST + len(self.number), PAD

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """Return the token numbers of each text, at most max_seq_len, and how many texts were cut."""
        end = self.max_seq_len - 1
        rows = [[START, *(self.number.get(character, UNKNOWN) for character in text[:end])] for text in texts]
        return rows, sum(len(text) > end for text in texts)


class TextEncoder(nn.Module):
    """A small text classifier: tokens, int64 [B, T], padded with PAD -> logits [B, C]. It has convolutions over two to
    four characters, the maximum of each filter over the text, and a linear layer (Kim 2014, arXiv:1408.5882)."""

    def __init__(self, *, vocabulary: int, num_classes: int, dropout: float, width: int = 96) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width, padding_idx=PAD)
        # With torch's standard deviation of 1 the default learning rate, chosen for images, would be too high.
        nn.init.normal_(self.characters.weight[UNKNOWN:], std=0.2)  # PAD stays 0
        self.words = nn.ModuleList(nn.Conv1d(width, width, size) for size in KERNEL_SIZES)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(len(KERNEL_SIZES) * width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        characters = self.characters(tokens).transpose(1, 2)
        found = []
        for size, words in zip(KERNEL_SIZES, self.words, strict=True):
            # Append zeros, so that a filter also starts at the last characters. Mask filters that start in the padding.
            hits = words(functional.pad(characters, (0, size - 1))).relu()
            found.append((hits * (tokens != PAD)[:, None]).amax(2))
        logits: torch.Tensor = self.head(self.dropout(torch.cat(found, 1)))
        return logits


Tokenizer = CharacterTokenizer | WordPieceTokenizer


class TextSamples:
    """Tokenized texts in memory. A batch is as long as its longest text. `num_cut`: how many texts were cut."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], tokenizer: Tokenizer) -> None:
        rows, self.num_cut = tokenizer(texts)
        self.pad = tokenizer.pad
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        # Keep all texts in one tensor: a list of a million small tensors takes ten times the memory.
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, int64 [B, T], and labels, int64 [B]."""
        places = zip(self.starts[indices].tolist(), self.lengths[indices].tolist(), strict=True)
        rows = [self.tokens[start : start + length] for start, length in places]
        return pad_sequence(rows, batch_first=True, padding_value=self.pad).long(), self.labels[indices]


def build(config: Config, *, pretrained: bool = True) -> Workload:
    """Build the workload of the texts in `data_dir` or of dataset hf:... `pretrained`: see `load`. Raises UserError."""
    read = huggingface.load_texts if config.dataset.startswith("hf:") else load_texts
    train_part, eval_part, classes = read(config)
    content = repr((train_part.texts, [*train_part.labels], classes)).encode("utf-8", "surrogatepass")
    data_name = f"{train_part.path.parent.resolve().name.removeprefix('hf:')}-{hashlib.sha256(content).hexdigest()[:8]}"
    num_classes = len(classes)
    tokenizer: Tokenizer
    model: nn.Module
    if config.bert_dir is not None:
        tokenizer, model, digest = build_bert(config, num_classes=num_classes, pretrained=pretrained)
        data_name += f"-bert-{digest}"
    else:
        tokenizer = CharacterTokenizer(train_part.texts, max_seq_len=config.max_seq_len)
        model = TextEncoder(vocabulary=tokenizer.size, num_classes=num_classes, dropout=config.dropout)

    def open_input(path: str) -> tuple[Samples, Callable[[int], str]]:
        lines = read_lines(path)
        return TextSamples(lines, [0] * len(lines), tokenizer), lambda index: lines[index]

    number = {name: index for index, name in enumerate(classes)}
    train, evaluation = (
        TextSamples(part.texts[: limit or None], [number[label] for label in part.labels[: limit or None]], tokenizer)
        for part, limit in ((train_part, config.limit_train), (eval_part, config.limit_eval))
    )
    for part, path in ((train, train_part.path), (evaluation, eval_part.path)):
        if part.num_cut:
            longer = f"{part.num_cut:,} of {len(part):,} texts are longer than max_seq_len={config.max_seq_len}"
            LOG.info(f"{path}: {longer}: cut")
    task = Classification(num_classes=num_classes, label_smoothing=config.label_smoothing)
    return Workload(
        model=model, train=train, evaluation=evaluation,
        loss=task.loss, evaluate=task.evaluate, predict=task.predict,
        # The name contains digests, so that ranks notice different files: these would give them different vocabularies.
        data_name=data_name,
        data_origin=f"{train_part.path} and {eval_part.path.name}",
        classes=classes, unit="texts", input_name=lambda index: eval_part.texts[index],
        open_input=open_input,
        derived=lambda sums: {"macro_f1": macro_f1(sums["confusion"])},
    )
