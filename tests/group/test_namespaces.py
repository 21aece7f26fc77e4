"""Two machines, made of namespaces, with networks that users meet: names that resolve to 127.0.1.1, second interfaces,
firewalls, names and routes that do not exist, cables that are pulled.

All cases run at the same time, each on its own pair of machines."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN
from tests.rigs.namespaces import Net, Node
from tests.rigs.single_rank import NOISE, TINY, Rank, Starter, all_said, starting

PORT = 29400
SHORT_S = 5  # if ranks never meet
LONG_S = 60  # if they meet: what follows has bounds of its own


@dataclass
class Case:
    """A pair of machines with their ranks."""

    name: str
    pair: Net
    starter: Starter
    ranks: list[Rank] = field(default_factory=list)

    def rank(
        self, rank: int, world_size: int, node: int, *arguments: str, addr: str = "192.168.77.1",
        join_s: float = LONG_S, **env: str,
    ) -> None:
        env = {"LOCAL_RANK": "0", "MASTER_ADDR": addr, **self.pair.nodes[node].env, **env}
        self.ranks.append(self.starter(rank, world_size, PORT, self.name, *arguments, join_s=join_s, **env))

    def both(self, *arguments: str, **more: str | float) -> None:
        """Start one rank on each machine, rank 0 on the first."""
        for node in (0, 1):
            self.rank(node, 2, node, *arguments, **more)  # type: ignore[arg-type]


Begin = Callable[[Case], None]
CASES: dict[str, tuple[Begin, int, tuple[str | tuple[str, str], ...]]] = {}


def case(code: int, *texts: str | tuple[str, str]) -> Callable[[Begin], Begin]:
    """All ranks must end with `code` and print each of the texts. Of a pair, each rank prints its own."""

    def add(begin: Begin) -> Begin:
        CASES[begin.__name__] = begin, code, texts
        return begin

    return add


@pytest.fixture(scope="module")
def cases(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """All cases, which run at the same time."""
    folder = tmp_path_factory.mktemp("machines")
    with ExitStack() as stack:
        begun = {}
        for name, (begin, *_) in CASES.items():
            pair = Net(folder / name, 2)
            stack.callback(pair.close)
            begun[name] = Case(name, pair, stack.enter_context(starting(forks, folder / "runs")))
            begin(begun[name])
        begun["pulled_cable"].ranks[0].wait_for("epoch 1:")
        begun["pulled_cable"].pair.nodes[0].run("ip link set eth0 down")
        yield begun


# Machines without a problem ------------------------------------------------------------------------------------


@case(0)
def by_name(case: Case) -> None:
    # On node0 the name resolves to 127.0.1.1: ranks 0 and 1 see none of their addresses that others can use
    for rank, node in ((0, 0), (1, 0), (2, 1), (3, 1)):
        case.rank(rank, 4, node, addr="node0", LOCAL_RANK=str(rank % 2))


@case(0)
def ipv6_alone(case: Case) -> None:
    for number, node in enumerate(case.pair.nodes):
        node.run("ip -4 addr flush dev eth0", f"ip -6 addr add fd77::{number + 1}/64 dev eth0 nodad")
    case.both(addr="fd77::1")


@case(0)
def ipv4_and_few_open_ports_alone(case: Case) -> None:
    for node in case.pair.nodes:
        node.run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv4.ip_local_port_range='40000 40050'")
        firewall(node, "DROP", f"{PORT},40000:40050")
    # gloo lets the higher address listen and the lower one call, so try both as the one that calls itself 127.0.1.1
    case.rank(0, 2, 1, addr="192.168.77.2")
    case.rank(1, 2, 0, addr="192.168.77.2")


@case(0)
def interface_beside_a_loopback_address(case: Case) -> None:
    for rank in (0, 1):  # as torchrun starts the ranks of one machine
        case.rank(rank, 2, 0, addr="127.0.0.1", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="eth0")


@case(0)
def silent_resolver(case: Case) -> None:
    know_no_names(case)
    case.both()


@case(0)
def a_name_that_comes_late(case: Case) -> None:
    case.rank(1, 2, 1, addr="late.example")
    case.ranks[0].wait_for("rank 1 of 2")
    case.pair.nodes[0].know("late.example", "192.168.77.1")
    case.pair.nodes[1].know("late.example", "192.168.77.1")
    case.rank(0, 2, 0, addr="late.example")


@case(0)
def launched_with_a_silent_resolver(case: Case) -> None:
    know_no_names(case)
    launched(case, master_addr="192.168.77.1")


@case(0)
def launched(case: Case, *, master_addr: str = "node0") -> None:
    for number, node in enumerate(case.pair.nodes):
        line = ("launch", "--nnodes", "2", "--nproc", "2", "--node-rank", str(number), "--master-addr", master_addr,
                "--master-port", str(PORT), str(MAIN), *TINY)
        case.ranks.append(case.starter.command(line, case.name, env=node.env))


def know_no_names(case: Case) -> None:
    """Remove the machines' addresses from /etc/hosts, as in most clusters, and count the queries to a dead resolver."""
    for node in case.pair.nodes:
        node.hosts_file.write_text("127.0.0.1 localhost\n")
        node.lookup_file.write_text("hosts: files dns\n")
        node.mount("nameserver 192.168.77.9\noptions timeout:30\n", "/etc/resolv.conf")
        node.run("iptables -w -A OUTPUT -p udp --dport 53 -j DROP")


