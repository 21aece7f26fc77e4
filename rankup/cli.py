"""`rankup COMMAND`: start ranks, show the state of a run, explain why a job failed. No torch here.

Each command imports what it needs inside its function, so that help takes milliseconds. `rankup train`, `evaluate`,
`predict` and `show` start the training program that comes with this library.
"""

import argparse
import errno
import json
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from rankup import files
from rankup.errors import FINISHED, USER_MISTAKE, Stopped, UserError, not_installed
from rankup.options import (
    AddParser,
    Option,
    Parser,
    address,
    codes,
    nodes,
    option,
    ranks,
    shell_words,
    unknown_command,
    whole,
)
from rankup.places.files import RUNS
from rankup.places.files import runs_folder as runs_folder
from rankup.urls import is_url, must_hold_no_secrets, secrets_in

# An installed rankup contains the folder `train` as `program`; in the repository, `train` is beside this package
PROGRAMS = (Path(__file__).parent / "program" / "main.py", Path(__file__).parents[1] / "train" / "main.py")
OF_PROGRAM = ("train", "evaluate", "predict", "show")

Run = Callable[[argparse.Namespace], int | None]

# Options and commands -------------------------------------------------------------------------------------------------


RUN = option("run", "RUN", "a run's name or folder (the run that wrote last)", nargs="?")
RUN_DIR = option("--run-dir", "DIR", "folder of all runs, or its address (%(default)s)", default=RUNS)
HOST = option("--host", "HOST", "do it on this host, by ssh, in the same folder of your home; or HOST:FOLDER")
JSON = option("--json", bool, "print JSON, for programs", dest="as_json")
COMMANDS: dict[str, Parser] = {}


