"""Faults at exact places: a process of a job dies or stops in the middle of a forward pass, a save, or a join.

The program does not know of this. `order` writes a `sitecustomize.py`, which Python runs when it starts. It puts hooks
around functions of the program when they are imported. Each hook is a named place, see `PLACES`. The variable FAULTS
has the order as JSON: a folder and a list of groups of faults. A group is armed when all faults of the group before it
have struck, so one job can suffer many faults, also a second one while it recovers from the first. Each fault strikes
once, in the first process that gets there, which creates a file in the folder. This module must not import torch or
anything else that is slow, because fork servers import it too."""

import ctypes
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTS = "FAULTS"
# Faults of one group wait for each other this long; some ranks may have died of the first fault already
TOGETHER_S = 5.0

JOINING = ("before joining", "met", "before forming", "formed")
PREPARING = ("before building", "data loaded", "model built", "ready")
STEPPING = ("forward", "backward", "between buckets", "reducing the loss", "before the optimizer", "in the optimizer",
            "after the optimizer")
KEEPING = ("evaluating", "saving", "publishing", "published")
RESCUING = ("before the rescue", "writing the rescue", "publishing the rescue")
RESCUED = ("reading the rescue", "sending the rescue", "rescue known")
PLACES = (*JOINING, *PREPARING, *STEPPING, *KEEPING, *RESCUING, *RESCUED, "between the renames")


@dataclass(frozen=True)
class Fault:
    """A fault of one process at one place. `rank` -1: the first rank that gets there. `step`: not before that step.

    `how`: a signal's name. `whom`: "self" (the rank), "server" (the process that forked it, which no rank needs any
    more), "agent", or "node" (all three). `saved`: a save under way ends first. `late_s`: strike this much later,
    wherever the process is by then."""

    place: str
    rank: int = -1
    step: int = 0
    how: str = "SIGKILL"
    whom: str = "self"
    saved: bool = False
    late_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.place in PLACES, self.place


Groups = Sequence[Sequence[Fault]]


