"""What rank 0 finds in the run directory, and what it changes there before the run begins or goes on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.agent.status import job_of
from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places import lineage
from rankup.places.files import read_json, write_atomically
from rankup.places.lineage import Lineage
from rankup.places.stored_run import AllDamaged
from train.config import Config, changed_settings, to_yaml
from train.run.checkpoint import Checkpoint, load_newest
from train.run.choices import CHOICES

RESULT = "result.json"
COPIES = "copies"  # of the newest checkpoint, on another node: see `train.run.copier`


@dataclass(slots=True)
class OnDisk:
    """What rank 0 found in the run directory: plain values, for all ranks.

    `lineage`: None where it holds no run. `new`: of the run that begins then. `saved`: step and evaluated step of the
    newest good checkpoint, None where there is none. `problem`: why not, where all are damaged. `token`: of the lease.
    """

    finished: bool
    lineage: dict[str, Any] | None
    new: dict[str, Any]
    saved: list[int] | None
    problem: str
    token: str
    mark: str


def find_run(config: Config, group: Group) -> Lineage | None:
    """The run that the directory holds and this attempt goes on with. Rank 0 only. Raises OSError."""
    directory = group.run_dir
    found = Lineage.read(directory)
    if config.fresh and not (found and is_wanted(found, config, group)):
        _put_aside(directory, group.log.info)
        found = None
    return found


def find_earlier(config: Config, group: Group) -> tuple[bool, Checkpoint | None, str]:
    """Whether the run is finished already, its newest checkpoint, and why there is none if all are damaged.

    Rank 0 only. Raises UserError and OSError.
    """
    directory = group.run_dir
    try:
        earlier = load_newest(directory / "checkpoints", group.log.warning)
    except AllDamaged as error:
        return False, None, str(error)
    if earlier is not None:
        check_settings(earlier, config)
        if config.checkpoint_format != "sharded":
            earlier = earlier.as_plain()
    result = read_json(directory / RESULT) or {}
    if (
        earlier is not None and result.get("step") == earlier.step
        and earlier.step >= (config.max_steps or config.epochs * earlier.state.steps_per_epoch)
    ):
        named = {name: value for name, value in result["metrics"].items() if name in ("accuracy", "loss")}
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(named.items()))
        group.log.info(
            f"{directory} is finished: {earlier.step} steps, {metrics}. More --epochs go on from there, --fresh starts "
            "anew, another --name leaves it."
        )
        return True, earlier, ""
    go_on(config, group)
    return False, earlier, ""


def go_on(config: Config, group: Group) -> None:
    """Note in the directory that the run goes on. Rank 0 only. Raises UserError."""
    group.status.begun = True
    try:
        (group.run_dir / RESULT).unlink(missing_ok=True)  # beside a run that goes on it would be read as its end
        write_atomically(group.run_dir / "config.yaml", to_yaml(config, choices=CHOICES))
    except OSError as error:
        raise not_writable(group, error) from None


def not_writable(group: Group, error: OSError) -> UserError:
    return UserError(f"run_dir: {group.run_dir} must be writable, got {error.strerror or error}.")


def _put_aside(directory: Path, say: Callable[[str], None]) -> None:
    """Start anew without losing anything: what is there moves to `before-<time>/`."""
    there = [directory / name for name in (*lineage.OF_RUN, COPIES) if (directory / name).exists()]
    if not there:
        return
    moved = lineage.before(directory)
    moved.mkdir()
    for path in there:
        shutil.move(path, moved / path.name)
    say(f"--fresh: the earlier run was moved to {moved}")


def check_settings(found: Checkpoint, config: Config) -> None:
    """Raises UserError where the run can't go on from this checkpoint with these settings."""
    found.state.check_random_scheme(found.path)
    if changes := changed_settings(found.state.config, config):
        raise UserError(
            f"{found.path.parents[1]} was begun with other settings: {'; '.join(changes)}. Set them back to go on, or "
            "--fresh to start anew, or another --name."
        )


def is_wanted(found: Lineage, config: Config, group: Group) -> bool:
    """Whether this attempt may go on with the run `found`: with --fresh only with what its own launch has begun."""
    return not config.fresh or _begun_by_this_launch(found, group)


def _begun_by_this_launch(found: Lineage, group: Group) -> bool:
    """Whether this attempt is a restart that finds what its own launch began with --fresh, and has to go on with that.

    That it is a restart does not suffice: a first attempt that was killed before it put the earlier run aside has left
    the earlier run. `launch` gives all its attempts ids of one job; where containers are started again (compose, pods),
    `start` names the start of them all.
    """
    if group.launch.start:
        return found.start == group.launch.start
    if not group.restarted or not group.launch.numbers_attempts:
        return group.restarted
    return job_of(found.begun_by) == job_of(group.attempt)
