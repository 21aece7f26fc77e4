"""What the manifests in `templates/k8s/` need to know. Each kind of job is one template with all its objects.

`rankup.files.add.plan_files` gives every template these variables: `name` (a DNS label), `image`, `command` (the line
of the header), `words` (the script and its words), `options` (of `rankup launch`), `least` and `most` (pods), `gpus`
(of each pod), `data` (objects with `source`, `target`, `inside`). In an image the repository is at /work, and its
runs/ is a link to /runs: mount the runs there. `python -m rankup launch OPTIONS WORDS` starts the agent.
"""

from argparse import Namespace
from typing import Any


def k8s_variables(given: Namespace, variables: dict[str, Any]) -> dict[str, Any]:
    """Return `variables` with what only manifests need. `given`: the options of `rankup add`."""
    return variables
