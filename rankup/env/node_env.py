"""Who an agent of `rankup launch` is: its node's number, how many ranks it starts, and where the agents meet. No torch.

RANK and WORLD_SIZE in the environment (compose, Slurm tasks, PyTorchJob, an Indexed Job) count agents here. LOCAL_RANK
counts the agents of one machine.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rankup.env.launchers import PORT_OF_LAUNCH, adopt_slurm, count, count_pods
from rankup.env.rank_env import read_rank_env
from rankup.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a job whose number of nodes may change. `wait_s`: how long to wait for more than `least` nodes, at
    the start and after a loss. `silent_s`: a node counts as lost after this long without a heartbeat."""

    least: int
    most: int
    wait_s: float = 10.0
    silent_s: float = 10.0


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """One agent of a job; by default the only one. A machine may run several agents: each is a node of the job."""

    node_rank: int = 0
    num_nodes: int = 1
    nproc: int = 1  # how many ranks each agent starts
    local_rank: int = 0  # LOCAL_RANK of this agent's first rank
    local_world_size: int = 1  # how many ranks run on this machine
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 only for a single node, which chooses a port itself
    run_name: str | None = None  # the scheduler's job names the run, so that a requeued job resumes the same run
    limits: Limits | None = None  # if set, `num_nodes` counts all nodes that may join, including spares

    @property
    def first_rank(self) -> int:
        """RANK of this agent's first rank."""
        return self.node_rank * self.nproc

    @property
    def world_size(self) -> int:
        """How many ranks all agents start together."""
        return self.num_nodes * self.nproc


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process of this machine sees, without a library that would open them."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if (listed := environ.get(name)) is not None:  # "" and -1 hide all; CUDA reads the list up to a wrong entry
            return len([each for each in re.split(r",\s*-1\b|^-1\b", listed)[0].split(",") if each.strip()])
    if (found := environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(found)
    if shutil.which("nvidia-smi", path=environ.get("PATH", "")) is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], env=dict(environ), capture_output=True, text=True, check=False).stdout
    return len(re.findall(r"^GPU \d", listed, re.MULTILINE))


def read_node_env(
    environ: Mapping[str, str], *, nnodes: int | None = None, nproc: int | str | None = None,
    node_rank: int | None = None, master_addr: str | None = None, master_port: int | None = None,
    limits: Limits | None = None,
) -> NodeEnv:
    """Read which agent this is, from `environ` and the options of `launch`. `nproc`: "gpu", or None, is a rank for each
    visible GPU; with None it is one rank where there are no GPUs. Options override the environment's address and port,
    but counts must agree. With `limits`, `nnodes` is how many nodes may join, and any WORLD_SIZE is accepted.
    Raises UserError for counts that differ, for an incomplete set, and under a launcher that starts ranks itself."""
    variables, per_pod = count_pods(environ, node_rank=node_rank)
    # Raises in the batch shell of several tasks, which is not a task itself
    is_task = "RANK" not in variables and (adopt_slurm(variables) or ("", {}))[0] == "slurm"
    where = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
    told = {name: str(value) for name, value in where.items() if value}
    if "RANK" not in variables and not is_task:
        index = variables.get("JOB_COMPLETION_INDEX", "0")
        if nnodes == 1:  # the option says that each pod trains alone
            variables = {name: value for name, value in variables.items() if name != "JOB_COMPLETION_INDEX"}
        if (nnodes or 1) == 1:
            told = {}  # a single node needs no address, and the address without RANK would be refused
        elif not master_addr and "MASTER_ADDR" not in variables:
            raise UserError(
                "--master-addr must name node 0's machine when there are several nodes, got nothing. Type the same "
                "line on each node, with its own number: --node-rank 0 --master-addr HOST"
            )
        else:
            # In a JobSet, which has several Jobs, the index counts only the pods of one Job: --node-rank overrides it
            rank = index if node_rank is None else node_rank
            options = {"RANK": rank, "WORLD_SIZE": nnodes, "MASTER_PORT": PORT_OF_LAUNCH}
            variables = {**{name: str(value) for name, value in options.items()}, **variables}
    if limits is not None and "RANK" in variables:  # after scaling up there are more pods or tasks than the options say
        told["WORLD_SIZE"] = str(max(nnodes or 1, (count(variables, "RANK") or 0) + 1))
    env = read_rank_env({**variables, **told})
    if env.launcher in ("torchrun", "mpirun", "horovodrun", "launch"):
        raise UserError(
            f"launch must be started once per node, got the environment of a rank of {env.launcher}, which starts the "
            "processes already. Start the script directly there."
        )
    for flag, option, number in (
        ("--nnodes", nnodes if limits is None else None, env.world_size), ("--node-rank", node_rank, env.rank),
    ):
        if option is not None and option != number:
            raise UserError(
                f"{flag} must be {number} to match RANK={env.rank} and WORLD_SIZE={env.world_size} (from "
                f"{env.launcher}), got {option}. Leave {flag} out; if nothing sets these variables, give --nnodes too."
            )
    if not isinstance(nproc, int):
        # Where several agents share a machine, each gets its share of the GPUs that it sees
        gpus = 0 if nproc is None and per_pod else visible_gpus(environ)
        if nproc and not gpus:
            raise UserError("--nproc gpu must find GPUs, got none. Give a number, such as --nproc 2.")
        nproc = max(1, gpus // (env.local_world_size or env.local_rank + 1)) if gpus else per_pod or 1
    return NodeEnv(
        # LOCAL_RANK without LOCAL_WORLD_SIZE: assume the smallest number of agents on this machine that it allows
        local_rank=env.local_rank * nproc, local_world_size=(env.local_world_size or env.local_rank + 1) * nproc,
        node_rank=env.rank, num_nodes=env.world_size if limits is None else nnodes or 1, nproc=nproc,
        master_addr=env.master_addr, master_port=env.master_port, run_name=env.run_name, limits=limits,
    )
