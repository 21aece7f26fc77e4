"""Which trackers there are, and what each needs before a run may begin. No torch here, and none of their packages."""

import importlib
import importlib.util
import os

from rankup.errors import UserError
from train.run.trackers.tracked_run import Facts, TrackedRun

# The setting `tracker` -> module in this folder, and the TrackedRun in it. A new tracker is a new file here, a line in
# this table and an extra in pyproject.toml; table and extra have the name of the package.
TRACKERS = {
    "mlflow": "mlflow_run:MlflowRun",
    "wandb": "wandb_run:WandbRun",
}


def check(name: str) -> None:
    """Raises UserError where the tracker `name` can't work here. It asks nobody over the network."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"tracker: the package {name} must be installed on rank 0's node. "
            f"pip install 'rankup[{name}]', or '.[{name}]' in a checkout."
        )
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        # MLflow's own default is a file in the folder in which the run was started: in a container it is lost
        raise UserError(
            "tracker: MLFLOW_TRACKING_URI must be set for mlflow, got nothing. Set it to the server's address, such as "
            "http://127.0.0.1:5000, or to sqlite:////home/me/mlflow.db."
        )


def open_run(facts: Facts) -> TrackedRun:
    """The run of these facts at its tracker: a new one, or that of an earlier attempt.

    Raises whatever the tracker's package raises.
    """
    module, _, name = TRACKERS[facts.tracker].partition(":")
    opened: TrackedRun = getattr(importlib.import_module(f"train.run.trackers.{module}"), name)(facts)
    return opened
