"""The environment of a rank: torchrun's variables with torchrun's meanings, and those that stop a library from starting
processes itself. Imports no torch."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rankup.agent.network import SECRET_FILE
from rankup.env.launchers import as_scheduled_task
from rankup.env.node_env import NodeEnv

# By default each Python orders sets of texts differently, so class numbers that come from a set would differ after a
# restart of all nodes, or even between nodes. Python reads the variable only when it starts
HASH_SEED = {"PYTHONHASHSEED": "0"}


def environment_of(
    rank: int, local_rank: int, *, node: NodeEnv, commit: Mapping[str, Any], num_threads: int, max_restarts: int,
    errors: Path, interface: Mapping[str, str], run: Mapping[str, Any] | None, jobs: Iterable[str],
) -> dict[str, str]:
    """Return the environment of a rank: this agent's own, and all variables of torchrun. TORCHELASTIC_RUN_ID makes
    Lightning and torch treat the rank as one of torchrun's, even under Slurm. LOCAL_RANK stops Accelerate and
    Transformers from starting processes.

    `local_rank`: the index among this agent's ranks. `commit`: the leader's message. `errors`: the folder of error
    files. `interface`: variables that name the network interface. `run`: what `rankup.init` must know of the run, which
    RANKUP_AGENT then holds; None for a script that does not import rankup. `jobs`: the ids of the job so far."""
    local, size, local_rank = node.local_world_size, node.world_size, node.local_rank + local_rank
    # PET_ variables are options of torchrun. A script that imports rankup may read our settings, like RANKUP_CACHE
    hidden = ("PET_", "RANKUP_") if run is None else ("PET_", SECRET_FILE)
    given = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    by_default: dict[str, Any] = {
        **HASH_SEED,
        # torchrun always sets one thread, however many CPUs there are
        "OMP_NUM_THREADS": num_threads,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "PYTHONUNBUFFERED": 1,  # a pipe would otherwise get lines in blocks, and lose the last block in a crash
        "PYTHONFAULTHANDLER": 1,  # a crash in native code leaves the Python stack in the log
    }
    # These override inherited variables, which may come from an earlier torchrun in the same shell
    set_by_torchrun = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local, "GROUP_RANK": node.node_rank, "GROUP_WORLD_SIZE": node.num_nodes,
        "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default",
        "MASTER_ADDR": node.master_addr, "MASTER_PORT": commit["port"],
        "TORCHELASTIC_RESTART_COUNT": commit["restarts"],
        "TORCHELASTIC_MAX_RESTARTS": max_restarts, "TORCHELASTIC_RUN_ID": commit["job"],
        # torch's decorator @record writes the script's error there for the user; rankup does not read it
        "TORCHELASTIC_ERROR_FILE": (errors / f"error-rank-{rank}.json").absolute(),
        "TORCHELASTIC_USE_AGENT_STORE": commit.get("store"),  # if False, rank 0 opens a store at MASTER_PORT
    }
    ours = as_scheduled_task(os.environ, rank=rank, local=local_rank, size=size, local_size=local)
    if run is not None:  # the fork server adds where the rank finds its line and its record
        agent = {"job": commit["job"], "restarts": commit["restarts"], "run": run, "jobs": [*jobs]}
        ours["RANKUP_AGENT"] = json.dumps(agent)
    values = {**by_default, **given, **interface, **set_by_torchrun, **ours}
    return {name: str(value) for name, value in values.items()}
