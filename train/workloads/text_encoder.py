"""A small encoder of characters, trained from scratch: what `workload text` uses where no BERT is given."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

PAD, UNKNOWN, START = 0, 1, 2
FIRST = 3  # the number of the most frequent character
WORDS = (2, 3, 4)  # lengths, in characters


class Characters:
    """Text -> numbers of its characters, after a START; those that training did not see are UNKNOWN."""

    def __init__(self, characters: Sequence[str], *, max_seq_len: int, limit: int = 8000) -> None:
        self.number = {character: FIRST + index for index, character in enumerate(characters[:limit])}
        self.max_seq_len, self.size, self.pad = max_seq_len, FIRST + len(self.number), PAD

    def __call__(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        end = self.max_seq_len - 1
        rows = [[START, *(self.number.get(character, UNKNOWN) for character in text[:end])] for text in texts]
        return rows, sum(len(text) > end for text in texts)


class Encoder(nn.Module):
    """int64 [B, T], padded with PAD -> logits [B, C]: words of two to four characters, the strongest trace of each in the text,
    one linear layer (Kim 2014). How far a batch is padded changes nothing."""

    def __init__(self, *, vocabulary: int, num_classes: int, dropout: float, width: int = 96) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width, padding_idx=PAD)
        # Of 1, the rate that suits the images would be too high
        nn.init.normal_(self.characters.weight[FIRST - 2 :], std=0.2)  # not PAD, which stays 0
        self.words = nn.ModuleList(nn.Conv1d(width, width, length) for length in WORDS)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(len(WORDS) * width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        characters = self.characters(tokens).transpose(1, 2)
        found = []
        for length, words in zip(WORDS, self.words, strict=True):
            # Zeros on both sides, so that each character begins a word; what begins in the padding counts for nothing
            hits = words(functional.pad(characters, (0, length - 1))).relu()
            found.append((hits * (tokens != PAD)[:, None]).amax(2))
        logits: torch.Tensor = self.head(self.dropout(torch.cat(found, 1)))
        return logits
