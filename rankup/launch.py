"""`rankup launch`: runs the agent of this node with the command's options. In the allocation of a batch job it runs
itself on each node. With `--replay` it runs one agent after another, one for each number of ranks that an earlier run
had. Imports no torch."""

import asyncio
import json
import logging
import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote

from rankup.agent.agent import Agent
from rankup.agent.ends import Verdict
from rankup.agent.logs import guard, setup_logging
from rankup.agent.operators import tell_end, wait_until_fit
from rankup.agent.processes import within
from rankup.agent.ranks import Options
from rankup.agent.script import Script
from rankup.agent.status_files import what_next
from rankup.env.allocation import read_allocation, without_job
from rankup.env.launchers import ProgressEndpoint, task_number
from rankup.env.node_env import Limits, read_node_env
from rankup.env.rank_env import run_name
from rankup.errors import FINISHED, STOPPED, USER_MISTAKE, ExpectedError, UserError, disk_errors, exit_code, need
from rankup.places.files import RUNS, SNAPSHOT, read_json
from rankup.slurm import Start
from rankup.slurm_task import note, note_cause, restart_if_killed
from rankup.state.copies import STATE, list_whole
from rankup.state.memory import keep_on_disk
from rankup.urls import is_url

log = logging.getLogger("rankup")
LEAST_SILENT_S = 3.0  # three heartbeats
NO_GROUP = (
    "%s: it and the files that it imports name nothing that connects ranks, such as torch.distributed: each rank will "
    "do the whole work alone, and all will write the same files. Start one rank (--nproc 1), or see train/migrate.md"
)


def launch(given: Namespace) -> int:
    """Run the agent of this node until the job ends, or run the whole batch job. With `--replay`, run one agent for
    each part of an earlier run: the steps in which its number of ranks was the same. `given`: the parsed options.
    Returns the exit code."""
    guard()
    own_code_first(Path.cwd())
    allocation = None if given.here or given.replay or given.node_rank is not None else read_allocation(os.environ)
    if allocation is not None:
        return Start(given, _script(given), allocation)()
    for flag, value in given.in_allocation.items():
        if value is not None:
            raise UserError(
                f"{flag} must be given where `rankup launch` uses a whole allocation: in a batch script or a shell of "
                "salloc, got neither. Leave it out here."
            )
    if not given.replay:
        if task_number(os.environ) is None:
            return _launch(given)
        return restart_if_killed(partial(_launch, given), max_restarts=given.max_restarts)
    if given.nnodes or given.spares or given.nproc:
        raise UserError("--replay must come without --nnodes, --spares and --nproc: all ranks are on this machine.")
    changes, code = _changes(given.replay, given.runs), FINISHED
    for (step, ranks), (last, _) in zip_longest(changes, changes[1:], fillvalue=(None, 0)):
        log.info("replay: %d rank%s from step %d", ranks, "" if ranks == 1 else "s", step)
        given.nproc = ranks
        if code := _launch(given, stop_after=last):
            break
    return code


