"""The one program: `python -m train.main COMMAND`, `torchrun -m train.main train`, `rankup train`.

The whole line is understood before anything runs; torch is imported by the command that needs it. Every end has its exit
code: see `train.errors`.
"""

import getpass
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

if not __package__:
    # Started as a file: Python put this folder on the path, where `log` or `data` would be taken for the user's own
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(p for p in sys.path if Path(p or ".").resolve() != _here)]

from train.process.stop import StopRequest, die_with_parent

if __name__ == "__main__":
    # Before anything slow is imported: a process that is stopped while it starts must neither die of the signal, with a
    # traceback for SIGINT, nor sit out a grace period
    _stop = StopRequest().install()

from train.commands.explain.explain import advice, explain_log
from train.config import Config, check_world_size, load_config, to_yaml
from train.config.commands import COMMANDS, EXTRA
from train.config.load import Parsed, help_text, parse_args
from train.errors import FINISHED, OURS, USER_MISTAKE, ConfigError, LaunchError, Stopped, UserError, exit_code
from train.process import env, findings, init_method
from train.process.addresses import PORT_OF_LAUNCH
from train.process.exit import finish
from train.process.log import Log
from train.process.status import tell_torchrun


def main(argv: list[str] | None = None, *, stop: StopRequest | None = None) -> int:
    """Understand the line, run its command, and return its exit code. `stop`: already installed, by default it is here."""
    log = Log()
    parsed = parse_args(sys.argv[1:] if argv is None else argv, extra=EXTRA, commands=tuple(COMMANDS))
    try:
        launch = env.read_env(_environment(parsed))
        log = Log(rank=launch.rank, world_size=launch.world_size)
    except UserError as error:
        launch = None
        mistake = error
    if parsed.help or (parsed.command is None and not parsed.mistakes and not parsed.settings):
        _print(help_text(COMMANDS, extra=EXTRA, settings=parsed.help))
        return FINISHED if parsed.help else USER_MISTAKE
    try:
        config = load_config(parsed.settings, file=parsed.config_file, mistakes=parsed.mistakes)
        if parsed.command is None:
            raise ConfigError(f"a command is missing: {', '.join(COMMANDS)}.")
        if parsed.command == "show":
            _print(to_yaml(config))
            return FINISHED
        if parsed.command == "explain":
            return _explain(parsed)
        if launch is None and parsed.command == "doctor":
            from train.commands.doctor.doctor import refuse

            return refuse(mistake, log, as_json=parsed.extra["json"])
        if launch is None:
            raise mistake
        return _run(parsed, config, launch, log, stop or StopRequest().install())
    except BaseException as error:
        return _report(error, log)


def _environment(parsed: Parsed) -> Mapping[str, str]:
    extra = parsed.extra
    if parsed.command == "launch":
        return env.outside_pod(os.environ, num_nodes=extra["nnodes"], nproc=extra["nproc"])
    url, rank, world_size = extra["init_method"], extra["rank"], extra["world_size"]
    return init_method.environment(os.environ, url=url, rank=rank, world_size=world_size)


def _run(parsed: Parsed, config: Config, launch: env.Launch, log: Log, stop: StopRequest) -> int:
    stop.print_through(log)
    # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launch.parent_pid:
        die_with_parent(launch.parent_pid)
    run_dir = run_directory(config, launch)
    if parsed.command == "doctor":
        return _doctor(parsed, config, launch, run_dir, stop, log)
    env.check_loopback(launch, config.simulated_nodes)
    if not {os.getcwd(), ""} & set(sys.path):
        # For the user's own module, which a checkpoint may name: `python -m` puts the current directory on the path, `rankup`
        # and a file do not
        sys.path.append(os.getcwd())
    for apart in ("bench", "doctor"):
        if apart in (parsed.command, parsed.extra["command"]):
            run_dir /= apart  # a folder of its own, so that the run's status stays the training's
    if parsed.command == "compare":
        return _compare(parsed, config, launch, stop, log)
    if parsed.command == "launch":
        if launch.distributed:
            raise LaunchError(
                f"launch must be started by hand, once a node, got RANK and WORLD_SIZE from {launch.launcher}, which starts "
                f"the processes already. Use the command {parsed.extra['command']} there."
            )
        return _launch(parsed, config, run_dir, stop, log)
    if parsed.command == "train":
        check_world_size(config, launch.world_size)
    if parsed.command == "export":
        return _export(parsed, run_dir, launch, log)
    if parsed.command == "predict" and not (parsed.extra["output"] or ".csv").endswith((".csv", ".jsonl")):
        raise ConfigError(f"--output must end in .csv or .jsonl, got {parsed.extra['output']}.")
    log.open(run_dir)
    for warning in launch.warnings:
        log.warning(warning)
    if launch.distributed:
        log.info(env.describe(launch))
    _name_torchs_cache()
    if parsed.command == "train":
        from train.loop import train

        train(config, launch, run_dir=run_dir, log=log, stop=stop)
        return FINISHED
    if parsed.command == "bench":
        from train.commands.bench.bench import BenchOptions, bench

        extra = parsed.extra
        options = BenchOptions(
            extra["sizes"], extra["iterations"], extra["seconds"], step_ms=extra["step_ms"], as_json=extra["json"]
        )
        bench(config, launch, options, run_dir=run_dir, log=log, stop=stop)
        return FINISHED
    from train.commands.apply import evaluate_command, predict_command

    command = evaluate_command if parsed.command == "evaluate" else predict_command
    command(config, parsed, launch, run_dir=run_dir, log=log, stop=stop)
    return FINISHED


def run_directory(config: Config, launch: env.Launch) -> Path:
    """Where the run lies: named by the settings, by the scheduler's job, or by what is trained."""
    default = f"{config.dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
    return Path(config.run_dir) / (config.name or launch.run_name or default)


