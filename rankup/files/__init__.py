"""`rankup add` writes launch files into the user's repository: a Dockerfile, a compose file, a batch file for Slurm, and a
manifest for Kubernetes. `repository.py` finds out what stands in the repository, `add.py` renders `templates/` with it.
The user owns the files. Each has a header with the command that made it, from which `--diff` renders it again. No torch."""
