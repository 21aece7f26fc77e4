from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeEnv:
    node_rank: int = 0
    num_nodes: int = 1
    nproc: int = 1
    first_rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_name: str | None = None
    warnings: tuple[str, ...] = ()
    hint: str = ""
def read_node_env(environ: Mapping[str, str], *, nnodes: int | None = None, nproc: int | None = None, node_rank: int | None = None, master_addr: str | None = None, master_port: int | None = None) -> NodeEnv:
    n, k, r = nnodes or 1, nproc or 1, node_rank or 0
    return NodeEnv(r, n, k, r * k, n * k, master_addr or "127.0.0.1", master_port or (29400 if n > 1 else 0))
