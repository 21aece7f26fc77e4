"""Launchers that number the ranks in variables of their own: Open MPI's mpirun and horovodrun; others are refused."""

import zlib
from collections.abc import Mapping

from rankup.env.addresses import ephemeral_range, port_for
from rankup.env.variables import TORCHRUN, Variables, count, given
from rankup.errors import LaunchError

# Variables that count the processes of launchers whose ranks we do not adopt.
FOREIGN = {
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "JSM_NAMESPACE_SIZE": "jsrun",
}


def adopt(environ: Mapping[str, str]) -> Variables | None:
    """The rank that horovodrun or mpirun gives. horovodrun may run inside mpirun, so it is asked first.

    Raises LaunchError on several nodes without MASTER_ADDR: neither says where rank 0 is.
    """
    horovod = _adopt(
        environ, "horovodrun", "horovodrun", prefix="HOROVOD_", job="HOROVOD_GLOO_RENDEZVOUS_PORT",
        set_address="Set MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port> before it.",
    )
    if horovod is not None:
        horovod.has_horovod_rendezvous = True
        return horovod
    job = "PMIX_NAMESPACE" if environ.get("PMIX_NAMESPACE") else "OMPI_MCA_ess_base_jobid"
    mpi = _adopt(
        environ, "open mpi", "Open MPI", prefix="OMPI_COMM_WORLD_", job=job,
        set_address="Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>.",
    )
    if mpi is not None:
        mpi.outlives_launcher = True
        mpi.hint = "mpirun has to start all ranks at once; its -x passes MASTER_ADDR and MASTER_PORT on."
    return mpi


def _adopt(
    environ: Mapping[str, str], launcher: str, title: str, *, prefix: str, job: str, set_address: str
) -> Variables | None:
    """`job`: the variable that has another value in each start. `set_address`: how the user passes the address on."""
    size = count(environ, f"{prefix}SIZE")
    if size is None or size == 1:
        return None
    found = given(environ, launcher)
    theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    found.adopt(environ, {ours: prefix + name for ours, name in theirs.items()}, title)
    if found.values.get("LOCAL_WORLD_SIZE") == str(size):
        found.add("MASTER_ADDR", "127.0.0.1", f"{title} (one node)")
    elif "MASTER_ADDR" not in found.values:
        raise LaunchError(
            f"{prefix}SIZE={size} on several nodes, but {title} does not say where rank 0 is. {set_address}"
        )
    if environ.get(job):
        port = port_for(zlib.crc32(environ[job].encode()), ephemeral=ephemeral_range())
        found.add("MASTER_PORT", port, f"derived from {job}")
    return found


def refuse_foreign(environ: Mapping[str, str]) -> None:
    """Raise LaunchError below a launcher of several processes whose ranks we can't read."""
    for name, who in FOREIGN.items():
        if (count(environ, name) or 1) > 1:
            raise LaunchError(
                f"{name}={environ[name]} but RANK is not set: {who} is not supported. Start with {TORCHRUN}."
            )
