"""A rank by the five variables alone: complete, absent, or refused in one line per mistake that says the way out."""

import dataclasses
from itertools import product

import pytest

from train.errors import LaunchError
from train.process.env import Launch, check_loopback, describe, read_env

Env = dict[str, str]

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
# The first process of node 1 of 2, as torchrun tells it.
NODE_1 = {**FULL, "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def refusal(env: Env) -> str:
    with pytest.raises(LaunchError) as refused:
        read_env(env)
    return str(refused.value)


def test_nothing_set_is_a_single_process():
    launch = read_env({"HOME": "/home/me", "OMP_NUM_THREADS": "1"})
    assert (launch.rank, launch.local_rank, launch.world_size) == (0, 0, 1)
    assert (launch.local_world_size, launch.num_nodes, launch.node_rank) == (1, 1, 0)
    assert (launch.master_addr, launch.master_port, launch.launcher) == ("127.0.0.1", 0, "python")
    assert (launch.distributed, launch.run_name, launch.warnings) == (False, None, ())


def test_complete_set_starts_that_rank():
    launch = read_env({**FULL, "LOCAL_RANK": "1"})
    assert (launch.rank, launch.local_rank, launch.world_size) == (1, 1, 4)
    assert (launch.master_addr, launch.master_port, launch.launcher) == ("node0", 29500, "environment")
    assert launch.distributed
    assert set(launch.origins.values()) == {"environment"}
    assert (launch.local_world_size, launch.num_nodes, launch.node_rank) == (None, None, None)


def test_local_rank_is_0_by_default():
    launch = read_env(FULL)
    assert (launch.local_rank, launch.origins["LOCAL_RANK"]) == (0, "default")


def test_complete_set_of_one_is_a_group_of_one():
    launch = read_env({**FULL, "RANK": "0", "WORLD_SIZE": "1"})
    assert launch.distributed
    assert (launch.num_nodes, launch.local_world_size, launch.node_rank) == (1, 1, 0)


def test_local_world_size_tells_the_number_of_nodes():
    assert read_env({**FULL, "LOCAL_WORLD_SIZE": "2"}).num_nodes == 2
    assert read_env({**FULL, "LOCAL_WORLD_SIZE": "4"}).num_nodes == 1
    assert read_env({**FULL, "LOCAL_WORLD_SIZE": "3"}).num_nodes == 2


REQUIRED = list(FULL)
HALVES = [
    {name for name, there in zip([*REQUIRED, "LOCAL_RANK"], chosen, strict=True) if there}
    for chosen in product([True, False], repeat=5)
    if any(chosen) and not all(chosen[:4])
]


@pytest.mark.parametrize("given", HALVES, ids=lambda given: "+".join(sorted(given)))
def test_half_a_set_is_refused_naming_all_that_is_missing(given: set[str]):
    message = refusal({name: value for name, value in {**FULL, "LOCAL_RANK": "0"}.items() if name in given})
    assert "\n" not in message
    shown, _, rest = message.partition(" but ")
    gap, _, way_out = rest.partition(" not set. ")
    assert {pair.split("=")[0] for pair in shown.split()} == given
    assert set(gap.split()) - {"is", "are"} == set(REQUIRED) - given
    assert "torchrun" in way_out
    assert "slurm/task.sh" in way_out


def test_half_sets_were_tried():
    assert len(HALVES) == 29  # of 31 non-empty sets two are complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "RANK must be set or absent, got an empty string"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK must be set or absent, got an empty string"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be set or absent, got an empty string"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be set or absent, got an empty string"),
        ({"MASTER_PORT": ""}, "MASTER_PORT must be set or absent, got an empty string"),
        ({"RANK": "one"}, "RANK must be a whole number, got 'one' (from environment)"),
        ({"RANK": "1.0"}, "RANK must be a whole number, got '1.0'"),
        ({"RANK": "١"}, "RANK must be a whole number, got '١'"),
        ({"RANK": "$SLURM_PROCID"}, "RANK must be a whole number, got '$SLURM_PROCID'"),
        ({"RANK": " 1"}, "RANK must be a whole number without spaces, got ' 1'"),
        ({"WORLD_SIZE": "4\n"}, "WORLD_SIZE must be a whole number without spaces, got '4\\n'"),
        ({"LOCAL_RANK": "1 "}, "LOCAL_RANK must be a whole number without spaces, got '1 '"),
        ({"RANK": "4"}, "RANK must be 0..3 with WORLD_SIZE=4, got 4. Ranks count from 0"),
        ({"RANK": "-1"}, "RANK must be >= 0, got -1. Ranks count from 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be >= 1, got 0. It counts all processes"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK must be >= 0, got -1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK must be 0..0 with LOCAL_WORLD_SIZE=1, got 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be <= RANK, got LOCAL_RANK=2 RANK=1"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE must be <= WORLD_SIZE, got LOCAL_WORLD_SIZE=8 WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be >= 1, got 0"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK must be 0..1 with GROUP_WORLD_SIZE=2, got 2"),
        ({"GROUP_WORLD_SIZE": "5"}, "GROUP_WORLD_SIZE must be <= WORLD_SIZE"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be 1..65535, got 0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be 1..65535, got 65536"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
        ({"MASTER_ADDR": "node0 "}, "MASTER_ADDR must have no spaces or line ends, got 'node0 '"),
        ({"MASTER_ADDR": "node0\nnode1"}, "MASTER_ADDR must have no spaces or line ends, got 'node0\\nnode1'"),
        ({"MASTER_ADDR": "[2001:db8::1]"}, "MASTER_ADDR must be an IPv6 address without brackets"),
        ({"MASTER_ADDR": "node0:29500"}, "MASTER_ADDR must be a host alone; its port belongs in MASTER_PORT"),
        ({"MASTER_ADDR": "tcp://node0"}, "MASTER_ADDR must be a host name or an address"),
        ({"MASTER_ADDR": "$(MASTER)"}, "MASTER_ADDR must be a host name or an address"),
        ({"MASTER_ADDR": "rn[0-1]"}, "MASTER_ADDR must be a host name or an address"),
    ],
)
def test_wrong_value_has_its_own_line_with_a_way_out(change: Env, message: str):
    got = refusal({**FULL, **change})
    assert "\n" not in got
    assert got.startswith(message)
    assert len(got.split(". ", 1)[1]) > 10


@pytest.mark.parametrize("host", ["node0", "job-master-0.ns.svc", "my_service", "10.0.0.1", "::1", "2001:db8::1"])
def test_host_names_and_plain_addresses_are_taken(host: str):
    assert read_env({**FULL, "MASTER_ADDR": host}).master_addr == host


def test_all_mistakes_are_reported_at_once_one_a_line():
    lines = refusal({"RANK": "9", "WORLD_SIZE": "2", "LOCAL_RANK": "x", "MASTER_PORT": "99999"}).splitlines()
    assert [line.split()[0] for line in lines] == ["RANK=9", "LOCAL_RANK", "RANK", "MASTER_PORT"]
    assert "MASTER_ADDR is not set" in lines[0]


def test_incomplete_set_with_a_line_end_stays_one_line():
    lines = refusal({"WORLD_SIZE": "4\n"}).splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["WORLD_SIZE='4\\n'", "but"], ["WORLD_SIZE", "must"]]