def command(
    usage: str, examples: tuple[str, str], *options: Option, parser: type[Parser] = Parser
) -> Callable[[Run], Run]:
    """Register the decorated function as a command of its name. Its docstring is the help; the docstring's first
    sentence stands in the list of commands. `usage`: the usage line after the command's name."""

    def add(run: Run) -> Run:
        prog, about = f"rankup {run.__name__}", " ".join((run.__doc__ or "").split())
        COMMANDS[run.__name__] = made = parser(
            prog=prog, usage=f"{prog} {usage}", description=fill(about, 78), allow_abbrev=False,
            epilog="examples:" + "".join(f"\n  {prog} {line}".rstrip() for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(command=run, about=about)
        for names, details in options:
            made.add_argument(*names, **details)
        return run

    return add


# Start ranks ----------------------------------------------------------------------------------------------------------


# Options of `launch` where it runs a whole batch job; slurm/README.md explains them
IN_ALLOCATION = (
    option("--first-step-s", int, argparse.SUPPRESS, type=whole(1)), option("--max-requeues", int, argparse.SUPPRESS),
    option("--no-exclude", bool, argparse.SUPPRESS, default=None),
    option("--doctor", bool, argparse.SUPPRESS, default=None),
    option("--image", "IMAGE", argparse.SUPPRESS, default=None),
    option("--srun-args", "WORDS", argparse.SUPPRESS, type=shell_words, default=None),
)


@command(
    "[OPTIONS] [-m] SCRIPT [ARGS...]",
    ("--nproc 2 train.py --lr 0.1", "--nnodes 2 --node-rank 0 --master-addr node0 -m my.train"),
    option("--nproc --nproc-per-node", int, "ranks on this node, or gpu (one for each GPU, or 1)", type=ranks),
    option("--nnodes", int, "nodes; 2:4 for two to four (WORLD_SIZE, or 1)", type=nodes),
    option("--spares", int, "extra nodes, which replace lost ones (0)", default=0),
    option("--wait-for-node", float, "accept fewer nodes after S seconds (%(default)g)", default=10.0),
    option("--lost-after-s", float, "2:4: nodes are lost after S silent seconds (%(default)g)", default=10.0),
    option("--shared-dir", "DIR", "folder or address that all nodes share: only one half of a split job goes on"),
    option("--max-failures-per-node", int, "leave a node out after N failures (no limit)", type=whole(1)),
    option("--node-rank", int, "number of this node, from 0 (RANK)"),
    option("--master-addr", "HOST", "name or address of node 0 (MASTER_ADDR)"),
    option("--master-port", int, "port on node 0 (MASTER_PORT, or 29400)", type=whole(1, 65535)),
    option("--join-timeout-s", float, "wait S seconds for the other nodes (%(default)g)", default=300.0),
    option("--max-restarts", int, "give up after N restarts without a new step (3)", default=3),
    option("--restart-on", "CODES", "restart after these exit codes below 128 too: 1,75", type=codes, default=()),
    option("--restart-args", "WORDS", "append these arguments at each restart", type=shell_words),
    option("--stop-grace-s", float, "kill a script S seconds after SIGTERM or SIGINT (%(default)g)", default=110.0),
    option("--on-end", "CMD", argparse.SUPPRESS),
    option("--health-check", "CMD", argparse.SUPPRESS),
    option("--serve", "PORT", argparse.SUPPRESS, type=address, default=None),
    option("--spot", bool, argparse.SUPPRESS),
    option("--work-dir", "DIR", "folder to run the script in, created if missing (here)"),
    option("--name", "NAME", "name of the run (the script's name)"),
    RUN_DIR,
    option("--no-fork", bool, "start fresh interpreters, not forks with torch"),
    option("--replay", "RUN", "train again with RUN's number of ranks at each step"),
    *IN_ALLOCATION,
    option("--here", bool, argparse.SUPPRESS),
    option("-m --module", bool, "SCRIPT is a module"),
    option("words", "SCRIPT", argparse.SUPPRESS, nargs=argparse.PARSER),
)
def launch(given: argparse.Namespace) -> int:
    """Start the ranks of this node, and replace lost ones. Run the same line on each node. The script needs no changes,
    and gets all words after its name. Parentheses show each default: a value, or the environment variable that sets it.
    RANK and WORLD_SIZE count nodes here. In a Slurm job, run the line once: it uses all nodes, or with --here this one;
    --first-step-s, --max-requeues, --no-exclude, --doctor, --image, --srun-args: slurm/README.md. For operators
    --on-end, --health-check, --spot, --serve: rankup/operators.md."""
    from rankup.launch import launch

    parser, flags = COMMANDS["launch"], {names[0]: names[0][2:].replace("-", "_") for names, _ in IN_ALLOCATION}
    options = given.line[:len(given.line) - len(given.words)]
    # For the agents of all nodes
    given.line = [*parser.without(options, {*flags.values(), "nproc", "on_end"}), *given.words]
    given.in_allocation = {flag: getattr(given, name) for flag, name in flags.items()}
    return launch(given)


@command(
    "[compose] [slurm] [k8s] [OPTIONS] [-m] SCRIPT [ARGS...]",
    ("compose slurm k8s train.py --lr 0.1", "--diff"),
    option("kinds", "KIND", argparse.SUPPRESS, nargs="*", choices=[*files.KINDS, []], default=[]),
    option("--nodes", int, "nodes, or pods; 2:4 for two to four (2)", type=nodes, default=(2, 2)),
    option("--gpus", int, "GPUs of each node, with a rank for each (none)", default=0),
    option("--name", "NAME", "name of the job and the image (the folder's name)"),
    option("--image", "IMAGE", "the image in your registry"),
    option("--data", "DIR", "a folder that the job reads, as often as needed", action="append", default=[]),
    option("--kind", "KIND", f"kind of the manifest ({files.JOB_KINDS[0]})", choices=files.JOB_KINDS),
    option("--queue", "QUEUE", "Kueue's LocalQueue, which starts all pods or none"),
    option("--secret", "SECRET", "a Secret that the pods prove to each other"),
    option("--output", "DIR", "a folder that the script writes: in containers it is runs/; as often as needed",
           action="append", default=[]),
    option("--data-claim", "CLAIM", "volume claim that holds the folders of --data (one that add writes)"),
    option("--base", "IMAGE", "base image; a dot for your Dockerfile (python:3.N-slim-bookworm)"),
    option("--requirements", "FILE", "list of packages (the first of uv.lock, pylock.toml, requirements.txt, "
           "pyproject.toml)"),
    option("--extra", "NAME", "an extra of the project to install, as often as needed", action="append", default=[]),
    option("--apt", "PACKAGE", "a Debian package for the image, as often as needed", action="append", default=[]),
    option("--file", "FILE", "where to write the launch file (compose.yaml, or named after SCRIPT)"),
    option("--dockerfile", "FILE", "where to write the Dockerfile (Dockerfile)"),
    option("--diff", bool, "write nothing: compare with what is there; alone: with every file that add wrote"),
    option("--stdout", bool, "write nothing: print the launch files"),
    parser=AddParser,
)
def add(given: argparse.Namespace) -> None:
    """Write launch files for your script into this folder. They are yours: a file that exists is left as it is."""
    from rankup.files.add import add

    print_whole(add(given, Path(), COMMANDS["add"].parse))


@command(
    "[OPTIONS] FILE [ARGS...]", ("train.sbatch --lr 0.2", "--host login train.sbatch"),
    HOST, option("--dry-run", bool, "print what it would do, and do nothing"),
    option("-d --detach", bool, "do not follow the job"),
    option("words", "FILE", argparse.SUPPRESS, nargs=argparse.PARSER),
)
def submit(given: argparse.Namespace) -> int:
    """Send this folder with a launch file, start the job, follow it. The file is one for Slurm,
    Kubernetes or compose. A requeued job and a new pod run the snapshot, not what you edit meanwhile. The script gets
    ARGS too."""
    from rankup.submit import submit

    return submit(given)


# Watch, explain, use --------------------------------------------------------------------------------------------------


@command(
    "[RUN] [OPTIONS]", ("", "mine --watch"),
    option("run", "RUN", default="", text="a run's name or folder (all runs, a line each)", nargs="?"),
    RUN_DIR, option("--watch", bool, "show it again every two seconds, until the run ends"),
    option("--serve", "PORT", "serve /metrics (Prometheus) and /status.json", type=address, default=None),
    JSON, HOST,
)
def status(given: argparse.Namespace) -> None:
    """Show how runs stand. It prints steps, speed, time left, each rank, restarts and goodput, also during training. It
    only reads files, on any machine that sees the run's folder."""
    from rankup.observe.status import status, watch

    if given.serve:
        from rankup.observe.serve import server

        with server(given.serve, given.runs, given.run) as serving:
            logging.getLogger("rankup").info("http://%s:%d/metrics and /status.json, until Ctrl-C", *given.serve)
            serving.serve_forever()
    if given.watch:
        watch(given.runs, given.run)
    else:
        print_whole(status(given.runs, given.run, as_json=given.as_json))


@command(
    "[RUN] [OPTIONS]", ("mine --follow", "mine --rank 0-3 --since 10m"),
    RUN, RUN_DIR, option("--rank", "LIST", "only these ranks: 3, or 0-3,7"),
    option("--since", "TIME", "only newer lines: 10m, 2026-11-22T14:05"),
    option("-f --follow", bool, "print new lines until Ctrl-C"), JSON, HOST,
)
def logs(given: argparse.Namespace) -> None:
    """Print what all ranks wrote, by time. Equal lines of several ranks are shown as one line."""
    from rankup.observe.logs import logs

    logs(given.runs, given.run, rank=given.rank, since=given.since, follow=given.follow, as_json=given.as_json)


@command(
    "[RUN] [OPTIONS]", ("mine", "mine --full"),
    RUN, RUN_DIR, option("--full", bool, "also print the stacks of all threads"), HOST,
)
def stacks(given: argparse.Namespace) -> None:
    """Show where each rank is now. Use it for a run that hangs: it names the ranks that are not where the others are.
    It asks the ranks of this machine."""
    from rankup.observe.logs import find_run
    from rankup.observe.stacks import report

    print_whole(f"{report(find_run(given.runs, given.run), full=given.full)}\n")


@command(
    "[PATH...] [OPTIONS]", ("", "node0.log node1.log"),
    option("paths", "PATH", "log files, folders, a run's name or folder, or - for standard input (the run that wrote "
           "last)", nargs="*"),
    RUN_DIR, JSON,
)
def explain(given: argparse.Namespace) -> int:
    """Say why a job failed, from its logs. It names the rank that failed first, the reason, and what to do, whatever
    started the job. Exit code 20 means that a fault was found, 0 that none was."""
    from rankup.explain import diagnose_files, format_report
    from rankup.observe.logs import find_run

    paths = [Path(path) for path in given.paths] or [find_run(given.runs, "")]
    found = diagnose_files(paths, run_dir=given.runs)
    print_whole((json.dumps([each.as_dict() for each in found]) if given.as_json else format_report(found)) + "\n")
    return FINISHED if all(each.harmless for each in found) else 20


@command(
    "[OPTIONS]", ("--run-dir /shared/runs", "--alone --json"),
    option("--alone", bool, "check only this machine, as one process, even under a launcher"),
    option("--quick", bool, "check this machine without torch in a second, for --health-check; warnings count as fit"),
    RUN_DIR,
    option("--num-threads", int, "CPU threads of each rank (1)", default=1, type=whole(1)),
    option("--num-workers", int, "DataLoader workers of each rank (0)", default=0),
    option("--join-timeout-s", float, "wait S seconds for the other ranks (%(default)g)", default=120.0),
    JSON,
)
def doctor(given: argparse.Namespace) -> int:
    """Check whether machines are fit to train. Alone it checks this machine. Under a launcher it also checks the
    connections between the ranks. Exit code: 0 fit, 10 warnings, 20 not fit, 30 a check could not be completed."""
    if given.quick:
        from rankup.doctor import Report, quick

        json_out = sys.stdout if given.as_json else None
        report = Report(logging.getLogger("rankup"), json_out=json_out)
        return quick(given.runs, report, num_threads=given.num_threads, num_workers=given.num_workers)
    from rankup.process import Program

    program = Program().begin()
    program.read_rank(alone=given.alone)
    program.start(guarded=not given.as_json)  # with --json the output is the result
    return program.doctor(
        given.runs / (getattr(program.found, "run_name", "") or "doctor"), as_json=given.as_json,
        num_threads=given.num_threads, num_workers=given.num_workers, join_timeout_s=given.join_timeout_s,
    )


@command(
    "RUN FILE [OPTIONS]",
    ("runs/mine/checkpoints/step-00000400 weights.pt --item model", "mine weights/ --format huggingface"),
    option("run", "RUN", "a run's name or folder, the folder of one checkpoint, or an address"),
    option("file", "FILE", "where to write: a file, or with another --format a folder"),
    option("--item", "NAME", "only the state of one tracked object, such as model"),
    option("--checkpoint", "NAME", "the one that job.keep has given this name, not the newest"),
    option("--format", "FORMAT", "torch: one file; huggingface: safetensors; dcp: torch.distributed.checkpoint",
           choices=["torch", "huggingface", "dcp"], default="torch", dest="form"), RUN_DIR,
)
def export(given: argparse.Namespace) -> None:
    """Write a checkpoint as one file for torch.load. The file contains a dict from the name of each tracked object to
    its state, or with --item the state of one object. The checkpoint may be plain or sharded, of any run. With --format
    huggingface, write the tensors of one object (by default, model) as safetensors in files of at most 5 GB with an
    index, and with dcp all objects as torch.distributed.checkpoint does."""
    from rankup.job import open_checkpoint
    from rankup.state.formats import export, export_folder

    if is_url(given.file):
        raise UserError(f"FILE must be a path on this machine, got {given.file}.")
    named = given.run if is_url(given.run) or Path(given.run, "manifest.json").exists() else ""
    run_dir = Path(given.run) if Path(given.run, "checkpoints").is_dir() else given.runs / given.run
    copy, file = open_checkpoint(named, run_dir=run_dir, name=given.checkpoint), Path(given.file)
    said = export(copy, file, item=given.item) if given.form == "torch" else export_folder(
        copy, file, form=given.form, item=given.item)
    print_whole(f"{said}\n")


# The command line -----------------------------------------------------------------------------------------------------


def print_whole(text: str) -> None:
    """Print `text`. Ignore a reader that closes the pipe early, such as `head` or `grep -q`."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A log may contain characters that this locale can't encode
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def overview() -> str:
    """Return what `rankup` prints without a command."""
    about = {name: parser.get_default("about").partition(". ")[0] for name, parser in COMMANDS.items()}
    about["train"] = f"Run the training program; also: {', '.join(OF_PROGRAM[1:])}"
    lines = "".join(f"  {name:9}{text}\n" for name, text in about.items())
    return (
        f"Start PyTorch jobs anywhere, and keep them alive: rankup COMMAND [OPTIONS]\n{lines}"
        "`rankup COMMAND --help` shows options and examples. Also: --version, completion\n"
    )


def completion() -> str:
    """Return a completion line for bash, and for zsh with bashcompinit. It completes files if no word fits."""
    options = {flag for command in COMMANDS.values() for flag in command.flags if flag.startswith("--")}
    return f"complete -o default -W '{' '.join([*COMMANDS, *OF_PROGRAM, 'help', *sorted(options)])}' rankup\n"


def version() -> str:
    """Return what `rankup --version` prints."""
    found = [each for name in ("rankup", "torch") for each in metadata.distributions(name=name)]  # may be none
    return "".join(f"{each.name} {each.version}, " for each in found) + f"Python {sys.version.split()[0]}\n"


TEXTS = {"": overview, "help": overview, "-h": overview, "--help": overview, "-V": version, "--version": version,
         "completion": completion}


OF_THE_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENAMETOOLONG)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    first, *rest = list(sys.argv[1:] if words is None else words) or [""]
    if first == "help" and rest:
        first, *rest = rest[0], "--help"
    if first in TEXTS:
        print_whole(TEXTS[first]())
        return FINISHED if first else USER_MISTAKE
    from rankup.agent.logs import setup_logging
    from rankup.process import Program

    setup_logging(rank=None)
    try:
        return _run(first, rest)
    except SystemExit as end:  # argparse has printed the help
        return int(end.code or FINISHED)
    except KeyboardInterrupt:  # during `launch`, before its agent handles signals
        return Program().end(Stopped("SIGINT before the start: no rank was started."))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rankup", "train"):
            return Program().end(error)
        logging.getLogger("rankup").warning(f"error: {not_installed(first, package)}")
        return USER_MISTAKE
    except OSError as error:  # what a command reads or writes may be another user's, on a full disk, or no path at all
        ours = error.errno in OF_THE_PLACE and error.filename is not None
        return Program().end(UserError(f"{first}: {error.filename}: {error.strerror}") if ours else error)
    except Exception as error:
        return Program().end(error)


def _run(name: str, words: Sequence[str]) -> int:
    """Run one command. Raises UserError, and what the command raises."""
    if name in OF_PROGRAM and (found := next((str(path) for path in PROGRAMS if path.exists()), "")):
        sys.argv = [found, name, *words]
        try:
            runpy.run_path(found, run_name="__main__")
        except ModuleNotFoundError as error:
            raise UserError(f"`rankup {name}` needs {error.name}: pip install 'rankup[train]'.") from None
    if name not in COMMANDS:
        raise UserError(unknown_command(name, words, [*COMMANDS, *OF_PROGRAM]))
    given = COMMANDS[name].parse(words)
    for what, field in (("RUN", "run"), ("--run-dir", "run_dir"), ("--shared-dir", "shared_dir")):
        if secrets_in(getattr(given, field, "")):  # otherwise the logs would contain it
            raise UserError(must_hold_no_secrets(what))
    given.runs = runs_folder(getattr(given, "run_dir", ""))
    if getattr(given, "host", "") and name != "submit":
        from rankup.submit.machine import run_there

        run_there(given.host, [name, *COMMANDS[name].without(words, {"host"})])
    if name not in ("launch", "doctor"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at Ctrl-C without a traceback: there is nothing to save
    return int(given.command(given) or FINISHED)


def entry() -> NoReturn:
    """The installed command `rankup`."""
    from rankup.agent.processes import finish

    finish(main())
