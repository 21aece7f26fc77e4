"""What a script of the user's finds in its environment: every variable that torchrun sets, with torchrun's meaning.

`env://` reads five of them. Lightning, Accelerate and Transformers look for more to find out who started them:
TORCHELASTIC_RUN_ID makes Lightning and torch take the process for one of torchrun's, also where Slurm's variables are
there too, and LOCAL_RANK keeps Accelerate and Transformers from starting processes of their own. No torch here.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankup.env.rank_env import RankEnv
from train.process.limits import cpu_quota

# Ours, which would make a program of ours that the script starts take itself for this rank
OWN = "RANKUP_"


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank alone may not know: the layout of the nodes, how often the ranks were restarted, and the master's
    port for the script."""

    node: int
    num_nodes: int
    local_world_size: int
    restarts: int
    port: int


def places(hosts: Sequence[str], local_ranks: Sequence[int], *, restarts: int, port: int) -> list[Place]:
    """The place of each rank, from each rank's machine and local rank. A machine is a node.

    Ranks that were started by hand may all have LOCAL_RANK 0: on such a machine each rank is a node of its own.
    """
    on_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        on_host.setdefault(host, []).append(rank)
    nodes: list[list[int]] = []
    for ranks in on_host.values():
        distinct = len({local_ranks[rank] for rank in ranks}) == len(ranks)
        nodes += [ranks] if distinct else [[rank] for rank in ranks]
    found = {
        rank: Place(node, len(nodes), len(ranks), restarts, port)
        for node, ranks in enumerate(sorted(nodes))
        for rank in ranks
    }
    return [found[rank] for rank in range(len(hosts))]


def script_environment(
    environ: Mapping[str, str], launch: RankEnv, place: Place, *, run_id: str, error_file: Path
) -> dict[str, str]:
    """The whole environment of the script. `environ`: of this process. `run_id`: of all restarts.

    What the launcher says of itself counts before what was seen of the ranks.
    """
    local_world_size = launch.local_world_size or place.local_world_size
    nodes_known = launch.num_nodes is not None and launch.node_rank is not None
    node, num_nodes = (launch.node_rank, launch.num_nodes) if nodes_known else (place.node, place.num_nodes)
    set_by_torchrun = {
        "RANK": launch.rank, "LOCAL_RANK": launch.local_rank, "WORLD_SIZE": launch.world_size,
        "LOCAL_WORLD_SIZE": local_world_size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_nodes,
        "ROLE_RANK": launch.rank, "ROLE_WORLD_SIZE": launch.world_size, "ROLE_NAME": "default",
        "MASTER_ADDR": launch.master_addr,
        "TORCHELASTIC_RESTART_COUNT": place.restarts, "TORCHELASTIC_MAX_RESTARTS": launch.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_ERROR_FILE": error_file,
    }
    store = {
        "MASTER_PORT": place.port,
        # Where it is False the script's rank 0 opens the port. True would have all ranks connect to a store that nobody
        # serves, unless it is torchrun's own
        "TORCHELASTIC_USE_AGENT_STORE": launch.agent_store and place.port == launch.master_port,
    }
    # As torchrun does where there is nothing; but it takes one thread, whatever the machine has
    threads = max(1, int((cpu_quota() or os.cpu_count() or 1) // local_world_size))
    by_default = {
        "OMP_NUM_THREADS": threads, "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "PYTHONUNBUFFERED": 1,  # its output is a pipe: lines would come in blocks, and the last not at all
        "PYTHONFAULTHANDLER": 1,  # a crash in a library's own code leaves the Python stack in the log
    }
    given = {name: value for name, value in environ.items() if not name.startswith(OWN)}
    ours = {name: str(value) for name, value in set_by_torchrun.items()}
    # torchrun's own are right; under any other launcher the shell may hold those of an earlier torchrun
    both = {**ours, **given} if launch.launcher == "torchrun" else {**given, **ours}
    return {name: str(value) for name, value in {**by_default, **both, **store}.items()}
