"""A rank that silently computes wrong numbers is found and named, and the run ends with an undisturbed run's state."""

import contextlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rankup.loop.agreement import RECORD, digests_of, odd_ones
from tests.job.test_loop import said
from tests.promises.test_examples import Once
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import free_port, result

SCRIPT = Path(__file__).with_name("corrupt_script.py")


def run(forks: Forks, folder: Path, ranks: int, code: int = 0, **env: str) -> str:
    folder.mkdir(exist_ok=True)
    return forks.ends("launch", f"--nproc={ranks}", SCRIPT, folder / "run", cwds=[folder], env=env, code=code)


@pytest.mark.parametrize(("kind", "ranks"), [("weight", 3), ("optimizer", 2), ("gradient", 3)])
def test_flipped_bit_is_found_and_undone(once: Once, forks: Forks, tmp_path: Path, kind: str, ranks: int) -> None:
    undisturbed = once(f"corruption-{ranks}", lambda: said(run(forks, tmp_path / "undisturbed", ranks)))
    # Rounding may hide a lower bit before the states are compared
    lowest = {"weight": 1, "optimizer": 4, "gradient": 12}[kind]
    rank, step, bit = random.randrange(ranks), random.randrange(2, 38), random.randrange(lowest, 24)
    output = run(forks, tmp_path / "flipped", ranks, FLIP=f"{kind}:{rank}:{step}:{bit}")
    assert said(output) == undisturbed
    wrong = [rank] if ranks > 2 else [0, 1]
    (record,) = map(json.loads, (tmp_path / "flipped" / "run" / RECORD).read_text().splitlines())
    assert step < record["step"] <= step + 6
    assert record["odd"] == wrong
    named = " or ".join(rf"rank {each} on \S+" for each in wrong)
    assert re.search(f"step {record['step']} was computed correctly this time. {named} was wrong before", output)


@pytest.mark.parametrize("ranks", [3, 2])
def test_lasting_fault_ends_the_job_and_names_the_rank(forks: Forks, tmp_path: Path, ranks: int) -> None:
    """Each attempt flips another bit, as a broken machine would."""
    output = run(forks, tmp_path, ranks, code=171, FLIP="weight:1:20:9", LASTING="1")
    assert "a lasting fault" in output
    rows = [json.loads(line) for line in (tmp_path / "run" / RECORD).read_text().splitlines()]
    assert [row["step"] for row in rows] == [24, 21, 21, 21]
    assert rows[-1]["odd"] == [1]
    ends = [json.loads(path.read_text()) for path in (tmp_path / "run" / "status").glob("*/rank-*.json")]
    assert 1 in {end["suspect"] for end in ends if "silent" in end["why"]}


@pytest.mark.parametrize(("ranks", "fsdp"), [(3, "0"), (2, "0"), (2, "1")])
def test_rank_with_wrong_gradients_before_the_exchange_is_named(
    forks: Forks, tmp_path: Path, ranks: int, fsdp: str
) -> None:
    """All ranks get the same wrong sum, so a comparison of states can't find it."""
    output = run(forks, tmp_path, ranks, code=171, FLIP="product:1:1:0", RECOMPUTE="1", SPLIT=fsdp)
    assert "rank 1 on" in re.search(r"silent corruption before step \d+: (.*) computed other", output)[1]
    rows = [json.loads(line) for line in (tmp_path / "run" / RECORD).read_text().splitlines()]
    assert 1 in {rank for row in rows for rank in row["odd"]}
    assert all(len(row["computed"]) == ranks for row in rows)
    ends = [json.loads(path.read_text()) for path in (tmp_path / "run" / "status").glob("*/rank-*.json")]
    assert 1 in {end["suspect"] for end in ends if "silent" in end["why"]}


