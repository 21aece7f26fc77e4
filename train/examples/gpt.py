"""A small GPT that reads characters: batches are random pieces of a text, steps are counted, epochs are not."""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankup

TEXT = Path(__file__).parents[1] / "samples" / "texts" / "train.txt"
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 2, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, time, width)"""
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    job = rankup.init(run="runs/gpt")

    text = TEXT.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(len(numbers)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())  # each rank reads other pieces
    job.track(model=model, optimizer=optimizer)

    for step in range(job.step_number, args.steps):
        for group in optimizer.param_groups:  # a warm-up, then half a cosine
            group["lr"] = 3e-3 * min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,)).tolist()
        pieces = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts]).to(device)
        loss = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with job.step(loss=loss):
            optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "gpt.pt")
    job.finish()


if __name__ == "__main__":
    main()
