"""A user's own loop with FSDP2. MESH is its mesh: [2], whose loader has a state, or [2, 2] for HSDP."""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankup


class Stream:
    """16 batches an epoch for each rank. They depend on all earlier batches, which only the state records."""

    def __init__(self, rank: int) -> None:
        self.walk, self.given = torch.full((8,), float(rank)), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.given < 16:
            self.walk, self.given = torch.sin(self.walk * 1.5 + torch.arange(8.0)), self.given + 1
            yield self.walk[None].clone()
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"walk": self.walk.clone(), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.walk, self.given = state["walk"].clone(), state["given"]


def main() -> None:
    job = rankup.init(run="runs/split", memory_every_steps=3, save_every_steps=8)
    mesh = json.loads(os.environ.get("MESH", "[2]"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    names = ("replicate", "shard")[-len(mesh) :]
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averages = {"loss": 0.0}
    job.track(model=model)
    job.track(optimizer=optimizer, averages=averages)
    fixed = [torch.full((1, 8), job.rank + number / 16) for number in range(16)]
    stream = Stream(job.rank) if len(mesh) == 1 else fixed
    for _ in job.epochs(2):
        for numbers in job.batches(stream):
            loss = model(numbers).square().mean()
            optimizer.zero_grad()
            loss.backward()
            with job.step(loss=loss):
                optimizer.step()
                averages["loss"] = 0.9 * averages["loss"] + 1.0
    weights = hashlib.sha256(b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters()))
    print(f"rank {job.rank} ends with {weights.hexdigest()[:16]} {averages['loss']:.6f}")


if __name__ == "__main__":
    main()