def test_node_of_a_rank_that_computes_wrongly_is_left_out(once: Once, forks: Forks, tmp_path: Path) -> None:
    """A spare takes its place, and the run ends with the undisturbed state."""
    undisturbed = once("corruption-3", lambda: said(run(forks, tmp_path / "undisturbed", 3)))
    line = ("launch", "--nnodes=3", "--spares=1", "--max-failures-per-node=1", "--wait-for-node=0.5",
            "--master-addr=127.0.0.1", f"--master-port={free_port()}", f"--run-dir={tmp_path}/run")
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(forks.running(
                *line, f"--node-rank={node}", SCRIPT, tmp_path / "run", cwds=[tmp_path],
                env={"FLIP": "weight:1:20:9", "LASTING": "", "NODE": str(node)},
            )) for node in range(4)
        ]
        codes, output = [node.wait() for node in nodes], "\n".join(node.output for node in nodes)
    broken = int((tmp_path / "run.broken").read_text())
    assert codes == [[172 * (node == broken)] for node in range(4)], output
    assert "this node is left out: " in nodes[broken].output
    assert said(output) == undisturbed
    rows = [json.loads(line) for line in (tmp_path / "run" / RECORD).read_text().splitlines()]
    assert [row["odd"] for row in rows] == [[1]]


def test_program_recomputes_a_batch_on_all_ranks(forks: Forks, tmp_path: Path) -> None:
    """This changes no bit of a healthy run, although the model draws random numbers and has a batch norm."""
    line = ("train", "--workload=tests.rigs.recording_workload:build", "--options.model=wide", "--limit-train=96",
            "--batch-size=24", "--max-steps=5", "--run-dir", tmp_path, "--tensorboard=false")
    for name, every in (("without", "0"), ("with", "2")):
        forks.ends(*line, "--name", name, "--recompute-every-steps", every, world_size=2)
    assert result(tmp_path / "with")["digest"] == result(tmp_path / "without")["digest"]
    codes, output = forks.run(*line, "--name=broken", "--recompute-every-steps=2", world_size=2,
                              preload="tests.rigs.injected_faults:wrong_products")
    assert codes == [171, 171], output
    assert re.search(r"silent corruption before step 1: rank 0 on \S+, rank 1 on \S+ computed other", output)


def test_loss_that_differs_each_time_on_most_ranks_is_not_called_corruption(forks: Forks, tmp_path: Path) -> None:
    output = run(forks, tmp_path, 3, FLIP="product:-1:3:0", RECOMPUTE="1")
    assert "recompute: the loss must give the same bits each time, got other bits on most ranks" in output
    assert not (tmp_path / "run" / RECORD).exists()


def test_flipped_bit_in_a_sharded_weight_with_a_replica_is_found(
    once: Once, forks: Forks, tmp_path: Path
) -> None:
    """With hybrid sharding ranks 1 and 3 hold the same part."""
    undisturbed = once("corruption-hybrid", lambda: said(run(forks, tmp_path / "undisturbed", 4, SPLIT="2")))
    output = run(forks, tmp_path / "flipped", 4, FLIP=f"weight:3:{random.randrange(2, 38)}:9", SPLIT="2")
    assert said(output) == undisturbed
    (record,) = map(json.loads, (tmp_path / "flipped" / "run" / RECORD).read_text().splitlines())
    assert record["odd"] == [1, 3]


def test_each_flipped_bit_changes_the_digest() -> None:
    other = [nn.Linear(7, 3, dtype=kind) for kind in (torch.bfloat16, torch.float64, torch.complex64)]
    net = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), *other)
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    items = {"net": net, "optimizer": optimizer}
    sound = digests_of(items)
    tensors = [*net.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16)  # flatten first: a counter of steps has no dimension
        for place, bit in [(-1, 15), *((random.randrange(len(bits)), random.randrange(16)) for _ in range(5))]:
            bits[place] ^= torch.tensor(1 << bit).to(torch.int16)
            assert digests_of(items) != sound
            bits[place] ^= torch.tensor(1 << bit).to(torch.int16)
    assert digests_of(items) == sound
    with torch.no_grad():  # exchange two tensors
        first, second = optimizer.state[net[1].weight]["exp_avg"], optimizer.state[net[1].bias]["exp_avg"]
        second.mul_(2)
        doubled = digests_of(items)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    assert digests_of(items) != doubled


@pytest.mark.parametrize(("values", "odd"), [
    ([7, 7, 7], []), ([7, 8, 7], [1]), ([8, 7, 7], [0]), ([7, 8], [0, 1]), ([1, 2, 3], [0, 1, 2]),
    ([1, 1, 2, 2], [0, 1, 2, 3]), ([1, 1, 1, 2, 3], [3, 4]),
])
def test_odd_ones_lists_ranks_outside_the_majority(values: list[int], odd: list[int]) -> None:
    assert odd_ones(values) == odd
