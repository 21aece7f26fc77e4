"""A rank by the variables that torchrun sets: complete, absent, or refused in one line per mistake with the way out."""

import dataclasses
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from rankup.env.rank_env import RankEnv, check_loopback, describe, how_to_start, read_rank_env, with_options
from rankup.errors import LaunchError
from tests.rigs.jobs import ROOT

Env = dict[str, str]

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
# What torch's agent gives each worker: node 1 of 2, its second process of two.
AGENT = {
    **FULL, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False",
}
OF_AGENT = {"commit": {"job": "j", "restarts": 1}, "socket": "@agent"}
LAUNCH = {**AGENT, "RANKUP_AGENT": json.dumps(OF_AGENT)}


def refusal(env: Env) -> str:
    with pytest.raises(LaunchError) as refused:
        read_rank_env(env)
    return str(refused.value)


def warning(env: Env) -> str:
    return "\n".join(read_rank_env(env).warnings)


# By hand --------------------------------------------------------------------------------------------------------------


def test_nothing_set_is_a_single_process():
    env = read_rank_env({"HOME": "/home/me", "OMP_NUM_THREADS": "1"})
    assert env == RankEnv()
    assert (env.rank, env.local_rank, env.world_size) == (0, 0, 1)
    assert (env.local_world_size, env.num_nodes, env.node_rank) == (1, 1, 0)
    assert (env.master_addr, env.master_port, env.launcher) == ("127.0.0.1", 0, "python")
    assert (env.distributed, env.run_name, env.warnings) == (False, None, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.rank = 1  # type: ignore[misc]


def test_complete_set_starts_that_rank():
    env = read_rank_env({**FULL, "LOCAL_RANK": "1"})
    assert (env.rank, env.local_rank, env.world_size) == (1, 1, 4)
    assert (env.master_addr, env.master_port, env.launcher) == ("node0", 29500, "environment")
    assert env.distributed
    assert set(env.origins.values()) == {"environment"}
    assert (env.local_world_size, env.num_nodes, env.node_rank) == (None, None, None)


def test_local_rank_is_0_by_default():
    env = read_rank_env(FULL)
    assert (env.local_rank, env.origins["LOCAL_RANK"]) == (0, "default")


def test_complete_set_of_one_is_a_group_of_one():
    env = read_rank_env({**FULL, "RANK": "0", "WORLD_SIZE": "1"})
    assert env.distributed
    assert (env.num_nodes, env.local_world_size, env.node_rank) == (1, 1, 0)


def test_local_world_size_tells_the_number_of_nodes():
    assert [read_rank_env({**FULL, "LOCAL_WORLD_SIZE": size}).num_nodes for size in "243"] == [2, 1, 2]


# Refusals -------------------------------------------------------------------------------------------------------------

HALVES = [
    {name for name, there in zip([*FULL, "LOCAL_RANK"], chosen, strict=True) if there}
    for chosen in product([True, False], repeat=5)
    if any(chosen) and not all(chosen[:4])
]


def test_half_a_set_is_refused_naming_all_that_is_missing():
    assert len(HALVES) == 29  # of 31 non-empty sets two are complete
    for names in HALVES:
        message = refusal({name: value for name, value in {**FULL, "LOCAL_RANK": "0"}.items() if name in names})
        assert "\n" not in message
        shown, _, rest = message.partition(" but ")
        gap, _, way_out = rest.partition(" not set. ")
        assert {pair.split("=")[0] for pair in shown.split()} == names
        assert set(gap.split()) - {"is", "are"} == set(FULL) - names
        assert "torchrun" in way_out
        assert "slurm/task.sh" in way_out


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        *(({name: ""}, f"{name} must be a whole number") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
        *(({"RANK": text}, "RANK must be a whole number from 0 to 3, got ") for text in
          ("one", "1.0", "\u0661", "$SLURM_PROCID", " 1", "4\n", "4", "-1")),
        ({"WORLD_SIZE": "0"}, "RANK must be a whole number from 0 to -1, got '1' (from environment)"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK must be a whole number from 0 to 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be a whole number from 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE must be a whole number from 1 to 4"),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK must be a whole number from 0 to 1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number from 1 to 65535, got '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535"),
        *(({"MASTER_ADDR": text}, "MASTER_ADDR must be a host name or an address, without a port, got ") for text in
          ("", "node0 ", "node0\nnode1", "[2001:db8::1]", "node0:29500", "tcp://node0", "$(MASTER)", "rn[0-1]")),
    ],
)
def test_wrong_value_is_named_with_its_rule_and_who_sets_it(change: Env, rule: str):
    got = refusal({**FULL, **change})
    assert any(line.startswith(rule) for line in got.splitlines()), got
    assert all("torchrun" in line for line in got.splitlines())


@pytest.mark.parametrize("host", ["node0", "job-master-0.ns.svc", "my_service", "10.0.0.1", "::1", "2001:db8::1"])
def test_host_names_and_plain_addresses_are_taken(host: str):
    assert read_rank_env({**FULL, "MASTER_ADDR": host}).master_addr == host


