"""A rank from the variables that torchrun sets: complete, absent, or refused with one line and way out per mistake."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rankup.env.rank_env import RankEnv, describe, is_loopback, read_rank_env, with_options
from rankup.errors import UserError

Env = dict[str, str]

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
# torch's agent sets this for each worker: here node 1 of 2, its second process of two
AGENT = {
    **FULL, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False",
}
OF_AGENT = {"job": "j", "restarts": 1, "socket": "@agent"}
LAUNCH = {**AGENT, "RANKUP_AGENT": json.dumps(OF_AGENT)}


def refusal(env: Env) -> str:
    with pytest.raises(UserError) as refused:
        read_rank_env(env)
    return str(refused.value)


def test_nothing_set_is_a_single_process():
    env = read_rank_env({"HOME": "/home/me", "OMP_NUM_THREADS": "1"})
    assert env == RankEnv(0, 0, 1, 1, "127.0.0.1", 0, launcher="python")
    assert not env.distributed


def test_complete_set_starts_that_rank():
    assert read_rank_env({**FULL, "LOCAL_RANK": "1"}) == RankEnv(1, 1, 4, None, "node0", 29500, launcher="environment")
    assert read_rank_env({**FULL, "RANK": "0", "WORLD_SIZE": "1"}).distributed


def test_incomplete_set_is_refused_naming_all_that_is_missing():
    whole = {**FULL, "LOCAL_RANK": "0"}
    halves = [names for size in range(1, 5) for names in combinations(whole, size) if not FULL.keys() <= {*names}]
    assert len(halves) == 29  # of 31 non-empty sets two are complete
    for names in halves:
        message = refusal({name: whole[name] for name in names})
        shown, rest = message.split(" but ")
        gap, way_out = rest.split(" not set. ")
        assert {pair.split("=")[0] for pair in shown.split()} == {*names}
        assert {*gap.split()} - {"is", "are"} == FULL.keys() - {*names}
        assert ("torchrun" in way_out, "`rankup launch`" in way_out, "\n" in message) == (True, True, False)


@pytest.mark.parametrize(("change", "rule"), [
    *(({"RANK": text}, "RANK must be a whole number from 0 to 3, got ") for text in
      ("1.0", "\u0661", "$SLURM_PROCID", " 1", "4\n", "4", "-1")),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number >= 1, got '0'. "),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number >= 0, got 'x'. "),
    ({"RANK": ""}, "RANK='' WORLD_SIZE='4' MASTER_ADDR='node0' MASTER_PORT='29500' but RANK is not set. "),
    ({"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number from 1 to 65535, got '0'"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535"),
    *(({"MASTER_ADDR": text}, "MASTER_ADDR must be a host name or an address, without a port, got ") for text in
      ("node0\nnode1", "[2001:db8::1]", "node0:29500", "tcp://node0", "$(MASTER)")),
])
def test_wrong_value_is_named_with_its_rule_in_one_line(change: Env, rule: str):
    got = refusal({**FULL, **change})
    assert got.startswith(rule)
    assert "\n" not in got


@pytest.mark.parametrize("host", ["node0", "job-master-0.ns.svc", "my_service", "10.0.0.1", "::1", "2001:db8::1"])
def test_host_names_and_plain_addresses_are_accepted(host: str):
    assert read_rank_env({**FULL, "MASTER_ADDR": host}).master_addr == host


def test_torchrun_gives_the_ranks_of_a_node_and_its_restarts():
    env = read_rank_env({**AGENT, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (3, 1, 4, 2)
    assert (env.restart_count, env.launcher) == (3, "torchrun")


def test_launch_is_recognized_beside_leftovers_of_torchrun():
    env = read_rank_env({**LAUNCH, "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert env.launcher == "launch"
    assert (env.agent_store, env.restart_count, env.agent) == (True, 1, OF_AGENT)
    assert env.attempt == "j-1"


def test_leftovers_of_torchrun_are_no_launcher():
    assert read_rank_env({**FULL, "TORCHELASTIC_RUN_ID": "none"}).launcher == "environment"


def test_agent_store_is_used_only_if_this_launchers_torchrun_says_so():
    for word, expected in (("True", True), ("False", False)):
        assert read_rank_env({**AGENT, "TORCHELASTIC_USE_AGENT_STORE": word}).agent_store is expected
    assert read_rank_env({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store is False


@pytest.mark.parametrize(("env", "line"), [
    ({}, "rank 0 of 1: a single process, because no launcher gave a rank"),
    (AGENT, "rank 3 of 4 (local 1 of 2), master node0:29500; from torchrun"),
    (FULL, "rank 1 of 4 (local 0), master node0:29500; from environment"),
    ({**FULL, "MASTER_ADDR": "2001:db8::1"}, "rank 1 of 4 (local 0), master [2001:db8::1]:29500; from environment"),
], ids=["single", "node-known", "by-hand", "ipv6"])
def test_describe_names_the_rank_in_one_line(env: Env, line: str):
    assert describe(read_rank_env(env)) == line


def test_options_replace_the_variables():
    told = with_options({"HOME": "/h"}, init_method="tcp://node0:29400", rank=1, world_size=2)
    assert told == {"HOME": "/h", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    assert with_options({"RANK": "1"}) == {"RANK": "1"}


@pytest.mark.parametrize(("name", "environ"), [
    ("RANK", {"RANK": "0"}), ("WORLD_SIZE", {"WORLD_SIZE": "2"}), ("MASTER_ADDR", {"MASTER_ADDR": "a"}),
])
def test_options_that_repeat_variables_are_refused(name: str, environ: Env):
    with pytest.raises(UserError, match=f"must be left out if {name}="):
        with_options(environ, init_method="tcp://node0:29400", rank=0, world_size=2)


def test_world_size_without_a_rank_is_refused():
    """Under srun the launcher's own count would win."""
    with pytest.raises(UserError, match="--world-size must come with --rank, got 2 alone"):
        with_options({}, world_size=2)