def firewall(node: Node, action: str, ports: str = str(PORT)) -> None:
    """Accept connections to these ports, and answers from the master's port."""
    node.run(
        "iptables -w -A INPUT -i lo -j ACCEPT",
        f"iptables -w -A INPUT -p tcp -m multiport --dports {ports} -j ACCEPT",
        f"iptables -w -A INPUT -p tcp --sport {PORT} -j ACCEPT",
        f"iptables -w -A INPUT -p tcp -j {action}",
    )


# Interfaces and firewalls -------------------------------------------------------------------------------------


@case(
    170, "rank 1 on node1 does not reach rank 0 on node0 at 172.30.0.9:", "(Network is unreachable)",
    "name another interface in GLOO_SOCKET_IFNAME",
)
def interface_to_nowhere(case: Case) -> None:
    case.rank(0, 2, 0, GLOO_SOCKET_IFNAME="aux0")
    case.rank(1, 2, 1)


APART = "all ranks reached the master, but not each other: ", "gloo and nccl use any high port between the nodes"


@case(170, "rank 0 on node0 does not reach rank 1 on node1 at 192.168.77.2:", "(no answer)", *APART)
def ports_dropped_on_one_side(case: Case) -> None:
    firewall(case.pair.nodes[1], "DROP")
    case.both()


@case(170, "rank 1 on node1 does not reach rank 0 on node0 at 192.168.77.1:", "(Connection refused)", *APART)
def ports_rejected_on_both(case: Case) -> None:
    for node in case.pair.nodes:
        firewall(node, "REJECT")
    case.both()


# The master's address -----------------------------------------------------------------------------------------

LATE = "rank 1 of 2 on node1 could not join within"


@case(170, LATE, f"192.0.2.1:{PORT} does not answer: a wrong address, a machine that is down, or a firewall")
def black_hole(case: Case) -> None:
    case.pair.nodes[1].run("ip route add default via 192.168.77.1")
    case.rank(1, 2, 1, addr="192.0.2.1", join_s=SHORT_S)


@case(170, LATE, 'the name "no-such-host.example" does not resolve here')
def no_such_name(case: Case) -> None:
    case.rank(1, 2, 1, addr="no-such-host.example", join_s=SHORT_S)


@case(170, LATE, 'the name "no-answer.example" does not resolve here (the resolver gives no answer)')
def no_resolver(case: Case) -> None:
    server, node = case.pair.nodes
    server.run("iptables -w -A INPUT -p udp --dport 53 -j DROP")
    node.lookup_file.write_text("hosts: files dns\n")
    node.mount("nameserver 192.168.77.1\noptions timeout:30\n", "/etc/resolv.conf")
    case.rank(1, 2, 1, addr="no-answer.example", join_s=1)


@case(170, ("rank 1 of 2 has not joined", "A loopback address reaches only the machine itself"))
def localhost(case: Case) -> None:
    case.both(addr="localhost", join_s=SHORT_S)


# The cable ----------------------------------------------------------------------------------------------------


@case(171, ("suspected: rank 1 on node1 (sent no heartbeat", "suspected: rank 0 on node0 (sent no heartbeat"))
def pulled_cable(case: Case) -> None:
    case.both("--max-steps", "1000000", "--save-every-steps", "1000000", "--step-timeout-s", "1000")


# All of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_machines_train_or_each_rank_names_the_problem(cases: dict[str, Case], name: str) -> None:
    _, code, texts = CASES[name]
    said = all_said(cases[name].ranks, code)
    for text in texts:
        for rank, own in enumerate(said):
            assert (text if isinstance(text, str) else text[rank]) in own
    assert code or not any(NOISE.search(own) for own in said), said
    if name == "launched":
        assert "4 on node0, node1" in said[0]
    if name == "pulled_cable":
        assert all(re.search(r"lost a peer at step \d+: .* for 3\d s\)", own) for own in said)


@pytest.mark.parametrize("name", ["silent_resolver", "launched_with_a_silent_resolver"])
def test_no_name_is_resolved_if_an_address_is_known(cases: dict[str, Case], name: str) -> None:
    all_said(cases[name].ranks, 0)
    for node in cases[name].pair.nodes:
        (rule,) = [line.split() for line in node.run("iptables -w -nvxL OUTPUT").splitlines() if "udp dpt:53" in line]
        assert rule[0] == "0", f"{node.name} asked the resolver {rule[0]} times"
