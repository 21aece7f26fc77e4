"""The launchers whose environment variables we know. A new one is a file here and a line in LAUNCHERS."""

from train.process.launchers.kubeflow import Kubeflow
from train.process.launchers.launcher import Launcher
from train.process.launchers.mpi import HOROVODRUN, OPEN_MPI, ForeignMpi
from train.process.launchers.slurm import Slurm

# In the order in which they are asked. horovodrun may run inside mpirun, and mpirun's daemons are Slurm tasks: the
# inner launcher's ranks are ours, so the inner one comes first.
LAUNCHERS: tuple[Launcher, ...] = (Kubeflow(), HOROVODRUN, OPEN_MPI, Slurm(), ForeignMpi())
