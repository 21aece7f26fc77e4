"""Reinforcement learning: a network learns to walk to a goal, from a replay buffer that all ranks fill.

The buffer has `state_dict` and `load_state_dict`. All ranks hold the same moves.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankup

STEPS, CELLS, GAMES, TURNS = 40, 12, 8, 12


class Replay:
    """The last `size` moves. Each row has the cell, the goal, the action, whether it won, and the cell after it."""

    def __init__(self, size: int) -> None:
        self.moves, self.count = torch.zeros(size, 5), 0

    def add(self, moves: torch.Tensor) -> None:
        self.moves[(self.count + torch.arange(len(moves))) % len(self.moves)] = moves
        self.count += len(moves)

    def draw(self, count: int) -> torch.Tensor:
        return self.moves[torch.randint(min(self.count, len(self.moves)), (count,))]

    def state_dict(self) -> dict[str, object]:
        return {"moves": self.moves, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.moves.copy_(state["moves"])
        self.count = state["count"]


def seen(cell: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Return the network's input for cells and goals of shape (moves,): float32 of shape (moves, 2)."""
    return torch.stack([cell, goal - cell], dim=1).float() / CELLS


@torch.no_grad()
def play(network: nn.Module, device: torch.device) -> torch.Tensor:
    """Play GAMES games, with one random move in five. Returns the moves, float32 of shape (TURNS * GAMES, 5)."""
    cell, goal = torch.randint(CELLS, (2, GAMES))
    moves = []
    for _ in range(TURNS):
        best = network(seen(cell, goal).to(device)).argmax(1).cpu()
        action = torch.where(torch.rand(GAMES) < 0.2, torch.randint(2, (GAMES,)), best)
        after = (cell + action * 2 - 1).clamp(0, CELLS - 1)
        moves.append(torch.stack([cell, goal, action, (after == goal).long(), after], dim=1))
        cell = after
    return torch.cat(moves).float()


def main() -> None:
    job = rankup.init(run="runs/rl")
    device = job.device
    torch.manual_seed(0)
    policy, target = (nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(device) for _ in range(2))
    policy = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    replay = Replay(2048)
    replay.add(play(target, device))
    torch.manual_seed(1 + dist.get_rank())  # each rank plays its own games
    job.track(policy=policy, target=target, optimizer=optimizer, replay=replay)

    for step in job.steps(STEPS):
        played = job.gather(play(policy.module, device))
        cell, goal, action, won, after = replay.draw(64).to(device).unbind(1)
        with torch.no_grad():
            worth = won + 0.9 * (1 - won) * target(seen(after, goal)).amax(1)
        said = policy(seen(cell, goal)).gather(1, action.long().unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(said, worth)
        optimizer.zero_grad()
        loss.backward()
        with job.step(loss=loss):
            optimizer.step()
            replay.add(torch.cat(played).cpu())
            with torch.no_grad():
                for old, new in zip(target.parameters(), policy.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: {won.mean().item():.0%} of the moves reached the goal")

    if dist.get_rank() == 0:
        torch.save(policy.module.state_dict(), "rl.pt")


if __name__ == "__main__":
    main()
