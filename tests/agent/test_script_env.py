"""The environment of a rank: all that torchrun sets, nothing that was meant for the agent."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rankup.agent.script_env import rank_environment

FACTS: dict[str, Any] = {
    "rank": 3, "local_rank": 1, "world_size": 4, "local_world_size": 2, "node_rank": 1, "num_nodes": 2,
    "master_addr": "10.0.0.1", "master_port": 29400, "use_agent_store": False, "restarts": 2, "max_restarts": 5,
    "run_id": "job", "error_file": Path("/run/error.json"), "agent": None, "cpus": 7.5,
}


def test_rank_finds_every_variable_of_torchrun() -> None:
    env = rank_environment({"RANK": "9", "TORCHELASTIC_RUN_ID": "stale", "HOME": "/h"}, **FACTS)
    assert env == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/run/error.json", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HOME": "/h",
    }


def test_variables_of_the_torch_that_is_installed_are_all_there() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    agent = Path(torch.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    _, _, table = agent.read_text().partition("worker_env = {")
    names = set(re.findall(r'^ +"([A-Z_]+)":', table.partition("}\n")[0], re.MULTILINE))
    assert len(names) > 10
    assert names <= rank_environment({}, **FACTS).keys()


def test_what_was_meant_for_the_agent_stays_with_it() -> None:
    outside = {
        "RANKUP_CACHE": "x", "RANKUP_PARENT": "7", "RANKUP_AGENT": "another's", "PET_NNODES": "2", "SLURM_PROCID": "7",
        "CARPET": "y",
    }
    assert rank_environment(outside, **FACTS).keys() & outside.keys() == {"SLURM_PROCID", "CARPET"}
    env = rank_environment(outside, **{**FACTS, "agent": {"fd": 3, "host": "é"}})
    assert json.loads(env["RANKUP_AGENT"]) == {"fd": 3, "host": "é"}
    assert env.keys() & outside.keys() == {"SLURM_PROCID", "CARPET", "RANKUP_AGENT", "RANKUP_CACHE"}


@pytest.mark.parametrize(
    ("environ", "cpus", "threads"), [({}, 1.5, "1"), ({}, 8.0, "4"), ({"OMP_NUM_THREADS": "7"}, 8.0, "7")]
)
def test_threads_are_this_ranks_share_unless_somebody_says_so(
    environ: dict[str, str], cpus: float, threads: str
) -> None:
    assert rank_environment(environ, **{**FACTS, "cpus": cpus})["OMP_NUM_THREADS"] == threads


def test_settings_of_the_user_are_kept() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTHONUNBUFFERED": "", "PYTHONFAULTHANDLER": ""}
    env = rank_environment(environ, **{**FACTS, "use_agent_store": True})
    assert env.items() >= environ.items()
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