def test_all_mistakes_are_reported_at_once_one_a_line():
    lines = refusal({**FULL, "RANK": "9", "LOCAL_RANK": "x", "MASTER_PORT": "99999"}).splitlines()
    assert sorted(line.split()[0] for line in lines) == ["LOCAL_RANK", "MASTER_PORT", "RANK"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_loopback_on_several_nodes_is_refused_unless_simulated(host: str):
    env = read_rank_env({**AGENT, "MASTER_ADDR": host})
    with pytest.raises(LaunchError, match=r"on 2 nodes: each node would wait for itself\..*--simulated-nodes"):
        check_loopback(env, False)
    check_loopback(env, True)


def test_loopback_is_accepted_where_it_may_be_right():
    local = {**FULL, "MASTER_ADDR": "localhost"}  # there the number of nodes is not known
    for env in (AGENT, local, {**local, "LOCAL_WORLD_SIZE": "4"}, {}):
        check_loopback(read_rank_env(env), False)


# torchrun and launch --------------------------------------------------------------------------------------------------


def test_torchrun_tells_nodes_and_node_rank():
    env = read_rank_env(AGENT)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (3, 1, 4, 2)
    assert (env.num_nodes, env.node_rank, env.launcher, env.warnings) == (2, 1, "torchrun", ())
    assert set(env.origins.values()) == {"torchrun"}


def test_launch_is_known_by_its_mark_whatever_is_left_of_a_torchrun():
    env = read_rank_env({**LAUNCH, "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert (env.launcher, env.origins["RANK"], env.num_nodes) == ("launch", "launch", 2)
    assert (env.agent_store, env.restart_count, env.agent) == (True, 1, OF_AGENT)
    assert env.attempt == "j-1"


def test_torchrun_counts_its_own_restarts():
    env = read_rank_env({**AGENT, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert env.restart_count == 3


def test_parent_is_who_would_leave_the_rank_behind():
    """A torchrun that is killed leaves its processes running; our own launchers name themselves."""
    assert read_rank_env(AGENT).parent_pid == os.getppid()
    assert read_rank_env({**AGENT, "RANKUP_PARENT": "4711"}).parent_pid == 4711
    assert read_rank_env({"RANKUP_PARENT": "4711"}).parent_pid == 4711
    assert read_rank_env(FULL).parent_pid is read_rank_env(LAUNCH).parent_pid is None


def test_agent_store_is_torchs_own_word_and_not_that_of_another_torchrun():
    for word, expected in (("True", True), ("False", False)):
        assert read_rank_env({**AGENT, "TORCHELASTIC_USE_AGENT_STORE": word}).agent_store is expected
    assert read_rank_env({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store is False


def test_id_that_is_left_of_a_torchrun_makes_none():
    env = read_rank_env({**FULL, "TORCHELASTIC_RUN_ID": "none"})
    assert (env.launcher, env.parent_pid) == ("environment", None)


def test_torchrun_in_a_real_process_is_read_as_torchrun(tmp_path: Path):
    script = tmp_path / "who.py"
    script.write_text(
        "import os, pathlib, rankup.env.rank_env as rank_env\n"
        "env = rank_env.read_rank_env(os.environ)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'rank-{{env.rank}}').write_text(rank_env.describe(env))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=240)
    for rank in (0, 1):
        line = (tmp_path / f"rank-{rank}").read_text()
        assert line.startswith(f"rank {rank} of 2 (local {rank} of 2, node 0 of 1), master ")
        assert line.endswith("; RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from torchrun")


# In words -------------------------------------------------------------------------------------------------------------


def test_hint_for_missing_ranks_is_the_launchers_own():
    assert "torchrun on every node" in how_to_start(read_rank_env(AGENT))
    assert "`launch` on every node" in how_to_start(read_rank_env(LAUNCH))
    assert "each RANK from 0 to 3" in how_to_start(read_rank_env(FULL))


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({}, "rank 0 of 1: a single process, as no launcher gave a rank"),
        (AGENT, "rank 3 of 4 (local 1 of 2, node 1 of 2), master node0:29500; "
                "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from torchrun"),
        (FULL, "rank 1 of 4 (local 0), master node0:29500; "
               "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from environment, LOCAL_RANK by default"),
        ({**FULL, "MASTER_ADDR": "2001:db8::1", "LOCAL_RANK": "0"},
         "rank 1 of 4 (local 0), master [2001:db8::1]:29500; "
         "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from environment"),
    ],
    ids=["single", "node-known", "by-hand", "ipv6"],
)
def test_describe_says_in_one_line_who_set_what(env: Env, line: str):
    assert describe(read_rank_env(env)) == line


# Options --------------------------------------------------------------------------------------------------------------


def test_options_stand_for_the_variables():
    told = with_options({"HOME": "/h"}, init_method="tcp://node0:29400", rank=1, world_size=2)
    assert told == {"HOME": "/h", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    assert with_options({"RANK": "1"}) == {"RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "flag"),
    [({"RANK": "0"}, "--rank"), ({"WORLD_SIZE": "2"}, "--world-size"), ({"MASTER_ADDR": "a"}, "--init-method")],
)
def test_options_beside_the_variables_are_refused(environ: Env, flag: str):
    with pytest.raises(LaunchError, match=f"{flag} must be left out where"):
        with_options(environ, init_method="tcp://node0:29400", rank=0, world_size=2)
