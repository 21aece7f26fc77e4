"""`rankup add` writes launch files into the user's repository: a Dockerfile, a compose file, a batch file for Slurm, a
manifest for Kubernetes. The user owns them.

`repository.py` finds out what stands in the repository, `plan.py` renders `templates/` with it, and `add.py` writes the
files. Each file has a header with the command that made it, so that `--diff` can render it again. No import of torch.
"""

import os
import re
from pathlib import Path

IN_IMAGE = "/work"  # the repository in an image; its runs/ is a link to /runs, where launch files mount the runs
HEADER = re.compile(r"^# (rankup add .+)$", re.MULTILINE)  # of each file that the command wrote
KINDS = ("compose", "slurm", "k8s")  # what the command can write
JOB_KINDS = ("job", "pytorchjob", "jobset", "trainjob")  # of a manifest


def leads_outside(folder: Path, path: str) -> bool:
    """Return whether a link in a folder leads out of it, or names what is inside by a way outside: a copy of the folder
    would lack the target."""
    named = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(folder / path)))
    real = Path(os.path.realpath(folder / path))  # unlike resolve(), no error for a link to itself
    return os.path.isabs(named) or named.split("/")[0] == ".." or not real.is_relative_to(folder.resolve())
