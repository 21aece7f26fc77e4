"""The doctor on pairs of machines, which are network namespaces. Each pair has one fault.

The doctor names the fault with its rank and host, and gives a healthy pair no warning. All faulty pairs run at once.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.injected_faults import LOOK, STAGE
from tests.rigs.jobs import rank_env
from tests.rigs.namespaces import Net
from tests.rigs.single_rank import Rank, Starter, starting

PORT = 29400
JOIN_S = "8"  # for ranks that never meet; other ranks meet in one or two seconds, even on a busy machine
LONG_S = "90"
BOUND_S = 150


@dataclass
class Case:
    """A pair of machines, and a doctor in each rank on them."""

    pair: Net
    starter: Starter
    ranks: list[Rank] = field(default_factory=list)

    def rank(
        self, rank: int, node: int, *words: str, world_size: int = 2, addr: str = "192.168.77.1", join_s: str = LONG_S,
        sick: str = "tests.rigs.injected_faults:healthy", **env: str,
    ) -> None:
        five = {**rank_env(rank, world_size, PORT), "LOCAL_RANK": "0", "MASTER_ADDR": addr, **self.pair.nodes[node].env}
        line = ("doctor", "--join-timeout-s", join_s, *words)
        self.ranks.append(self.starter.command(line, "job", env={**five, **env}, preload=sick))

    def both(self, *words: str, sick: str = "tests.rigs.injected_faults:healthy", **more: str) -> None:
        """Start a rank on each machine. `sick`: the fault of rank 1, which is preloaded."""
        self.rank(0, 0, *words, **more)  # type: ignore[arg-type]
        self.rank(1, 1, *words, sick=sick, **more)  # type: ignore[arg-type]

    def said(self, *codes: int) -> list[str]:
        """Wait for the ranks, which must end with `codes`. Return the output of each rank as one line."""
        ended = [rank.wait(BOUND_S) for rank in self.ranks]
        told = "\n".join(rank.output for rank in self.ranks)
        assert ended == [[code] for code in codes], told
        assert "Traceback" not in told
        lines = [[line.partition("] ")[2] for line in rank.output.splitlines()] for rank in self.ranks]
        return [" ".join(" ".join(each).split()) for each in lines]


CASES: dict[str, Callable[[Case], None]] = {}


def case(begin: Callable[[Case], None]) -> Callable[[Case], None]:
    CASES[begin.__name__] = begin
    return begin


@pytest.fixture(scope="module")
def cases(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """All cases, started."""
    folder = tmp_path_factory.mktemp("doctor")
    with ExitStack() as stack:
        begun = {}
        for name, begin in CASES.items():
            pair = stack.enter_context(closing(Net(folder / name / "nodes", 2)))
            begun[name] = Case(pair, stack.enter_context(starting(forks, folder / name / "runs")))
            begin(begun[name])
        yield begun


@case
def wrong_hosts_file(case: Case) -> None:
    # node1 takes itself for the master
    case.pair.nodes[1].know("master", "192.168.77.2")
    case.pair.nodes[0].know("master", "192.168.77.1")
    case.both(addr="master", join_s=JOIN_S)


def test_doctor_names_the_machine_with_a_wrong_hosts_file(cases: dict[str, Case]) -> None:
    first, second = cases["wrong_hosts_file"].said(20, 20)
    assert re.search(r"NOT FIT joined rank 1 of 2 has not joined after \d+ s \(joined: 0 on node0\)", first), first
    assert "mend: Start the missing ranks, with the same MASTER_ADDR" in first
    assert f"NOT FIT joined rank 1 of 2 on node1 could not join within 8 s: master:{PORT} refuses the con" in second


@case
def hangs(case: Case) -> None:
    case.both(sick="tests.rigs.injected_faults:hangs_in_the_collective", **{STAGE: "12"})


def test_doctor_never_counts_a_check_that_hangs_as_passed(cases: dict[str, Case]) -> None:
    first, second = cases["hangs"].said(30, 30)
    ends = ("NOT DONE collective collective (step 0) took longer than ", "NOT DONE collective lost a peer at step 0")
    assert any(end in first for end in ends)  # the first rank whose time is over ends the other too
    assert "suspected: rank 1 on node1" in first
    assert "doctor: could not be completed: " in first
    assert "NOT DONE collective" in second


@case
def full_shm(case: Case) -> None:
    case.pair.nodes[1].run("mount -t tmpfs -o size=64m tmpfs /dev/shm", "head -c 60000000 /dev/zero > /dev/shm/left")
    case.both()


@case
def slow_link(case: Case) -> None:
    # Links inside the nodes stay fast
    for node in case.pair.nodes:
        node.run("tc qdisc add dev eth0 root tbf rate 8mbit burst 16kb latency 2s")
    for rank in range(4):
        case.rank(rank, rank // 2, world_size=4, **{LOOK: "links"})


@pytest.mark.parametrize(("name", "what"), [
    ("full_shm", r"WARNING memory rank 1 on node1: /dev/shm: "),
    ("slow_link", r"WARNING links 2 between nodes: slowest \d MB/s, from rank [12] on node[01] to rank [21] on node"),
])
def test_doctor_warns_of_a_fault_of_one_machine(cases: dict[str, Case], name: str, what: str) -> None:
    case = cases[name]
    first, *_ = case.said(*[10] * len(case.ranks))
    assert re.search(what, first), first
    assert first.count("WARNING") == 1, first
    assert "why: " in first
    assert "mend: " in first
    assert "doctor: fit to train, with warnings: " in first


@case
def wrong_sum(case: Case) -> None:
    case.both(sick="tests.rigs.injected_faults:adds_wrongly")


@case
def flips_a_bit(case: Case) -> None:
    case.both(sick="tests.rigs.injected_faults:flips_a_bit")


@case
def dies(case: Case) -> None:
    case.both(sick="tests.rigs.injected_faults:dies_as_the_group_forms")


@pytest.mark.parametrize(("name", "code", "what"), [
    ("wrong_sum", 20, "NOT FIT collective rank 1 on node1: wrong result: all_reduce of 1000 numbers why: gradie"),
    ("flips_a_bit", 20, "NOT FIT repetition rank 1 on node1: the same computation gave two results on cpu, at "),
    ("dies", -9, r"NOT FIT joined lost a peer at step 0: rank 1 on node1 \(its process has ended\)"),
])
def test_doctor_names_the_rank_that_is_not_fit(cases: dict[str, Case], name: str, code: int, what: str) -> None:
    first, _ = cases[name].said(20, code)
    assert re.search(what, first), first
    assert "doctor: not fit to train: " in first


def test_doctor_gives_a_healthy_pair_no_warning(
    forks: Forks, cases: dict[str, Case], tmp_path: Path
) -> None:
    for sick in cases.values():  # wait for the other pairs, because this pair needs free CPUs
        for rank in sick.ranks:
            rank.wait(BOUND_S)
    with closing(Net(tmp_path / "nodes", 2)) as pair, starting(forks, tmp_path / "runs") as starter:
        case = Case(pair, starter)
        case.both()
        first, second = case.said(0, 0)
    assert not any(word in first + second for word in ("WARNING", "NOT FIT", "NOT DONE")), first
    stages = ["environment", "limits", "memory", "storage", "devices", "repetition", "joined", "collective", "links"]
    places = [first.index(f"ok {stage} ") for stage in stages]
    assert places == sorted(places), first
    assert re.search(r"ok links 2 between nodes: slowest \S+ .B/s, from rank [01] on node", first)
    assert "doctor: fit to train: " in first
    report = json.loads((tmp_path / "runs" / "job" / "doctor" / "report.json").read_text())
    assert (report["exit_code"], report["verdict"]) == (0, "fit to train")