@pytest.mark.parametrize(("host", "expected"), [
    ("LOCALHOST", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", True),
    ("10.0.0.1", False), ("node0", False), ("", False), ("fe80::1%eth0", False),
])
def test_loopback_is_any_name_or_address_of_the_machine_itself(host: str, expected: bool):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(("given", "missing"), [
    ({"init_method": "tcp://node0:29400"}, "RANK WORLD_SIZE are"),
    ({"init_method": "file:///tmp/meeting"}, "RANK WORLD_SIZE are"),
    ({"init_method": "file:///tmp/meeting", "rank": 0}, "WORLD_SIZE is"),
    ({"rank": 0, "world_size": 2}, "MASTER_ADDR MASTER_PORT are"),
])
def test_value_missing_from_options_is_named_by_its_variable(given: dict[str, Any], missing: str):
    assert f" but {missing} not set. " in refusal(dict(with_options({}, **given)))


def test_url_replaces_the_variables(tmp_path: Path):
    ipv6 = with_options({}, init_method="tcp://[fd00::1]:29400/", rank=0, world_size=1)
    assert (ipv6["MASTER_ADDR"], ipv6["MASTER_PORT"]) == ("fd00::1", "29400")
    by_file = with_options({}, init_method=f"file://{tmp_path}/a%20b", rank=1, world_size=2)
    env = read_rank_env(dict(by_file))
    assert (env.rank, env.file) == (1, f"{tmp_path}/a b")
    assert f"rank 1 of 2 (local 0), meeting through {tmp_path}/a b" in describe(env)


@pytest.mark.parametrize(("url", "rule"), [
    *((url, "must be tcp://HOST:PORT or file:///PATH, got") for url in (
        "tcp://node0", "tcp://:29400", "tcp://user@node0:1", "http://node0:29400", "node0:29400", "env://",
        "file://node0/x", "file:///", "tcp://node0:29400?rank=1",
    )),
    *((f"file:///{name}", "must name a file in an existing folder") for name in ("no/such/meeting", "tmp")),
])
def test_url_of_another_kind_or_an_impossible_file_is_refused(url: str, rule: str):
    with pytest.raises(UserError, match=f"--init-method {rule}"):
        with_options({}, init_method=url)
