"""`rankup COMMAND`. No torch here.

    rankup launch --nproc 2 train.py --lr 0.1
    rankup launch --nproc 2 -m package.module --lr 0.1
"""

import argparse
import asyncio
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rankup.agent.agent import Agent, Helpers, Options
from rankup.agent.logs import guard, setup_logging
from rankup.agent.script import Script
from rankup.agent.status import tell_platform
from rankup.env.node_env import NodeEnv, read_node_env
from rankup.errors import FINISHED, STOPPED, USER_MISTAKE, ConfigError, JoinError, UserError
from rankup.observe.stacks import where

log = logging.getLogger("rankup")


def parser() -> argparse.ArgumentParser:
    """Of `launch`. All words from the script's name on are the script's."""
    found = argparse.ArgumentParser(
        prog="rankup launch", allow_abbrev=False,
        description="Start the ranks of this node, and again when one is lost. Run the same line on each node.",
        epilog="Where an option is not given, what the launch file sets counts: RANK, WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT. RANK and WORLD_SIZE count nodes then.",
    )
    add = found.add_argument
    add("--nproc", "--nproc-per-node", type=int, metavar="N", help="ranks on this node (default: 1)")
    add("--nnodes", type=int, metavar="N", help="nodes (default: WORLD_SIZE, or 1)")
    add("--node-rank", type=int, metavar="N", help="which of the nodes this is, from 0 (default: RANK)")
    add("--master-addr", metavar="HOST", help="name or address of node 0 (default: MASTER_ADDR)")
    add("--master-port", type=int, metavar="PORT", help="port on node 0 (default: MASTER_PORT, or 29400)")
    add("--join-timeout-s", type=float, default=300.0, metavar="S",
        help="how long the nodes wait for each other (%(default)g)")
    add("--max-restarts", type=int, default=3, metavar="N", help="in a row without a new step, at most (%(default)s)")
    add("--restart-on", default="", metavar="CODES", help="exit codes below 128 that are worth a restart, as 1,75")
    add("--restart-args", default="", metavar="WORDS", help="behind the script's own arguments at each restart")
    add("--stop-grace-s", type=float, default=110.0, metavar="S",
        help="how long a script may take to end after SIGTERM or SIGINT (%(default)g)")
    add("--pass-local-rank", choices=["auto", "no", "local_rank", "local-rank"], default="auto",
        help="also give the script its local rank as an argument; auto: where the script declares it")
    add("--work-dir", default="", metavar="DIR", help="where the script runs; made where it is missing (default: here)")
    add("--name", default="", help="of the run (default: the script's)")
    add("--run-dir", default="runs", metavar="DIR", help="the folder of all runs (%(default)s)")
    add("--start", choices=["fork", "fresh", "spawn"], default="fork",
        help="how ranks start whose script imports rankup: forked from a process that has imported torch, or as fresh "
        "interpreters, which spawn means too (%(default)s)")
    add("--preflight", action="store_true", help="check this machine first; where it is not fit, nothing is started")
    add("-m", "--module", action="store_true", help="SCRIPT is a module")
    add("script", metavar="SCRIPT", help="what each rank runs")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")
    return found


def launch(
    words: Sequence[str], *, preflight: Callable[[Script, str], int] | None = None
) -> int:
    """Be the agent of this node to the end of the job. Returns the exit code.

    `preflight`: the doctor's code for this machine, this script and the folder of its runs; 0 where all is well.
    """
    given = parser().parse_args(words)
    guard("stdout", "stderr")
    setup_logging(rank=None)
    try:
        node = read_node_env(
            os.environ, nnodes=given.nnodes, nproc=given.nproc, node_rank=given.node_rank,
            master_addr=given.master_addr, master_port=given.master_port,
        )
        setup_logging(rank=None, world_size=node.num_nodes)
        script = Script.find([*(["-m"] if given.module else []), given.script, *given.arguments])
        options = Options(
            join_timeout_s=given.join_timeout_s, max_restarts=given.max_restarts,
            restart_on=_codes(given.restart_on), restart_args=_words(given.restart_args),
            stop_grace_s=given.stop_grace_s, pass_local_rank=given.pass_local_rank, work_dir=_folder(given.work_dir),
            start=given.start,
        )
        for warning in node.warnings:
            log.warning("%s", warning)
        if given.preflight and preflight is None:
            raise ConfigError("--preflight must be used with the program's own doctor: python -m train.main launch ...")
        if given.preflight and preflight and (unfit := preflight(script, given.run_dir)):
            return unfit
        name = given.name or node.run_name or Path(script.name.removeprefix("-m ")).stem
        return asyncio.run(_run(node, script, options, Path(given.run_dir, name)))
    except (UserError, JoinError) as error:
        log.error("%s", f"error: {error}" if error.code == USER_MISTAKE else f"{error} (exit code {error.code})")
        tell_platform(str(error), error.code)
        return error.code


def advice(tail: str) -> str:
    """What a script's last lines mean, if they show a known fault, otherwise ""."""
    # Imported where it is needed: it compiles the patterns of all known faults, a twentieth of a second
    from rankup import explain

    return explain.advice(tail)


async def _run(node: NodeEnv, script: Script, options: Options, run_dir: Path) -> int:
    agent = Agent(node, script, options, run_dir=run_dir, helpers=Helpers(advice=advice, where=where))
    verdict = await agent.run()
    code = verdict.code or FINISHED
    if verdict.text and code not in (FINISHED, STOPPED):
        log.error("%s (exit code %d)", verdict.text, code)
    if not agent.knows_us:
        tell_platform(verdict.text, code)
    return code


def _codes(text: str) -> frozenset[int]:
    """Raises ConfigError."""
    if not re.fullmatch(r"([0-9]{1,3}(,[0-9]{1,3})*)?", text):
        raise ConfigError(f"--restart-on must be exit codes, such as 1,75, got {text!r}.")
    codes = frozenset(int(code) for code in text.split(",") if code)
    if codes & {FINISHED, USER_MISTAKE, STOPPED}:
        raise ConfigError(
            "--restart-on must name neither 0 (finished) nor 2 (a mistake) nor 143 (stopped on request)."
        )
    return codes


def _words(text: str) -> tuple[str, ...]:
    """Raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--restart-args must be words as a shell splits them, got {text!r}: {error}.") from None


def _folder(name: str) -> str:
    """Raises ConfigError where it can't be made."""
    if name:
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--work-dir must be a folder that can be made, got {name}: {error.strerror}.") from None
    return name


def main(words: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    if given[:1] == ["launch"]:
        return launch(given[1:])
    print("usage: rankup launch [OPTIONS] SCRIPT ARGS...", file=sys.stderr)
    return USER_MISTAKE
