"""A small character-level GPT. Its batches are random pieces of a text, and its loop counts steps, not epochs."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankup

TEXT = Path(__file__).parents[1] / "samples" / "texts" / "train.txt"
STEPS, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 40, 32, 32, 2, 2, 8


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    job = rankup.init(run="runs/gpt")
    device = job.device

    text = TEXT.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(len(numbers)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())  # each rank reads other pieces
    job.track(model=model, optimizer=optimizer)

    for step in job.steps(STEPS):
        for group in optimizer.param_groups:  # a warm-up, then half a cosine
            group["lr"] = 3e-3 * min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
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


if __name__ == "__main__":
    main()
