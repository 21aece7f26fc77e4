"""What one agent of `rankup launch` is: which of the nodes, how many ranks it starts, where the agents meet. No torch.

RANK and WORLD_SIZE in the environment (compose, Slurm's tasks, PyTorchJob, an Indexed Job) count agents here. An agent
that finds LOCAL_RANK was started once for each rank, so it starts one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rankup.env.launchers import BY_PREFIX, PORT_OF_LAUNCH, adopt_slurm, count, count_pods, refuse_multiplied
from rankup.env.rank_env import read_rank_env, who_set_rank
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
    local_world_size: int | None = None  # ranks of the machine; None: those of this agent
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
    for flag, number, least, most in (
        ("--nproc", nproc, 1, 65535), ("--nnodes", nnodes, 1, 65535), ("--master-port", master_port, 0, 65535),
        ("--node-rank", node_rank, 0, max(1, nnodes or 65535) - 1),
    ):
        if number is not None and not least <= number <= most:
            raise UserError(f"{flag} must be a whole number from {least} to {most}, got {number}.")
    _refuse_launcher_of_ranks(environ)
    found, per_pod = count_pods(environ, num_nodes=nnodes, node_rank=node_rank)
    # What an earlier torchrun has left in the shell says nothing of this agent
    variables = {name: text for name, text in found.items() if not name.startswith("TORCHELASTIC_")}
    nproc = _num_ranks(environ, nproc, per_pod)
    # Raises in a batch shell of several tasks, which is none of them
    is_task = "RANK" not in variables and (adopt_slurm(variables) or ("", {}))[0] == "slurm"
    if "RANK" not in variables and not is_task:
        if nnodes is None or nnodes == 1:
            if node_rank:
                raise UserError(f"--node-rank must be 0 where there is one node, got {node_rank}. Give --nnodes too.")
            env = read_rank_env(variables)  # refuses half a set
            return NodeEnv(
                nproc=nproc, master_addr=master_addr or env.master_addr, master_port=master_port or 0,
                run_name=env.run_name,
            )
        if not master_addr and "MASTER_ADDR" not in variables:
            raise UserError("--master-addr must name node 0's machine when there are several nodes, got nothing.")
        options = {"RANK": node_rank or 0, "WORLD_SIZE": nnodes, "MASTER_PORT": PORT_OF_LAUNCH}
        variables = {**{name: str(value) for name, value in options.items()}, **variables}
    if limits is not None and "RANK" in variables:  # who scales a job up has more pods or tasks than the options say
        variables["WORLD_SIZE"] = str(max(nnodes or 1, (count(variables, "RANK") or 0) + 1))
    where = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
    env = read_rank_env({**variables, **{name: str(value) for name, value in where.items() if value}})
    for flag, name, option, number in (
        ("--nnodes", "WORLD_SIZE", nnodes, env.world_size), ("--node-rank", "RANK", node_rank, env.rank)
    ):
        if option is not None and option != number and not (limits is not None and name == "WORLD_SIZE"):
            raise UserError(
                f"{flag} must be {name}={number} (from {env.launcher}), got {option}. Leave {flag} out."
            )
    if nproc > 1:
        refuse_multiplied(environ, f"launch --nproc {nproc}")
    own = "LOCAL_RANK" in variables or is_task
    local_rank = env.local_rank if nproc == 1 and own else 0
    # Who sets LOCAL_RANK alone does not say how many ranks the machine has: as many as that needs
    local_world_size = env.local_world_size * nproc if own and env.local_world_size else local_rank + 1
    return NodeEnv(
        local_rank=local_rank, local_world_size=local_world_size if local_world_size > 1 else None,
        node_rank=env.rank, num_nodes=env.world_size if limits is None else nnodes or 1, nproc=nproc,
        master_addr=env.master_addr, master_port=env.master_port, run_name=env.run_name, limits=limits,
    )


def _num_ranks(environ: Mapping[str, str], option: int | None, per_pod: int | None) -> int:
    given = 1 if "LOCAL_RANK" in environ else per_pod
    if option and given and option != given:
        who = f"PET_NPROC_PER_NODE={per_pod}" if per_pod else "LOCAL_RANK: each rank has an agent of its own"
        raise UserError(f"--nproc must be {given}, as the environment has {who}, got {option}. Leave --nproc out.")
    return option or given or 1


def _refuse_launcher_of_ranks(environ: Mapping[str, str]) -> None:
    """Raise UserError below a launcher that has started one process for each rank already."""
    who = next((name for name, prefix, *_ in BY_PREFIX if (count(environ, f"{prefix}SIZE") or 1) > 1), "environment")
    if who == "environment" and "RANK" in environ:
        who = who_set_rank(environ)
    if who != "environment":
        raise UserError(
            f"launch must be started once a node, got the environment of a rank of {who}, which starts the processes "
            "already. Start the script directly there."
        )
