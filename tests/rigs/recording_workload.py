"""A workload that records what each of its ranks did: `--options.record DIR`.

`options.model` chooses a special feature of the model. Each rank appends a line for each call to DIR/rank-N.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.data.samples import TensorSamples
from train.run.weights import digest
from train.workloads import Sums, Workload


class Masked(nn.Module):
    """Dropout that remembers which entries of a row of ones it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: list[int] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones_like(features), 0.5, self.training)
        self.mask = (mask[0] > 0).int().tolist()
        return features * mask


class Unused(nn.Module):
    """Has a layer that forward never calls, such as a head for another task."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.other_head = nn.Linear(8, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(features)
        return out


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), Masked(), nn.Linear(16, 4)),
    "norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
    "unused": Unused,
    # It has random numbers and buffers, and so many gradients (over a megabyte) that DDP sends two buckets
    "wide": lambda: nn.Sequential(
        nn.Linear(8, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 600), nn.ReLU(),
        nn.Linear(600, 4),
    ),
}


def samples(count: int, seed: int) -> TensorSamples:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 8, generator=generator)
    labels = (features[:, :4] + 0.3 * torch.randn(count, 4, generator=generator)).argmax(1)
    return TensorSamples(features, labels)


def build(config: Config) -> Workload:
    options = config.options
    model = MODELS[options.get("model", "plain")]()
    recorder = Recorder(Path(options["record"]) if "record" in options else None, options)
    if options.get("frozen_norm"):
        model[1].eval()  # as users do to keep the statistics of a pretrained batch norm
    return Workload(model=model, train=samples(config.limit_train or 256, 1),
                    evaluation=samples(config.limit_eval or 101, 2), loss=recorder.loss, evaluate=recorder.evaluate,
                    data_name="recorded")


class Recorder:
    def __init__(self, folder: Path | None, options: dict[str, Any]) -> None:
        self.options, self.sent = options, 0
        self.file = None
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self.file = folder / f"rank-{os.environ.get('RANK', '0')}.jsonl"
            self._count_exchanges()

    def write(self, **entry: Any) -> None:
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if isinstance(model, DistributedDataParallel) and self.file is not None and not model._comm_hooks:
            model.register_comm_hook(None, allreduce_hook)
        features, labels = batch
        loss = functional.cross_entropy(model(features), labels)
        masks = [module.mask for module in model.modules() if isinstance(module, Masked)]
        self.write(kind="loss", sent=self.sent, masks=masks, size=len(labels))
        return loss

    def _count_exchanges(self) -> None:
        """Count the calls of any hook that DDP gets: the program's own, or the one above."""
        register = DistributedDataParallel.register_comm_hook

        def register_counted(model: DistributedDataParallel, state: Any, hook: Any) -> None:
            def counted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                self.sent += 1
                return hook(state, bucket)  # type: ignore[no-any-return]

            register(model, state, counted)

        DistributedDataParallel.register_comm_hook = register_counted  # type: ignore[method-assign]

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        features, labels = batch
        logits = model(features)
        if self.file is not None:
            self.write(kind="evaluate", sent=self.sent, size=len(labels), weights=digest(model.state_dict()))
        if self.options.get("no_count"):
            return {"accuracy": (logits.argmax(1) == labels).sum()}
        return {
            "count": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (logits.argmax(1) == labels).sum(),
            "confusion": torch.bincount(labels * 4 + logits.argmax(1), minlength=16).view(4, 4),
        }


def records(folder: Path, kind: str) -> list[list[dict[str, Any]]]:
    """Return the records of that kind, by rank."""
    files = [folder / f"rank-{rank}.jsonl" for rank in range(len(list(folder.iterdir())))]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[entry for entry in entries if entry["kind"] == kind] for entries in lines]
