"""Meetings of many nodes in virtual time: events, bytes, and the leader's CPU seconds. No process, no connection.

    python -m bench.meeting 64 1024 4096"""

import gc
import json
import sys
import time
from typing import Any

from rankup.agent.events import Send
from rankup.env.node_env import Limits
from tests.agent.simulator import Host, World


class Crowd(World):
    """A job of `size` nodes without faults. `cpu_s`: by node, the seconds that its meeting took. `sent`: bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size, self.drift, self.twice, self.shared, self.left_s = size, False, False, False, 300.0
        self.limits = Limits(size // 2 - 1, size, wait_s=10.0)
        self.hosts = [Counted(self, number) for number in range(size)]
        self.by_ip = {host.ip: host for host in self.hosts}
        self.cpu_s, self.sent, self.longest_s = [0.0] * size, 0, 0.0
        self.at(0.2, self.step)

    def until(self, what: str, count: int, begun: float) -> None:
        """Let time pass until `count` nodes run one membership, and print what it took."""
        events, sent, cpu_s = self.num_events, self.sent, [*self.cpu_s]
        self.longest_s = 0.0
        after = self.newest[0] if self.newest else 0

        def there() -> bool:
            new = self.newest and self.newest[0] > after
            return bool(new) and sum(host.runs == self.newest[0] for host in self.hosts) == count

        while not there():
            self.run_until(self.now_s + 0.25)
            assert self.now_s < begun + 300, "it takes too long"
        most = max(now_s - before_s for now_s, before_s in zip(self.cpu_s, cpu_s, strict=True))
        print(f"| {self.size:5} | {what:15} | {self.now_s - begun:6.1f} | {self.num_events - events:8} | "
              f"{(self.sent - sent) / 1e6:9.2f} | {most:8.2f} | {1000 * self.longest_s:7.0f} |", flush=True)


class Counted(Host):
    world: Crowd

    def event(self, event: Any) -> None:
        began_s = time.process_time()
        super().event(event)
        took_s = time.process_time() - began_s
        self.world.cpu_s[self.number] += took_s
        self.world.longest_s = max(self.world.longest_s, took_s)

    def act(self, output: Any) -> None:
        if isinstance(output, Send):
            self.world.sent += len(output.links) * (len(json.dumps(output.message)) + 1)
        super().act(output)


def measure(size: int) -> None:
    world = Crowd(size)
    for host in world.hosts:
        world.at(world.dice.uniform(0.0, 3.0), world.restart, host, 0)
    world.until("join", size, 0.0)
    world.hosts[size - 1].exit()
    world.until("lose one", size - 1, world.now_s)
    world.hosts[0].exit()
    world.until("lose the leader", size - 2, world.now_s)
    lost = world.hosts[size // 2 + 2:size - 1]
    for host in lost:
        host.exit()
    world.until("lose half", size - 2 - len(lost), world.now_s)
    for host in (world.hosts[0], *lost, world.hosts[size - 1]):
        world.at(world.dice.uniform(0.0, 3.0), world.restart, host, host.life)
    world.until("come back", size, world.now_s)


def main() -> None:
    gc.disable()  # a real leader does not hold the objects of all nodes
    print("| nodes | what            | virtual s | events | MB sent | leader CPU s | longest ms |")
    print("|-------|-----------------|--------|----------|-----------|----------|---------|")
    for size in map(int, sys.argv[1:] or ["64", "1024"]):
        measure(size)


if __name__ == "__main__":
    main()