LOOPBACKS = ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("host", LOOPBACKS)
def test_loopback_on_several_nodes_is_refused_unless_simulated(host: str):
    launch = read_env({**NODE_1, "MASTER_ADDR": host})
    with pytest.raises(LaunchError, match=r"on 2 nodes: each node would wait for itself\..*--simulated-nodes"):
        check_loopback(launch, False)
    check_loopback(launch, True)


@pytest.mark.parametrize(
    "env",
    [
        {**NODE_1, "MASTER_ADDR": "node0"},
        {**FULL, "MASTER_ADDR": "localhost"},  # the number of nodes is not known
        {**FULL, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "4"},
        {},
    ],
    ids=["other-host", "unknown", "one-node", "single"],
)
def test_loopback_is_accepted_where_it_may_be_right(env: Env):
    check_loopback(read_env(env), False)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({}, "rank 0 of 1: a single process, as no launcher gave a rank"),
        (NODE_1, "rank 2 of 4 (local 0 of 2, node 1 of 2), master node0:29500; "
                 "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from environment"),
        (FULL, "rank 1 of 4 (local 0), master node0:29500; "
               "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from environment, LOCAL_RANK by default"),
        ({**FULL, "MASTER_ADDR": "2001:db8::1", "LOCAL_RANK": "0"},
         "rank 1 of 4 (local 0), master [2001:db8::1]:29500; "
         "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from environment"),
    ],
    ids=["single", "node-known", "by-hand", "ipv6"],
)
def test_describe_says_in_one_line_who_set_what(env: Env, line: str):
    assert describe(read_env(env)) == line


def test_launch_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_env({}).rank = 1  # type: ignore[misc]
    assert isinstance(read_env({}), Launch)
