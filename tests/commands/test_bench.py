"""Exchanges between ranks: measured, checked, compared with plain sockets under one limit; and the forecasts."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from tests.rigs import jobs, namespaces
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, rank_env
from tests.rigs.legible import assert_legible
from tests.rigs.namespaces import Pair
from train.commands.bench import cost_model, report, tcp_pair
from train.commands.bench.bench import parse_size
from train.commands.bench.collectives import backends
from train.commands.bench.cost_model import CostModel
from train.commands.bench.job import gradient_bytes
from train.commands.chart import draw_lines, line_chart
from train.errors import ConfigError
from train.process.figures import WIDTH, new_figure
from train.process.limits import memory_left

JOB = ["--dataset", "digits", "--model", "mlp", "--batch-size", "16"]
# It needs one second; the rest is for a machine that is busy with other tests
QUICK = ["--sizes", "1K,64K,256K", "--iterations", "3", "--seconds", "600"]


def outcome_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench" / "bench.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One measurement of two ranks, looked at from several sides."""
    folder = tmp_path_factory.mktemp("bench")
    line = ["bench", *JOB, *QUICK, "--json", "--compress", "bf16", "--run-dir", str(folder), "--name", "run"]
    job = forks.start(*line, world_size=2)
    assert job.wait() == [0, 0], job.output
    return outcome_of(folder / "run"), job.processes[0].output, folder / "run"


def test_bench_measures_each_operation_and_size(two: tuple[dict[str, Any], str, Path]) -> None:
    rows = two[0]["collectives"]
    assert [(row["operation"], row["size"]) for row in rows] == [
        (operation, size)
        for operation in ("point to point", "all-reduce", "all-gather", "broadcast", "point to point")
        for size in (1024, 65536, 262144)
    ]
    assert [row["backend"] for row in rows] == ["sockets"] * 3 + ["gloo"] * 12
    for row in rows:
        assert 0 < row["median_s"] <= row["p95_s"]
        assert 0 < row["steadiness"] <= 1
        assert row["algorithm"] == pytest.approx(row["size"] / row["median_s"])
        assert row["bus"] == pytest.approx(row["algorithm"] * {"all-gather": 0.5}.get(row["operation"], 1.0))


def test_bench_says_what_the_job_exchanges(two: tuple[dict[str, Any], str, Path]) -> None:
    job = two[0]["job"]
    assert job["gradient_bytes"] == 2 * job["parameters"]  # bf16
    assert job["batch_a_rank"] == 8
    assert job["step_s"] > 0
    assert [row["ranks"] for row in two[0]["expected"]] == [2, 8, 64, 512]


def test_bench_leaves_a_table_and_a_chart_and_json_as_its_last_line(two: tuple[dict[str, Any], str, Path]) -> None:
    outcome, output, run = two
    assert json.loads(output.splitlines()[-1]) == outcome
    text = (run / "bench" / "bench.md").read_text()
    assert "| all-reduce | gloo | 64 KiB |" in text
    assert "at the median of the sizes (all-reduce on gloo" in text
    with Image.open(run / "bench" / "bench.png") as picture:
        colours = picture.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    assert len(colours) > 8


def test_bench_leaves_the_runs_own_status_alone(two: tuple[dict[str, Any], str, Path]) -> None:
    run = two[2]
    assert [path.name for path in run.iterdir()] == ["bench"]
    assert json.loads((run / "bench" / "status.json").read_text())["state"] == "finished"


