"""What the manifests in `templates/k8s/` need to know. Each kind of job is one template with all its objects.

Variables that `rankup.files.add.plan_files` gives every template: `name` (a DNS label), `image`, `command` (the header line),
`words` (the script and its words), `options` (of `rankup launch`, such as `--nproc 4`), `least` and `most` (pods), `gpus`
(of each pod), `data` (objects with `source`, `target`, `inside`). In an image the repository is at /work, runs at
/work/runs, and `python -m rankup launch OPTIONS WORDS` starts the agent.
"""

from argparse import Namespace
from typing import Any

KINDS = ("job", "pytorchjob", "jobset", "trainjob")


def k8s_variables(given: Namespace, variables: dict[str, Any]) -> dict[str, Any]:
    """Return `variables` with what only manifests need. `given`: the options of `rankup add`."""
    return variables
