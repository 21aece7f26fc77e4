"""Two rows of messages in a generation of the store: from all ranks to rank 0, and from rank 0 to all.

Whoever waits for the next message is woken by the store. A message costs the same however many ranks there are.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from train.group import keys
from train.group.store import wait_for

# A message is on its way between the two requests of `post`; after that the store looks for it this often.
GAP_S = 0.02


def post(generation: Store, message: Mapping[str, Any]) -> None:
    """Send a message, anything that JSON can say, to rank 0."""
    number = generation.add(keys.MESSAGES, 1)
    generation.set(keys.message(number), json.dumps(message))


def say(generation: Store, number: int, word: Mapping[str, Any]) -> None:
    """Rank 0's word to all, with the next number from 1."""
    # In this order: who comes just now and reads the counter finds the word
    generation.set(keys.word(number), json.dumps(word))
    generation.add(keys.WORDS, 1)


class Inbox:
    """What rank 0 reads the messages to it with."""

    def __init__(self, generation: Store) -> None:
        self._generation = generation
        self._taken = 0  # numbers that senders have taken
        self._expected: list[int] = []  # those of them whose messages have not been read

    def collect(self, timeout_s: float) -> list[dict[str, Any]]:
        """The messages that have come since; waits for the next one where there is none. [] after `timeout_s`.

        Those of one rank come in its order. A rank that dies between taking a number and setting its message leaves a
        gap, which costs a look now and then and holds nobody.
        """
        slice_s = min(timeout_s, GAP_S) if self._expected else timeout_s
        wait_for(self._generation, [keys.message(self._taken + 1)], max(0.001, slice_s))
        taken = self._generation.add(keys.MESSAGES, 0)
        self._expected += range(self._taken + 1, taken + 1)
        self._taken = taken
        found = [number for number in self._expected if self._generation.check([keys.message(number)])]
        if not found:
            return []
        self._expected = sorted(set(self._expected) - set(found))
        return [json.loads(text) for text in self._generation.multi_get([keys.message(number) for number in found])]
