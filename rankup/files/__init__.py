"""`rankup add` writes launch files into the user's repository: a Dockerfile, a compose file, a batch file for Slurm, a
manifest for Kubernetes. The user owns them.

`repository.py` finds out what stands in the repository, `plan.py` renders `templates/` with it, and `add.py` writes the
files. Each file has a header with the command that made it, so that `--diff` can render it again. No import of torch.
"""

import re

IN_IMAGE = "/work"  # the repository in an image; its runs/ is a link to /runs, where launch files mount the runs
HEADER = re.compile(r"^# (rankup add .+)$", re.MULTILINE)  # of each file that the command wrote
KINDS = ("compose", "slurm", "k8s")  # what the command can write
JOB_KINDS = ("job", "pytorchjob", "jobset", "trainjob")  # of a manifest