def test_bench_alone_says_what_it_can_not_measure(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("bench", *JOB, "--run-dir", str(tmp_path), "--name", "run")
    assert codes == [0], output
    assert "no expectation: one process alone has no link to measure: start several" in output
    assert outcome_of(tmp_path / "run")["collectives"] == []
    assert outcome_of(tmp_path / "run")["job"]["step_s"] > 0


def test_bench_under_launch_gets_its_options(forks: Forks, tmp_path: Path) -> None:
    sizes = ["--sizes", "1K", "--iterations", "2", "--step-ms", "7.5"]
    line = ["launch", "--nproc", "2", "--command", "bench", *JOB, *sizes, "--run-dir", str(tmp_path), "--name", "run"]
    codes, output = forks.run(*line)
    assert codes == [0], output
    outcome = outcome_of(tmp_path / "run")
    assert {row["size"] for row in outcome["collectives"]} == {1024}
    assert outcome["job"]["step_s"] == 0.0075
    assert outcome["link"] is None  # one size makes no line


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--sizes", "1Q"], '--sizes must be numbers of bytes such as 1K,1M,64M, at least 4, got "1Q".'),
        (["--iterations", "0"], "--iterations must be >= 1, got 0."),
        (["--dataset", "imagefolder", "--data-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_bench_mistakes_are_one_line(forks: Forks, tmp_path: Path, words: list[str], what: str) -> None:
    codes, output = forks.run("bench", *JOB, *words, "--run-dir", str(tmp_path))
    assert codes == [2], output
    assert what in output
    assert "Traceback" not in output


def corrupt() -> None:
    """A network that turns one number into another, on rank 1."""
    import torch.distributed as dist

    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        done = right(tensor, *more, **named)
        if os.environ["RANK"] == "1" and tensor.dtype == torch.float32 and tensor.numel() > 1000:
            tensor[77] += 1
        return done

    dist.all_reduce = wrong


def deaf() -> None:
    """A rank 0 that can not listen for a plain connection."""
    from train.commands.bench import tcp_pair

    tcp_pair.address_of = lambda interface: "203.0.113.1"
    tcp_pair.address_of_host_name = lambda: "203.0.113.1"


def test_bench_without_a_plain_connection_measures_the_rest(forks: Forks, tmp_path: Path) -> None:
    line = ["bench", *JOB, "--sizes", "1K", "--iterations", "2", "--run-dir", str(tmp_path), "--name", "run"]
    codes, output = forks.run(*line, world_size=2, preload="tests.commands.test_bench:deaf")
    assert codes == [0, 0], output
    assert "no plain connection to compare with: rank 0 can't listen: " in output
    outcome = outcome_of(tmp_path / "run")
    assert (outcome["plain"], {row["backend"] for row in outcome["collectives"]}) == (None, {"gloo"})


def dies_on_the_plain_connection() -> None:
    """Rank 1, while rank 0 waits for it on the plain connection."""
    from train.commands.bench import tcp_pair

    if os.environ["RANK"] == "1":
        tcp_pair._receive = lambda connection, message: os.kill(os.getpid(), signal.SIGKILL)


def test_bench_names_the_rank_that_dies_on_the_plain_connection(forks: Forks, tmp_path: Path) -> None:
    line = ["bench", *JOB, "--sizes", "1K", "--run-dir", str(tmp_path), "--step-ms", "1"]
    codes, output = forks.run(*line, world_size=2, preload="tests.commands.test_bench:dies_on_the_plain_connection")
    assert codes == [171, -9], output
    assert "lost a peer at step 0: suspected: rank 1 on " in output
    assert "Traceback" not in output


def test_a_stranger_is_not_measured_in_place_of_the_last_rank() -> None:
    token = b"t" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said = (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 32, token[:9], token)
        callers = [socket.create_connection(listener.getsockname()) for _ in said]
        for caller, words in zip(callers, said, strict=True):
            caller.sendall(words)
            if words != token[:9]:  # that one stays, and says no more
                caller.shutdown(socket.SHUT_WR)
        with tcp_pair._accept(listener, token) as accepted:
            assert accepted.getpeername() == callers[-1].getsockname()
        for caller in callers:
            caller.close()


def garble() -> None:
    """A network that turns one byte into another, towards rank 1."""
    from train.commands.bench import tcp_pair

    right = tcp_pair._receive

    def wrong(connection: Any, message: memoryview) -> None:
        right(connection, message)
        if os.environ["RANK"] == "1" and len(message) > 1024:
            message[77] ^= 1

    tcp_pair._receive = wrong


def test_bench_finds_a_wrong_byte_on_the_plain_connection(forks: Forks, tmp_path: Path) -> None:
    line = ["bench", *JOB, "--sizes", "1K,64K", "--iterations", "2", "--run-dir", str(tmp_path)]
    codes, output = forks.run(*line, world_size=2, preload="tests.commands.test_bench:garble")
    assert codes == [1, 1], output
    assert re.search(r"point to point of 65536 bytes came out wrong on rank 1: .* over sockets\.", output), output


def test_bench_finds_a_wrong_result_and_names_the_rank(forks: Forks, tmp_path: Path) -> None:
    line = ["bench", *JOB, "--sizes", "1K,64K", "--iterations", "2", "--run-dir", str(tmp_path)]
    codes, output = forks.run(*line, world_size=2, preload="tests.commands.test_bench:corrupt")
    assert codes == [1, 1], output
    assert "all-reduce of 65536 bytes came out wrong on rank 1: 4.0 at 77, not 3.0" in output


# Against plain sockets ----------------------------------------------------------------------------------------

LIMIT = 20e6 / 8  # bytes/s; so slow that a process which waits for a CPU hardly changes the result
TOLERANCE = 0.25  # of point to point; measured: within 2 %, on a busy machine too


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    reason = namespaces.missing()
    if reason:
        pytest.skip(reason)
    made = Pair(tmp_path / "nodes")
    yield made
    made.close()


def test_bench_agrees_with_plain_sockets_under_one_limit(pair: Pair, tmp_path: Path) -> None:
    """The limit is 20 Mbit/s for both: their ratio does not depend on the machine."""
    for node in pair.nodes:
        node.run("tc qdisc add dev eth0 root tbf rate 20mbit burst 32kb latency 4s")
    share = ["--sizes", "256K,1M", "--iterations", "3", "--seconds", "600"]
    line = ["bench", *JOB, *share, "--run-dir", tmp_path, "--name", "run", "--step-ms", "1"]
    ranks = jobs.Job()
    with jobs.ended(ranks):
        for number, node in enumerate(pair.nodes):
            env = rank_env(number, 2, 29400, MASTER_ADDR=pair.nodes[0].ip, LOCAL_RANK="0")
            jobs.start(*node.prefix, sys.executable, MAIN, *line, env=env, job=ranks)
        assert ranks.wait(280) == [0, 0], ranks.output
    outcome = outcome_of(tmp_path / "run")
    rows = [row for row in outcome["collectives"] if row["size"] == 2**20]
    bus = {row["operation"]: row["bus"] for row in rows if row["backend"] == "gloo"}
    plain = next(row["bus"] for row in rows if row["backend"] == "sockets")
    print("over plain sockets:", {operation: round(speed / plain, 3) for operation, speed in bus.items()}, round(plain))
    assert 0.8 * LIMIT < plain < 1.05 * LIMIT
    assert outcome["plain"] == {"size": 2**20, "speed": plain, "ratio": {"gloo": bus["point to point"] / plain}}
    assert bus["point to point"] == pytest.approx(plain, rel=TOLERANCE)
    for operation in ("all-reduce", "broadcast"):
        assert 0.4 * plain < bus[operation] < 1.5 * plain, (operation, bus, plain)
    # The line through the sizes finds the limit again
    assert 1 / outcome["link"]["beta_s"] == pytest.approx(LIMIT, rel=0.6)
    assert outcome["hosts"] == ["node0", "node1"]
    assert "the line is through two sizes alone, unproven (all-reduce on gloo" in ranks.output


# The model ----------------------------------------------------------------------------------------------------


def test_cost_model_finds_the_link_that_made_the_times() -> None:
    link = CostModel(50e-6, 1e-9)
    points = [(size, cost_model.ring_s(link, 4, size)) for size in (1024.0, 65536.0, 2.0**24)]
    found = cost_model.fit_all_reduce(points, 4)
    assert found.alpha_s == pytest.approx(link.alpha_s)
    assert found.beta_s == pytest.approx(link.beta_s)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_cost_model_has_the_textbooks_times() -> None:
    link = CostModel(1.0, 0.01)
    assert cost_model.ring_s(link, 2, 100) == pytest.approx(2 * 1 + 0.01 * 100)
    assert cost_model.ring_s(link, 8, 800) == pytest.approx(14 * 1 + 14 / 8 * 0.01 * 800)
    assert cost_model.tree_s(link, 8, 800) == pytest.approx(2 * 3 * 1 + 2 * 0.01 * 800)
    assert cost_model.tree_s(link, 9, 0) == pytest.approx(2 * 4)
    assert cost_model.ring_s(link, 1, 800) == cost_model.tree_s(link, 1, 800) == 0


def test_cost_model_takes_ddps_buckets() -> None:
    assert cost_model.buckets(1000) == [1000]
    assert cost_model.buckets(2**20 + 60 * 2**20) == [2**20, 25 * 2**20, 25 * 2**20, 10 * 2**20]
    assert sum(cost_model.buckets(12_345_678)) == 12_345_678


def test_cost_model_hides_all_but_the_last_bucket() -> None:
    link = CostModel(0.0, 1e-9)
    one, several = 2**20, 2**20 + 50 * 2**20
    (row,) = cost_model.expected(link, one, 1.0, [2])
    assert row["efficiency_hidden"] == row["efficiency"] == pytest.approx(1 / (1 + one * 1e-9))
    (row,) = cost_model.expected(link, several, 1.0, [2])
    assert row["efficiency_hidden"] == pytest.approx(1 / (1 + 25 * 2**20 * 1e-9))
    assert row["efficiency"] < row["efficiency_hidden"]


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 8, 0.875), ("broadcast", 8, 1.0),
     ("point to point", 8, 1.0)],
)
def test_bus_factor_is_that_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    assert cost_model.bus_factor(operation, ranks) == factor


