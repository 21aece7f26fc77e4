"""Ranks as threads of this process: a group for code that only gathers, and messages between two ranks."""

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch


class Ranks:
    """`said`: the warnings of all ranks."""

    def __init__(self, number: int) -> None:
        self.number, self.said = number, list[str]()
        self._barrier = threading.Barrier(number, timeout=60)
        self._values: list[Any] = [None] * number
        self._queues = defaultdict[tuple[int, int], "queue.Queue[torch.Tensor]"](queue.Queue)
        self._own = threading.local()

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        return int(getattr(self._own, "rank", 0))

    def each(self, work: Callable[[Any], Any]) -> list[Any]:
        """Return what `work` returns for each rank's group."""

        def run(rank: int) -> Any:
            self._own.rank = rank
            try:
                return work(self.group(rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.number) as pool:
            return [*pool.map(run, range(self.number))]

    def group(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = json.loads(json.dumps(value))
            self._barrier.wait()
            values = [*self._values]
            self._barrier.wait()
            return values

        def on_rank0(work: Callable[[], Any], *, source: int = 0) -> Any:
            return gather(work() if rank == source else None)[source]

        return SimpleNamespace(
            rank=rank, world_size=self.number, is_rank0=rank == 0, device=torch.device("cpu"), gather=gather,
            on_rank0=on_rank0, barrier=lambda: gather(0), max=lambda value: max(gather(value)),
            broadcast=lambda value: gather(value)[0], collective=lambda call: call(), hosts=["node"] * self.number,
            log=SimpleNamespace(warning=self.said.append),
        )

    def dist(self) -> Any:
        """Return what stands for `torch.distributed` in a module that sends messages."""
        def isend(tensor: torch.Tensor, to: int) -> Any:
            self._queues[self.rank, to].put(tensor.clone())
            return SimpleNamespace(wait=lambda: None)

        def recv(tensor: torch.Tensor, source: int) -> None:
            tensor.copy_(self._queues[source, self.rank].get(timeout=60))

        return SimpleNamespace(isend=isend, recv=recv)
