"""Reinforcement learning: a policy learns to reach the end of a corridor, with a sampler of its own for the corridors.

The sampler draws corridors of which the policy knows little more often, and learns from the results of all ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankup

LENGTHS, EPISODES, TURNS = 16, 8, 24


class Corridors:
    """`EPISODES` corridors at once. The goal lies `length` cells to the left or to the right; each turn costs."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.goal = lengths * (torch.randint(2, lengths.shape) * 2 - 1)
        self.place = torch.zeros_like(self.goal)

    def seen(self) -> torch.Tensor:
        """What the policy is told: float32 of shape (episodes, 2)."""
        return torch.stack([self.goal.sign() * 1.0, (self.goal - self.place) / LENGTHS], dim=1)

    def move(self, actions: torch.Tensor) -> torch.Tensor:
        """Go left (0) or right (1). Returns the rewards, of shape (episodes,)."""
        there = self.place == self.goal
        self.place = torch.where(there, self.place, self.place + actions * 2 - 1)
        return (self.place == self.goal).float() - 0.1


class LengthSampler:
    """Draws lengths in proportion to how badly they went. It is the same on all ranks."""

    def __init__(self) -> None:
        self.regret = torch.ones(LENGTHS)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, count: int) -> torch.Tensor:
        return 1 + torch.multinomial(self.regret, count, replacement=True, generator=self.generator)

    def learn(self, lengths: torch.Tensor, returns: torch.Tensor) -> None:
        for length, value in zip(lengths.tolist(), returns.tolist(), strict=True):
            self.regret[length - 1] = 0.9 * self.regret[length - 1] + 0.1 * max(0.05, 1 - value / TURNS)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"regret": self.regret, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.regret.copy_(state["regret"])
        self.generator.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    job = rankup.init(run="runs/rl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    sampler = LengthSampler()
    torch.manual_seed(1 + rank)  # each rank plays its own games
    job.track(policy=policy, optimizer=optimizer, sampler=sampler)

    for step in range(job.step_number, args.steps):
        drawn = sampler.draw(EPISODES * world_size)
        corridors = Corridors(drawn[rank::world_size])
        seen, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(TURNS):
                seen.append(corridors.seen())
                chances = policy.module(seen[-1].to(device)).softmax(1).cpu()
                actions.append(torch.multinomial(chances, 1).squeeze(1))
                rewards.append(corridors.move(actions[-1]))
        to_go = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantage = (to_go - to_go.mean(1, keepdim=True)).to(device)
        logs = policy(torch.stack(seen).to(device)).log_softmax(2)
        chosen = logs.gather(2, torch.stack(actions).unsqueeze(2).to(device)).squeeze(2)
        loss = -(chosen * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        returns = torch.zeros(world_size, EPISODES, device=device)
        returns[rank] = to_go[0].to(device)
        dist.all_reduce(returns)
        with job.step(loss=loss):
            optimizer.step()
            sampler.learn(drawn, returns.T.flatten())
        if step % 20 == 19 and rank == 0:
            print(f"step {step + 1}: mean return {returns.mean().item():.3f}")

    if rank == 0:
        torch.save(policy.module.state_dict(), "rl.pt")
    job.finish()


if __name__ == "__main__":
    main()