def _name_torchs_cache() -> None:
    """torch before 2.13 asks for the user's name while it is imported, and a container's arbitrary user has none."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


def _print(text: str) -> None:
    """For a reader that may have had enough before the end, as `head` and `grep -q` have."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _launch(parsed: Parsed, config: Config, run_dir: Path, stop: StopRequest, log: Log) -> int:
    from train.process.local_launcher import Nodes, launch

    extra = parsed.extra
    nproc, num_nodes, node_rank = extra["nproc"], extra["nnodes"], extra["node_rank"]
    mistakes = [f"--{n.replace('_', '-')} must be >= 1, got {extra[n]}." for n in ("nproc", "nnodes") if extra[n] < 1]
    if not 0 <= node_rank < max(1, num_nodes):
        mistakes.append(f"--node-rank must be from 0 to {num_nodes - 1}, got {node_rank}.")
    met = init_method.place(extra["init_method"]) if extra["init_method"] else {}
    if met and (extra["master_addr"] or extra["master_port"]):
        mistakes.append("--init-method must be left out with --master-addr and --master-port. Keep one of them.")
    if num_nodes > 1 and not extra["master_addr"] and not met:
        mistakes.append("--master-addr must name node 0's machine when there are several nodes, got nothing.")
    if extra["max_restarts"] < 0:
        mistakes.append(f"--max-restarts must be >= 0, got {extra['max_restarts']}.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if extra["command"] == "train":
        check_world_size(config, nproc * num_nodes)
    address = extra["master_addr"] or "127.0.0.1"
    port = extra["master_port"] or (PORT_OF_LAUNCH if num_nodes > 1 else 0)
    if met:
        address, port = met["MASTER_ADDR"], int(met["MASTER_PORT"])
    by_spawn = extra["launcher"] == "spawn"
    nodes = Nodes(nproc, num_nodes, node_rank, address, port, met.get("RANKUP_FILE", ""), by_spawn)
    return launch(
        _arguments(parsed), nodes, max_restarts=extra["max_restarts"], run_dir=run_dir, stop=stop, log=log
    )


def _explain(parsed: Parsed) -> int:
    """Say what a log shows: 20 if it shows a fault, 0 if nothing is wrong with it."""
    if not parsed.extra["log"]:
        raise ConfigError("--log must be a log file, a run's directory or - for standard input, got nothing.")
    text, faulty = explain_log(Path(parsed.extra["log"]), as_json=parsed.extra["json"])
    _print(f"{text}\n")
    return findings.CODES[findings.UNFIT] if faulty else FINISHED


def _doctor(parsed: Parsed, config: Config, launch: env.Launch, run_dir: Path, stop: StopRequest, log: Log) -> int:
    from train.commands.doctor.doctor import doctor, refuse

    as_json = parsed.extra["json"]
    try:
        env.check_loopback(launch, config.simulated_nodes)
        check_world_size(config, launch.world_size)
    except UserError as error:
        return refuse(error, log, as_json=as_json)
    return doctor(config, launch, run_dir=run_dir, log=log, stop=stop, as_json=as_json)


def _export(parsed: Parsed, run_dir: Path, launch: env.Launch, log: Log) -> int:
    from train.commands.apply import export_command

    if launch.distributed:
        raise LaunchError(f"export must be started by hand, once, got RANK and WORLD_SIZE from {launch.launcher}.")
    export_command(parsed.extra["checkpoint"], Path(parsed.extra["output"] or "model.pt"), run_dir=run_dir, log=log)
    return FINISHED


def _compare(parsed: Parsed, config: Config, launch: env.Launch, stop: StopRequest, log: Log) -> int:
    from train.commands.compare import CompareOptions, compare

    if launch.distributed:
        raise LaunchError(f"compare must be started by hand, once, got RANK and WORLD_SIZE from {launch.launcher}.")
    extra = parsed.extra
    words = [word for word in _arguments(parsed)[1:] if not word.startswith(("--fresh", "--name=", "--run_dir=", "--run-dir="))]
    directory = Path(config.run_dir) / (config.name or "compare")
    options = CompareOptions(extra["only"], extra["processes"], extra["repeats"])
    compare(config, options, words=words, directory=directory, log=log, stop=stop)
    return FINISHED


def _arguments(parsed: Parsed) -> list[str]:
    """The line of one rank: its command, and the settings and that command's options as they were given."""
    command = parsed.extra["command"]
    words = [command, *(["--config", parsed.config_file] if parsed.config_file else [])]
    own = {name: parsed.extra[name] for name, option in EXTRA.items()
           if command in option.commands and "launch" in option.commands and parsed.extra[name] != option.default}
    own.pop("init_method", None)  # the launcher has understood it
    given = {**parsed.settings, **own}
    return words + [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]


def _report(error: BaseException, log: Log) -> int:
    """Print an end that is no success, as its kind deserves, and return its code."""
    tell_torchrun(error)
    code = exit_code(error)
    if isinstance(error, Stopped):
        log.info(str(error))
    elif getattr(error, "printed_elsewhere", False):
        log.debug(str(error))
    elif isinstance(error, OURS):
        log.warning(f"error: {error}" if code == USER_MISTAKE else f"{error} (exit code {code})")
    else:
        # The rank and host stand before each line: in a heap of logs this is the one to find
        text = "".join(traceback.format_exception(error)).rstrip()
        log.warning(text)
        if known := advice(text):
            log.warning(known)
    return code


def entry(stop: StopRequest | None = None) -> NoReturn:
    """Run the command line and end the process with its code, see `train.process.exit`."""
    code = main(stop=stop or StopRequest().install())
    finish(code)


if __name__ == "__main__":
    entry(_stop)