@pytest.mark.parametrize(
    ("compress", "size"), [("none", 4 * 5050), ("fp16", 2 * 5050), ("powersgd", 4 * (2 * 150 + 50))]
)
def test_gradient_bytes_follow_compress(compress: str, size: int) -> None:
    assert gradient_bytes(list(nn.Linear(100, 50).parameters()), compress, 2) == size


@pytest.mark.parametrize(
    ("word", "size"), [("1K", 1024), ("64kib", 65536), ("2M", 2**21), ("512", 512), ("1GB", 2**30)]
)
def test_sizes_are_read(word: str, size: int) -> None:
    assert parse_size(word) == size


@pytest.mark.parametrize("word", ["x", "-1K", "3", "1.5M", "K", "2000G"])
def test_sizes_that_are_no_sizes_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--sizes must be"):
        parse_size(word)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n",
          "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "300\n",
          "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "9\n"}, 700),
        ({"proc/self/cgroup": "0::/job\n",
          "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "990\n",
          "sys/fs/cgroup/job/memory.stat": "anon 290\nfile 700\ninactive_file 600\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "990\n",
          "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 600\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n"}, None),
    ],
)
def test_memory_left_is_that_of_the_container(tmp_path: Path, contents: dict[str, str], expected: int | None) -> None:
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == expected


