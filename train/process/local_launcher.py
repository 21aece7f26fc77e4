"""`launch` and `supervise`: the ranks of this node under a supervisor. No torch here.

`launch` makes up the ranks itself: several processes on this node, and on others beside it. `supervise` runs the one
rank that another launcher has described in the environment (an engine, a scheduler, an operator): it is what a
container, a pod or a task starts.

What torchrun does not do: keep the ranks' exit codes (it turns each into 1), leave a job alone that stopped on request,
restart only where that can help, and only the rank that needs it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rankup.env.addresses import PORT_OF_LAUNCH, free_port, parse_url
from rankup.errors import FAULT, FINISHED
from train.config import Config, check_world_size
from train.config.options import OPTIONS, LaunchOptions, SuperviseOptions, SupervisorOptions
from train.config.schema import fields_of
from train.config.settings import names_image_files
from train.config.urls import extra_of, is_url
from train.process.context import Context
from train.process.findings import CODES, VERDICTS, WARNING
from train.process.last_word import tell_platform
from train.process.log import Log
from train.process.stack_requests import StackWatch
from train.process.start_rank import MAIN
from train.process.status import new_attempt, read_json
from train.process.supervisor import Supervisor


def launch(context: Context, options: LaunchOptions) -> int:
    """Start the ranks of this node, and return the code of the one that caused the end.

    Raises ConfigError and LaunchError.
    """
    if options.command == "train":
        check_world_size(context.config, options.nproc * options.nnodes)
    if unfit := _preflight(context, options):
        return unfit
    # `launch` understands the URL for its ranks: they get what it stands for
    met = parse_url(options.init_method) if options.init_method else {}
    # Several nodes must agree on one. The same for all attempts: a rank that is started again alone meets the others
    port = options.master_port or (PORT_OF_LAUNCH if options.nnodes > 1 else free_port())
    meeting = {"MASTER_ADDR": options.master_addr or "127.0.0.1", "MASTER_PORT": str(port), **met}
    job = new_attempt()
    supervisor = _supervisor(
        context, options, _environments(options, meeting), first_rank=options.node_rank * options.nproc, job=job,
        start_method=_start_method(options.launcher), left_out="init_method",
    )
    code = supervisor.run()
    if code == FINISHED and options.node_rank == 0:
        code = _confirmed(_folder(context, options.command), supervisor.attempt(0), context.log)
    return code


def supervise(context: Context, options: SuperviseOptions) -> int:
    """Start the rank that the environment describes, and return its last exit code. Raises ConfigError, LaunchError.

    The ids of its attempts begin with RANKUP_ATTEMPT where that is set.
    """
    launch = context.launch
    if options.command == "train":
        check_world_size(context.config, launch.world_size)
    if unfit := _preflight(context, options):
        return unfit
    job = launch.attempt or new_attempt()
    return _supervisor(context, options, [{}], first_rank=launch.rank, job=job, start_method=_start_method()).run()


def _preflight(context: Context, options: SupervisorOptions) -> int:
    """The doctor's exit code for this machine where it is not fit to train; 0 where it is, or where nobody asked.

    Alone, without the other machines: a container that is replaced in the middle of a training finds the others at
    work, not at their doctor. Whether the machines reach each other is checked by the ranks when they join.
    """
    if not options.preflight:
        return FINISHED
    words = [sys.executable, MAIN, "doctor", "--alone", *context.request.words()]
    code = subprocess.run(words, env={**os.environ, "RANKUP_PARENT": str(os.getpid())}, check=False).returncode
    if code in (FINISHED, CODES[WARNING]):
        return FINISHED
    code = code if code >= 0 else 128 - code
    why = f"preflight on {context.log.host}: {VERDICTS.get(code, 'the doctor itself failed')}. No rank was started"
    context.log.warning(f"{why} (exit code {code})")
    tell_platform(why, code)
    return code


def _supervisor(
    context: Context, options: LaunchOptions | SuperviseOptions, environments: list[dict[str, str]], *, first_rank: int,
    job: str, start_method: str, left_out: str = "",
) -> Supervisor:
    """`left_out`: an option that means something else for a rank."""
    ranks = range(first_rank, first_rank + len(environments))
    watch = StackWatch(_folder(context, options.command), ranks, context.log)
    signal.signal(signal.SIGUSR2, watch.ask)
    passed_on = [name for name in fields_of(OPTIONS[options.command]) if name != left_out]
    arguments = [options.command, *context.request.words(options=passed_on)]
    if options.command == "run":
        arguments += ["--", *context.request.script]
    return Supervisor(
        environments, arguments, first_rank=first_rank, job=job, start_method=start_method,
        modules=slow_modules(context.config, options.command), max_restarts=options.max_restarts, stop=context.stop,
        log=context.log, restart_on=options.restart_codes, same_signal=options.command == "run",
        stop_grace_s=options.stop_grace_s if options.command == "run" else 0.0,
    )


def _folder(context: Context, command: str) -> Path:
    """Where the ranks write: training and scripts of the user's in the run's own folder, others in one inside it."""
    return context.in_folder("" if command in ("train", "run") else command).run_dir


def slow_modules(config: Config, command: str) -> list[str]:
    """What ranks import besides `train.main`, and what takes long."""
    if command == "doctor":
        return ["fire", "train.commands.doctor.doctor"]
    if command == "run":  # for the join; the script imports its own
        return ["fire", "train.commands.run.run"]
    # The first step of an optimizer imports torch._dynamo, which takes as long as torch itself
    modules = ["fire", "train.loop", "torch._dynamo"]
    if config.parallel in ("auto", "ddp", "fsdp"):
        modules.append(f"train.parallel.{config.parallel.replace('auto', 'ddp')}")
    # A user's own module may start threads or change from one start to the next, and is imported by the ranks
    if config.workload in ("images", "text"):
        modules.append(f"train.workloads.{config.workload}")
    if config.workload == "images" and config.model not in ("cnn", "mlp"):
        modules.append("torchvision.models")
    if config.workload == "images" and names_image_files(config.dataset):
        modules.append("train.data.file_samples")  # torchvision
    if config.augment == "trivial":
        modules.append("torchvision.transforms.v2")
    if config.workload == "text" and config.bert_dir is not None:
        modules += ["transformers.models.bert.modeling_bert", "tokenizers.implementations", "safetensors.torch"]
    if is_url(config.run_dir):
        modules.append({"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}.get(extra_of(config.run_dir), "fsspec"))
    if config.tensorboard:
        modules.append("torch.utils.tensorboard")
    return modules


def _start_method(launcher: str = "processes") -> str:
    if launcher == "spawn":
        return "spawn"
    # Elsewhere the system's own libraries may have threads that a fork breaks (macOS)
    return "fork" if sys.platform.startswith("linux") else "fresh"


def _environments(options: LaunchOptions, meeting: dict[str, str]) -> list[dict[str, str]]:
    """What each local rank finds in its environment beside that of the launcher. `meeting`: where the ranks meet."""
    return [
        {
            **meeting,
            "RANK": str(options.node_rank * options.nproc + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(options.nnodes * options.nproc),
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "GROUP_RANK": str(options.node_rank),
            "GROUP_WORLD_SIZE": str(options.nnodes),
            "RANKUP_LAUNCH": "1",
        }
        for local_rank in range(options.nproc)
    ]


def _confirmed(run_dir: Path, attempt: str, log: Log) -> int:
    """Success is what this attempt wrote down, not what an earlier one left."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("attempt") == attempt and status.get("state") == "finished":
        return FINISHED
    log.warning(f"all ranks ended with 0, but {run_dir}/status.json does not say that attempt {attempt} finished")
    return FAULT
