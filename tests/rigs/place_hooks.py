"""The hooks of `tests.rigs.places`: which function of the program is which place."""

import functools
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rigs.places import Now, at, due, note_update


def install() -> None:
    """Called by `sitecustomize`, before the program's first line."""
    sys.meta_path.insert(0, _Finder())
    rename = pathlib.Path.rename

    def renamed(self: Path, target: Any) -> Path:
        kind, name = _kind(self), Path(target).name
        if self.name.startswith(".writing-") and name.startswith("step-"):
            at("publishing" if kind == "checkpoint" else "publishing the rescue")
        done = rename(self, target)
        if kind == "checkpoint" and name.startswith("step-"):
            at("between the renames" if name.endswith(".replaced") else "published")
        return done

    pathlib.Path.rename = renamed  # type: ignore[assignment, method-assign]


def install_in_fork() -> None:
    """The preload of a process of tests/rigs/fork_server.py: what it has imported of the program it imports anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rankup", "train")]:
        del sys.modules[name]
    install()
    from train.main import entry

    entry()
    os._exit(99)


def _kind(path: Path) -> str:
    return "checkpoint" if path.parent.name == "checkpoints" or "checkpoints" in path.parts else "rescue"


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the hooks in as soon as a module was run, before anybody takes a function out of it."""

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
    """Hooks inside the model, only for the step in which they strike: they would slow the others down."""
    trained = [parameter for parameter in t.plain.parameters() if parameter.requires_grad]
    seen: list[int] = []

    def last_backward(gradient: Any) -> None:
        seen.append(1)
        if len(seen) == t.config.accumulate:  # the others exchange nothing
            at("between buckets")

    hooks = []
    if due("forward"):
        leaves = [module for module in t.plain.modules() if not list(module.children())]
        # Compiled, the model's parts are not called one by one
        module = t.model if t.config.compile else leaves[len(leaves) // 2]
        hooks.append(module.register_forward_hook(lambda *_: at("forward")))
    if due("backward"):
        hooks.append(trained[-1].register_hook(lambda _: at("backward")))  # its gradient comes first
    if due("between buckets"):
        hooks.append(trained[0].register_hook(last_backward))  # and this one last
    return hooks


def _hook_optimizers() -> None:
    """Strike before, in and after an optimizer's step, and write down each that a process has finished."""
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
    # Called once for each group of parameters: after the first, half of the weights are new
    for module, name in ((sgd, "sgd"), (adam, "adam"), (adamw, "adamw")):
        _wrap(module, name, after="in the optimizer")


# What runs before and after a function, by module
WRAPPED: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "rankup.group.joining": [("meet", "before joining", "met"),
                             ("dist.init_process_group", "before forming", "formed")],
    "rankup.loop.saving": [("Saving.keep", "before the rescue", "")],
    "rankup.state.choice": [("read", "reading the rescue", ""), ("share", "sending the rescue", "rescue known")],
    "train.loop": [("build", "before building", "ready"), ("load", "", "data loaded"), ("warm_up", "warming up", "")],
}
HOOKS: dict[str, Callable[[Any], None]] = {
    "rankup.group.group": _hook_group, "rankup.state.copies": _hook_copies, "train.loop": _hook_loop,
}