def order(folder: Path, faults: Groups) -> dict[str, str]:
    """Return the variables of a job that shall suffer these faults. `folder` gets the record of what happened."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from tests.rigs import places\n\nplaces.install()\n")
    root = str(Path(__file__).resolve().parents[2])
    text = json.dumps({"folder": str(folder), "faults": [[asdict(fault) for fault in group] for group in faults]})
    return {FAULTS: text, "PYTHONPATH": f"{folder}:{root}"}


@dataclass(frozen=True)
class Strike:
    fault: Fault
    rank: int
    pids: list[int]  # of the ranks that died with it
    time: float


def strikes(folder: Path) -> list[Strike]:
    """Return the faults that have struck so far."""
    found = [json.loads(path.read_text() or "null") for path in sorted(folder.glob("*.struck"))]
    return [Strike(Fault(**entry.pop("fault")), **entry) for entry in found if entry]


def updates(folder: Path) -> list[dict[str, Any]]:
    """Return all finished optimizer steps of all processes, {"rank", "pid", "step", "time"}, by time."""
    lines = [line for path in folder.glob("updates-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda entry: float(entry["time"]))


# In the job's processes -----------------------------------------------------------------------------------------


class Now:
    """The place of this process in the training."""

    step = 0  # the optimizer step in progress, from 1; 0 before the first
    inside_step = False


@functools.cache
def _order() -> tuple[Path, list[list[Fault]]]:
    given = json.loads(os.environ[FAULTS])
    return Path(given["folder"]), [[Fault(**fault) for fault in group] for group in given["faults"]]


def due(place: str) -> Path | None:
    """Return the file to create when the fault that is due here strikes, or None if none is due."""
    folder, groups = _order()
    for number, group in enumerate(groups):
        files = [folder / f"{number:02d}-{index}.struck" for index in range(len(group))]
        missing = [(file, fault) for file, fault in zip(files, group, strict=True) if not file.exists()]
        for file, fault in missing:
            mine = fault.rank in (-1, int(os.environ.get("RANK", "-2")))
            if fault.place == place and mine and Now.step >= fault.step:
                return file
        if missing:
            return None
    return None


def at(place: str) -> None:
    """Note that this process has come to a place, and suffer the fault that is due here."""
    file = due(place)
    if file is None:
        return
    folder, groups = _order()
    number, index = (int(part) for part in file.stem.split("-"))
    group = groups[number]
    for thread in threading.enumerate():
        if thread.name == "save" and group[index].saved:
            thread.join()
    if len(group) > 1:
        file.with_suffix(".here").touch()
        until_s = time.monotonic() + TOGETHER_S
        while len(list(folder.glob(f"{number:02d}-*.here"))) < len(group) and time.monotonic() < until_s:
            time.sleep(0.005)
    fault = group[index]
    try:
        claim = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:  # another rank got here first
        return
    pids = [os.getpid()] if fault.whom == "self" else [] if fault.whom == "server" else _siblings()
    entry = {"fault": asdict(fault), "rank": int(os.environ["RANK"]), "pids": pids, "time": time.time()}
    os.write(claim, json.dumps(entry).encode())
    os.close(claim)
    if fault.late_s:
        threading.Timer(fault.late_s, _strike, [fault]).start()
    else:
        _strike(fault)


def note_update() -> None:
    """Note that this process has finished an optimizer step."""
    entry = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "step": Now.step, "time": time.time()}
    with (_order()[0] / f"updates-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _strike(fault: Fault) -> None:
    number = getattr(signal, fault.how)
    agent = os.getppid()
    victims = {"self": [os.getpid()], "server": _servers(), "agent": [agent], "node": [agent, *_servers(), os.getpid()]}
    if fault.how == "SIGSEGV" and fault.whom == "self":
        ctypes.string_at(0)  # a real segmentation fault, in C
    for pid in victims[fault.whom]:
        os.kill(pid, number)
    if fault.whom == "server":
        return
    # The end of a parent kills this process too. The agent passes a request to stop back to this rank, which waits here
    # for it
    time.sleep(2.0 if number == signal.SIGTERM else 600.0)


def _siblings() -> list[int]:
    """Return the ranks of this node with this one: they end when their agent ends."""
    return [pid for pid in _children_of_agent() if pid not in _servers()]


def _servers() -> list[int]:
    """Return the fork server of this rank's agent."""
    return [pid for pid in _children_of_agent() if b"agent/fork_server.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and b"rank" not in Path(f"/proc/{pid}/comm").read_bytes()]


def _children_of_agent() -> list[int]:
    agent = os.getppid()
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


# The hooks: which function of the program is which place ------------------------------------------------------------


def install() -> None:
    """Install the hooks. `sitecustomize` calls this before the program's first line."""
    sys.meta_path.insert(0, _Finder())
    rename = Path.rename

    def renamed(self: Path, target: Any) -> Path:
        kind, name = _kind(self), Path(target).name
        if self.name.startswith(".writing-") and name.startswith("step-"):
            at("publishing" if kind == "checkpoint" else "publishing the rescue")
        done = rename(self, target)
        if kind == "checkpoint" and name.startswith("step-"):
            at("between the renames" if name.endswith(".replaced") else "published")
        return done

    Path.rename = renamed  # type: ignore[assignment, method-assign]


def install_in_fork() -> None:
    """Preload a process of tests/rigs/fork_server.py: import the program's modules again, with hooks."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rankup", "train")]:
        del sys.modules[name]
    install()
    import rankup
    from train.main import main

    program = rankup.Program().begin()
    program.exit(main(program=program))


def _kind(path: Path) -> str:
    return "checkpoint" if path.parent.name == "checkpoints" or "checkpoints" in path.parts else "rescue"


class _Finder(importlib.abc.MetaPathFinder):
    """Installs the hooks right after a module has run, before anything imports a function from it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in HOOKS and name not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_hook(module: Any) -> None:
            run(module)
            for wrapped in WRAPPED.get(name, ()):
                _wrap(module, *wrapped)
            HOOKS.get(name, lambda module: None)(module)

        spec.loader.exec_module = run_and_hook  # type: ignore[method-assign]
        return spec


def _wrap(module: Any, name: str, before: str = "", after: str = "") -> None:
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, module)
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def call(*values: Any, **more: Any) -> Any:
        if before:
            at(before)
        done = whole(*values, **more)
        if after:
            at(after)
        return done

    setattr(owner, name, call)


