"""What a rank finds in its environment: every variable that torchrun sets, with torchrun's meaning, and one of ours.

`env://` reads five of them. Lightning, Accelerate and Transformers look for more to find out who started them:
TORCHELASTIC_RUN_ID makes Lightning and torch take the process for one of torchrun's, also where Slurm's variables are
there too, and LOCAL_RANK keeps Accelerate and Transformers from starting processes of their own. No torch here.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Ours and torchrun's own arguments, which were meant for the agent: `rankup launch` or torchrun in a script would obey
# them
FOR_THE_AGENT = ("RANKUP_", "PET_")
AGENT = "RANKUP_AGENT"
PARENT = "RANKUP_PARENT"  # the process without which the agent shall not go on


def rank_environment(
    environ: Mapping[str, str], *, rank: int, local_rank: int, world_size: int, local_world_size: int, node_rank: int,
    num_nodes: int, master_addr: str, master_port: int, use_agent_store: bool, restarts: int, max_restarts: int,
    run_id: str, error_file: Path, agent: Mapping[str, Any] | None, cpus: float | None,
) -> dict[str, str]:
    """The whole environment of a rank. Everything else is kept, Slurm's variables too.

    `environ`: of the agent. `use_agent_store`: somebody serves a store at the master's port; otherwise the script's
    rank 0 opens it. `restarts`: how often the ranks were started again. `run_id`: of all restarts. `error_file`: for
    torch's @record. `agent`: what the agent tells a rank that imports rankup. `cpus`: what this node's processes may
    use; None: all that the machine has.
    """
    # A script that imports rankup may know our settings by the environment, as where its cache lies
    hidden = FOR_THE_AGENT if agent is None else ("PET_", PARENT)
    given = {name: value for name, value in environ.items() if not name.startswith(hidden)}
    by_default = {
        # torchrun takes one thread, whatever the machine has
        "OMP_NUM_THREADS": max(1, int((cpus or os.cpu_count() or 1) // local_world_size)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "PYTHONUNBUFFERED": 1,  # its output may be a pipe: lines would come in blocks, and the last not at all
        "PYTHONFAULTHANDLER": 1,  # a crash in a library's own code leaves the Python stack in the log
    }
    # Before those that are there: the shell may hold the variables of an earlier torchrun
    set_by_torchrun = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": node_rank, "GROUP_WORLD_SIZE": num_nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default", "MASTER_ADDR": master_addr, "MASTER_PORT": master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": use_agent_store,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    ours = {} if agent is None else {AGENT: json.dumps(agent)}
    return {name: str(value) for name, value in {**by_default, **given, **set_by_torchrun, **ours}.items()}
