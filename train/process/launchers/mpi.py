"""Launchers that number the ranks in variables of their own: Open MPI's mpirun and horovodrun; others are refused."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from train.errors import LaunchError
from train.process.addresses import ephemeral_range, port_for
from train.process.launchers.launcher import TORCHRUN, Launcher, adopt_names, count, given
from train.process.placement import Found

# Variables that count the processes of launchers whose ranks we do not adopt.
FOREIGN = {
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "JSM_NAMESPACE_SIZE": "jsrun",
}


@dataclass(frozen=True)
class RankCounter(Launcher):
    """A launcher that sets <prefix>RANK, _LOCAL_RANK, _SIZE and _LOCAL_SIZE, and does not say where rank 0 is."""

    name: str
    title: str
    prefix: str
    job: tuple[str, ...]  # the variable that has another value in each start: the port is derived from it
    set_address: str  # how the user passes the address on
    hint: str = ""
    ends_with_parent: bool = False
    has_horovod_rendezvous: bool = False

    def adopt(self, environ: Mapping[str, str]) -> Found | None:
        size = count(environ, f"{self.prefix}SIZE")
        if size is None or size == 1:
            return None
        found = given(environ, self.name)
        theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        adopt_names(environ, found, {ours: self.prefix + name for ours, name in theirs.items()}, self.title)
        if found.values.get("LOCAL_WORLD_SIZE") == str(size):
            found.add("MASTER_ADDR", "127.0.0.1", f"{self.title} (one node)")
        elif "MASTER_ADDR" not in found.values:
            raise LaunchError(
                f"{self.prefix}SIZE={size} on several nodes, but {self.title} does not say where rank 0 is. "
                f"{self.set_address}"
            )
        for job in self.job:
            if environ.get(job):
                port = port_for(zlib.crc32(environ[job].encode()), ephemeral=ephemeral_range())
                found.add("MASTER_PORT", port, f"derived from {job}")
        found.hint = self.hint
        found.parent_pid = os.getppid() if self.ends_with_parent else None
        found.has_horovod_rendezvous = self.has_horovod_rendezvous
        return found


OPEN_MPI = RankCounter(
    name="open mpi", title="Open MPI", prefix="OMPI_COMM_WORLD_",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    set_address="Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>.",
    hint="mpirun has to start all ranks at once; its -x passes MASTER_ADDR and MASTER_PORT on.",
    ends_with_parent=True,  # an mpirun that is killed leaves its processes running
)
HOROVODRUN = RankCounter(
    name="horovodrun", title="horovodrun", prefix="HOROVOD_",
    job=("HOROVOD_GLOO_RENDEZVOUS_PORT",), has_horovod_rendezvous=True,
    set_address="Set MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port> before it.",
)


class ForeignMpi(Launcher):
    """Launchers of several processes whose ranks we can't read."""

    def adopt(self, environ: Mapping[str, str]) -> Found | None:
        for name, who in FOREIGN.items():
            if (count(environ, name) or 1) > 1:
                raise LaunchError(
                    f"{name}={environ[name]} but RANK is not set: {who} is not supported. Start with {TORCHRUN}."
                )
        return None