def _launch(given: Namespace, *, stop_after: int | None = None) -> int:
    """Run the agent of this node until the job ends. `stop_after`: the last step of a part of a replay, or None."""
    least, most = given.nnodes or (0, 0)
    resizes = least < most or bool(least and given.spares)
    if given.lost_after_s < LEAST_SILENT_S:
        raise UserError(
            f"--lost-after-s must be at least {LEAST_SILENT_S:g}, got {given.lost_after_s:g}. On a busy machine, "
            "healthy nodes are silent for a second or two."
        )
    limits = Limits(least, most, given.wait_for_node, given.lost_after_s) if resizes else None
    if limits is None and (given.spares or given.max_failures_per_node):
        raise UserError("--spares and --max-failures-per-node must come with --nnodes 2:4, or 2 with --spares 1.")
    # A batch script or a shell of salloc that starts this node alone is no task of the job
    environ = without_job(os.environ) if task_number(os.environ) is None else os.environ
    node = read_node_env(
        environ, nnodes=most + given.spares if given.nnodes else None, nproc=given.nproc, node_rank=given.node_rank,
        master_addr=given.master_addr, master_port=given.master_port, limits=limits,
    )
    setup_logging(rank=None, world_size=node.num_nodes)
    if node.nproc > 1 and not isinstance(given.nproc, int):
        log.info("%d ranks, one for each visible GPU", node.nproc)
    script = _script(given)
    if stop_after is not None and not script.imports_rankup:
        raise UserError("--replay must have a script that imports rankup: the steps of other scripts are unknown.")
    if script.imports_rankup:
        need("launch", "torch")
    if node.world_size > 1 and node.node_rank == 0 and not script.names_a_group:
        log.warning(NO_GROUP, script.name)
    if is_url(given.work_dir):
        raise UserError(f"--work-dir must be a folder of this machine, got {given.work_dir}.")
    with disk_errors("--work-dir", Path(given.work_dir)):
        Path(given.work_dir).mkdir(parents=True, exist_ok=True)
    if given.work_dir:  # the ranks start in that folder, so make relative folders absolute now
        path = os.environ.get("PYTHONPATH")
        folders = [*([""] if given.module else []), *(path.split(os.pathsep) if path else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    name, by_default = run_name(os.environ, given.name) or script.run_name, given.run_dir == RUNS
    # The default folder is relative to the folder in which the script runs
    runs = given.run_dir if by_default or is_url(given.run_dir) else os.path.abspath(given.run_dir)
    options = Options(
        node=node, script=script, run_dir=given.runs / name,
        run={"place": f"{runs.rstrip('/')}/{name}", "chosen": bool(given.name) or not by_default},
        stop_after=stop_after,
        advice=lambda tail: import_module("rankup.explain").advice(tail),  # imported late: it takes 50 ms
        join_timeout_s=given.join_timeout_s, max_restarts=given.max_restarts, stop_grace_s=given.stop_grace_s,
        shared_dir=given.shared_dir, max_failures=given.max_failures_per_node, restart_on=given.restart_on,
        restart_args=tuple(given.restart_args), work_dir=given.work_dir, fork=not given.no_fork,
        health_check=given.health_check, spot=given.spot,
    )
    if given.serve:
        try:  # imported late: few need it
            server = import_module("rankup.observe.serve").server(given.serve, given.runs)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        except UserError as error:  # another agent on this machine, which serves the same folder
            log.warning("%s", error)
    verdict = _agent(options, on_end=given.on_end)
    code = verdict.code or FINISHED
    if verdict.text and code not in (FINISHED, STOPPED):
        log.error("%s (exit code %d)", verdict.text, code)
        if code >= 128:
            note_cause(verdict.text)
    if not script.imports_rankup and code not in (FINISHED, STOPPED, USER_MISTAKE) and options.run_dir.is_dir():
        log.info("%s", what_next(options.run_dir))
    return FINISHED if stop_after is not None and code == STOPPED and not verdict.text else code


def own_code_first(here: Path) -> None:
    """Let a job in a snapshot of `rankup submit` import the snapshot's package, where the environment has it from the
    user's folder (`pip install -e .`), whose files may have changed since."""
    user = here.parents[1] if here.parent.name == ".rankup" else None
    if user is None or not (here / SNAPSHOT).exists():
        return
    for each in metadata.distributions():
        found = re.search(r'"file://([^"]+)"', each.read_text("direct_url.json") or "")
        if found and (place := Path(unquote(found[1]))).is_relative_to(user) and place.is_dir():
            own = here / place.relative_to(user)
            paths = [*(str(path) for path in (own / "src", own) if path.is_dir()), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _agent(options: Options, *, on_end: str) -> Verdict:
    """Run the agent until the job ends, and again after this node was not fit to rejoin. Run the command of --on-end,
    or that of the script, if this node leads."""
    began_s = time.monotonic()
    agent: Agent | None = None

    def leads() -> bool:
        return options.node.node_rank == 0 if agent is None else agent.leads

    def run_dir() -> Path:
        ranks = [] if agent is None else agent.ranks.ranks
        named = next((place for rank in ranks if (place := rank.record.run_dir)), None)
        return named or (agent.ranks.named if agent is not None else None) or options.run_dir

    def keep_rescue() -> None:
        try:
            if kept := keep_on_disk(run_dir(), options.jobs):
                log.info("the newest finished step was only in memory: it is now in %s", kept)
        except (OSError, UserError) as error:
            log.warning("the newest finished step is only in memory: %s", error)

    def tell(code: int, cause: str) -> None:
        end_feed()
        command = on_end or (agent.ranks.on_end if agent is not None else "")
        if options.stop_after is not None or not (command and leads()):  # another part of a replay follows
            return
        if not note("on_end", json.dumps([command, str(run_dir())])):  # a batch script tells it, once for all restarts
            tell_end(command, run_dir(), code=code, cause=cause, began_s=began_s)

    endpoint = ProgressEndpoint.read(os.environ)
    end_feed: Callable[[], None] = lambda: None  # noqa: E731
    if endpoint is not None:
        end_feed = import_module("rankup.observe.serve").feed(endpoint, run_dir, leads)

    try:
        while True:
            if options.health_check:
                wait_until_fit(options.health_check)
            agent = Agent(options)
            try:
                verdict = asyncio.run(agent.run())
            finally:  # a pod's memory ends with it
                # Two nodes are enough, and a thousand must not write the same to a shared disk, which may also hang
                if options.script.imports_rankup and agent.ranks.node.node_rank < 2:
                    within(options.stop_grace_s, keep_rescue)
            if not agent.unfit:
                break
            log.warning("%s", verdict.text)
    except ExpectedError as error:
        tell(exit_code(error), str(error))
        raise
    tell(verdict.code or FINISHED, verdict.text)
    return verdict


def _script(given: Namespace) -> Script:
    words = given.words[1:] if given.words[0] == "--" else given.words  # argparse keeps the -- up to Python 3.12
    return Script.find([*(["-m"] if given.module else []), *words])


def _changes(run: str, runs: Path) -> list[tuple[int, int]]:
    """Return pairs of a step and the number of ranks from that step on, as the run's newest checkpoint lists them."""
    path = next((path for path in (Path(run), runs / run) if path.is_dir()), Path(run))
    whole = list_whole(path / "checkpoints")
    changes: list[tuple[int, int]] | None = read_json(whole[-1] / STATE).get("world_sizes") if whole else None
    if not changes:
        raise UserError(f"--replay must be a run whose number of nodes could change, got {run}.")
    return changes