def test_backends_are_gloo_and_the_accelerators_own() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert backends("gloo", cpu) == [("gloo", cpu)]
    assert backends("gloo", gpu) == [("gloo", cpu)]
    assert backends("cpu:gloo,cuda:nccl", gpu) == [("gloo", cpu), ("nccl", gpu)]


@pytest.mark.parametrize(
    "curves",
    [
        {"one": [(1024.0, 0.0)]},
        {"one": [(1024.0, 5e6)]},
        {"one": [(1024.0, 5e6), (4096.0, 6e6)]},
        {f"point to point, backend {n}": [(2.0**k, 1e3 * 2.0**k / n) for k in range(10, 31, 2)] for n in range(1, 10)},
    ],
)
def test_chart_is_legible_with_any_curves(curves: dict[str, list[tuple[float, float]]], tmp_path: Path) -> None:
    options: Any = {"labels": ("size of a message", "bus bandwidth"), "formats": (report._bytes, report._rate)}
    with new_figure(760 + 40 * len(curves)) as figure:
        draw_lines(figure, curves, "Bus bandwidth, 8 ranks on node-0, node-1, node-2, node-3", **options)
        found = assert_legible(figure)
    assert {*curves, "size of a message", "bus bandwidth"} <= set(found)
    units = [text.split()[-1] for text in found if text[0].isdigit()]
    assert len(units) > 2
    assert set(units) <= {"B", "KiB", "MiB", "GiB", "kB/s", "MB/s", "GB/s"}
    line_chart(curves, "title", **options, path=tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.size[0] == WIDTH
