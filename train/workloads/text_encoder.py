"""A small encoder of characters, trained from scratch: what `--workload text` trains without a BERT."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

PAD, UNKNOWN, START = 0, 1, 2
FIRST = 3  # the number of the most frequent character
KERNEL_SIZES = (2, 3, 4)  # characters that a convolution sees at once: about a word of Chinese, a syllable of English


class CharacterTokenizer:
    """Text -> START and the numbers of its characters; those that are not in the training texts are UNKNOWN."""

    def __init__(self, characters: Sequence[str], *, max_seq_len: int, limit: int = 8000) -> None:
        """`characters`: those of the training texts, the most frequent first. Only `limit` of them get a number."""
        self.number = {character: FIRST + index for index, character in enumerate(characters[:limit])}
        self.max_seq_len, self.size, self.pad = max_seq_len, FIRST + len(self.number), PAD

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The token numbers of each text, at most max_seq_len, and how many texts were cut."""
        end = self.max_seq_len - 1
        rows = [[START, *(self.number.get(character, UNKNOWN) for character in text[:end])] for text in texts]
        return rows, sum(len(text) > end for text in texts)


class TextEncoder(nn.Module):
    """int64 [B, T], padded with PAD -> logits [B, C].

    Convolutions over two to four characters, the maximum of each filter over the text, one linear layer (Kim 2014,
    Convolutional Neural Networks for Sentence Classification). More padding changes nothing.
    """

    def __init__(self, *, vocabulary: int, num_classes: int, dropout: float, width: int = 96) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width, padding_idx=PAD)
        # With torch's deviation of 1, the default learning rate, which suits the images, would be too high.
        nn.init.normal_(self.characters.weight[UNKNOWN:], std=0.2)  # not PAD, which stays 0
        self.words = nn.ModuleList(nn.Conv1d(width, width, size) for size in KERNEL_SIZES)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(len(KERNEL_SIZES) * width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        characters = self.characters(tokens).transpose(1, 2)
        found = []
        for size, words in zip(KERNEL_SIZES, self.words, strict=True):
            # Zeros at the end, so that the last characters begin a word too. What begins in the padding is masked out.
            hits = words(functional.pad(characters, (0, size - 1))).relu()
            found.append((hits * (tokens != PAD)[:, None]).amax(2))
        logits: torch.Tensor = self.head(self.dropout(torch.cat(found, 1)))
        return logits
