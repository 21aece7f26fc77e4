"""Who an agent of `rankup launch` is: which of the nodes, how many ranks it starts, where the agents meet. No torch.

RANK and WORLD_SIZE in the environment (compose, Slurm's tasks, PyTorchJob, an Indexed Job) count agents here.
LOCAL_RANK counts the agents of one machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rankup.env.launchers import PORT_OF_LAUNCH, adopt_slurm, count, count_pods
from rankup.env.rank_env import read_rank_env
from rankup.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """How many nodes are in use where their number may change. `wait_s`: how long to wait for more than `least`, at the
    start and after a loss. `silent_s`: a node that gives no sign of life for so long is lost."""

    least: int
    most: int
    wait_s: float = 10.0
    silent_s: float = 10.0


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """One agent of a job; by default the only one. A machine may hold several agents: each is a node of the job."""

    node_rank: int = 0
    num_nodes: int = 1
    nproc: int = 1  # ranks that this agent starts, as each of the others does
    local_rank: int = 0  # of the first of its ranks, among those of the machine
    local_world_size: int = 1  # ranks of the machine
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 only for a single node, which chooses one
    run_name: str | None = None  # named by the scheduler's job, so that a requeued job resumes the same run
    limits: Limits | None = None  # `num_nodes` are then all that may be there, spares too

    @property
    def first_rank(self) -> int:
        """The number of the first of this agent's ranks."""
        return self.node_rank * self.nproc

    @property
    def world_size(self) -> int:
        """How many ranks all agents start together."""
        return self.num_nodes * self.nproc


def read_node_env(
    environ: Mapping[str, str], *, nnodes: int | None = None, nproc: int | None = None, node_rank: int | None = None,
    master_addr: str | None = None, master_port: int | None = None, limits: Limits | None = None,
) -> NodeEnv:
    """Which agent is this? The others are options of `launch`: they beat the environment's address and port, but the
    counts of both have to agree. With `limits` the environment's count of nodes may be any, and `nnodes` is of all that
    may be there. Raises UserError where they differ, for half a set, and below a launcher that starts the ranks."""
    variables, per_pod = count_pods(environ, node_rank=node_rank)
    nproc = nproc or per_pod or 1
    # Raises in a batch shell of several tasks, which is none of them
    is_task = "RANK" not in variables and (adopt_slurm(variables) or ("", {}))[0] == "slurm"
    where = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
    told = {name: str(value) for name, value in where.items() if value}
    if "RANK" not in variables and not is_task:
        index = variables.get("JOB_COMPLETION_INDEX", "0")
        if nnodes == 1:  # each pod trains alone, as it was told
            variables = {name: value for name, value in variables.items() if name != "JOB_COMPLETION_INDEX"}
        if (nnodes or 1) == 1:
            told = {}  # a node alone needs no place to meet, and half a set is refused
        elif not master_addr and "MASTER_ADDR" not in variables:
            raise UserError("--master-addr must name node 0's machine when there are several nodes, got nothing.")
        else:
            # Of one of several Jobs, as a JobSet has, the index does not count all pods
            rank = index if node_rank is None else node_rank
            options = {"RANK": rank, "WORLD_SIZE": nnodes, "MASTER_PORT": PORT_OF_LAUNCH}
            variables = {**{name: str(value) for name, value in options.items()}, **variables}
    if limits is not None and "RANK" in variables:  # who scales a job up has more pods or tasks than the options say
        told["WORLD_SIZE"] = str(max(nnodes or 1, (count(variables, "RANK") or 0) + 1))
    env = read_rank_env({**variables, **told})
    if env.launcher in ("torchrun", "mpirun", "horovodrun", "launch"):
        raise UserError(
            f"launch must be started once a node, got the environment of a rank of {env.launcher}, which starts the "
            "processes already. Start the script directly there."
        )
    for flag, option, number in (
        ("--nnodes", nnodes if limits is None else None, env.world_size), ("--node-rank", node_rank, env.rank),
    ):
        if option is not None and option != number:
            raise UserError(
                f"{flag} must be {number}, as RANK={env.rank} and WORLD_SIZE={env.world_size} (from {env.launcher}), "
                f"got {option}. Leave {flag} out; where nobody sets these variables, give --nnodes too."
            )
    return NodeEnv(
        # Who sets LOCAL_RANK alone does not say how many agents the machine has: as many as that needs
        local_rank=env.local_rank * nproc, local_world_size=(env.local_world_size or env.local_rank + 1) * nproc,
        node_rank=env.rank, num_nodes=env.world_size if limits is None else nnodes or 1, nproc=nproc,
        master_addr=env.master_addr, master_port=env.master_port, run_name=env.run_name, limits=limits,
    )