def _hook_group(group: Any) -> None:
    reduce = group.Group.sum

    def summed(self: Any, tensor: Any) -> Any:
        if Now.inside_step:
            at("reducing the loss")
        return reduce(self, tensor)

    group.Group.sum = summed


def _hook_copies(copies: Any) -> None:
    write = copies.write_durably

    def written(path: Path, *values: Any) -> Any:
        done = write(path, *values)
        at("saving" if _kind(path) == "checkpoint" else "writing the rescue")
        return done

    copies.write_durably = written


def _hook_loop(loop: Any) -> None:
    _hook_optimizers()
    step, evaluate = loop.step, loop.evaluate_and_report

    def hooked_step(t: Any, batches: Any) -> Any:
        Now.step, Now.inside_step = t.job.step_number + 1, True
        hooks = _inside_step(t)
        try:
            return step(t, batches)
        finally:
            Now.inside_step = False
            for hook in hooks:
                hook.remove()

    def hooked_evaluate(t: Any) -> Any:
        hook = t.plain.register_forward_hook(lambda *_: at("evaluating"))
        try:
            return evaluate(t)
        finally:
            hook.remove()

    loop.step, loop.evaluate_and_report = hooked_step, hooked_evaluate


def _inside_step(t: Any) -> list[Any]:
    """Return hooks inside the model, only for the step in which they strike: they would slow down all others."""
    trained = [parameter for parameter in t.plain.parameters() if parameter.requires_grad]
    seen: list[int] = []

    def last_backward(gradient: Any) -> None:
        seen.append(1)
        if len(seen) == t.config.accumulate:  # only the last backward pass of an accumulated step exchanges gradients
            at("between buckets")

    hooks = []
    if due("forward"):
        leaves = [module for module in t.plain.modules() if not list(module.children())]
        # A compiled model does not call its parts one by one
        module = t.model if t.config.compile else leaves[len(leaves) // 2]
        hooks.append(module.register_forward_hook(lambda *_: at("forward")))
    if due("backward"):
        hooks.append(trained[-1].register_hook(lambda _: at("backward")))  # its gradient is computed first
    if due("between buckets"):
        hooks.append(trained[0].register_hook(last_backward))  # and this one last
    return hooks


def _hook_optimizers() -> None:
    """Strike before, in and after an optimizer's step, and record each finished step."""
    from torch.optim import adam, adamw, sgd
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(*_: Any) -> None:
        if Now.step:
            at("before the optimizer")

    def after(*_: Any) -> None:
        if Now.step:
            note_update()
            at("after the optimizer")

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    # Called once per parameter group: after the first call, half of the weights are new
    for module, name in ((sgd, "sgd"), (adam, "adam"), (adamw, "adamw")):
        _wrap(module, name, after="in the optimizer")


# The places before and after a function, by module
WRAPPED: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "rankup.group.joining": [("meet", "before joining", "met"),
                             ("dist.init_process_group", "before forming", "formed")],
    "rankup.loop.saving": [("Saving.rescue", "before the rescue", "")],
    "rankup.state.run": [("load", "reading the rescue", "rescue known")],
    "rankup.state.reading": [("Shipping.result", "sending the rescue", "")],
    "train.loop": [("build", "before building", "ready"), ("load", "", "data loaded"),
                   ("build_optimizer", "model built", "")],
}
HOOKS: dict[str, Callable[[Any], None]] = {
    "rankup.group.group": _hook_group, "rankup.state.copies": _hook_copies, "train.loop": _hook_loop,
}
