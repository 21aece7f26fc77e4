"""Imports in rankup/ and train/ run one way, cheap modules import no torch, and only rankup/env knows schedulers."""

import ast
import gc
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import rankup
from tests.rigs.jobs import ROOT, environment
from train import commands, workloads
from train.config import Config

FOLDERS = ["config", "group", "data", "workloads", "parallel", "run", "loop", "commands", "main", "examples"]
# Each module may import only modules before it
ORDER = [
    *(f"rankup.{name}" for name in (
        "errors", "timing", "seeds", "urls", "env", "places", "agent", "group", "state", "observe", "explain", "doctor",
        "process", "loop", "job", "notebook", "integrations", "slurm_task", "slurm", "launch", "files", "submit",
        "options", "cli", "wheel", "__main__",
    )),
    *(f"train.{name}" for name in FOLDERS),
]


def files() -> list[Path]:
    return [path for package in ("rankup", "train") for path in (ROOT / package).rglob("*.py")]


def graph() -> dict[str, set[str]]:
    """Map each module to the modules of rankup/ and train/ that it imports, at its top or in a function."""
    modules = {module_of(path): path for path in files()}
    # Leave out `rankup` itself: it imports its public names from everywhere, but lazily
    del modules["rankup"]
    return {module: set(imported(path, modules)) - {"rankup", "train"} for module, path in modules.items()}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = str(node.module)
            if node.level:
                above = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # The program imports itself relatively, because it is also `rankup.program`. The library never does
            inside = path.is_relative_to(ROOT / "train")
            assert bool(node.level) == (inside and base.startswith("train")), f"{path}: {base}"
            names = [f"{base}.{alias.name}" for alias in node.names]
            found = [name if name in modules else base for name in names]
        else:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in found if name.split(".")[0] in ("rankup", "train"))


def folder_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_imports_run_one_way_between_folders() -> None:
    found = graph()
    assert {folder_of(module) for module in found.keys() - {"train"}} == {*ORDER}
    wrong = [f"{importer} imports {name}" for importer, names in found.items() for name in names
             if ORDER.index(folder_of(name)) > ORDER.index(folder_of(importer))]
    assert wrong == []


def test_pages_import_only_public_names_of_train_workloads() -> None:
    pages = [*(ROOT / "train").rglob("*.md"), *(ROOT / "k8s").rglob("*.py")]
    named = [re.findall(r"^from train\.workloads import (.*)", page.read_text(), re.MULTILINE) for page in pages]
    used = {name for lines in named for line in lines for name in line.split(", ")}
    assert {"Workload"} <= used <= {*workloads.__all__}


def test_program_imports_only_public_names() -> None:
    """A user's own program needs no other names either: those of `rankup`, and those of its public modules."""
    modules = [f"rankup.{name}" for name in rankup.__all__ if isinstance(getattr(rankup, name), ModuleType)]
    assert len(rankup.__all__) <= 20
    pages = "".join((ROOT / "rankup" / page).read_text() for page in ("loop.md", "loop-reference.md", "program.md"))
    wrong = []
    for path in (ROOT / "train").rglob("*.py"):
        used = re.findall(r"\b(?:job|group|program)((?:\.(?!type)[a-z]\w*)+)", path.read_text())
        wrong += [name for name in ".".join(used).split(".") if not re.search(rf"\.{name}\b", pages)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "rankup" and not node.level:
                public = node.module in modules or all(
                    node.module == "rankup" and alias.name in rankup.__all__ for alias in node.names
                )
            elif isinstance(node, ast.Import):
                named = [alias.name for alias in node.names if alias.name.partition(".")[0] == "rankup"]
                public = all(name in ("rankup", *modules) for name in named)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rankup":
                public = node.attr in rankup.__all__
            else:
                continue
            wrong += [] if public else [f"{path.relative_to(ROOT)}:{node.lineno}"]
    assert wrong == []


def test_imports_run_one_way_inside_each_folder() -> None:
    inside = {
        module: {name for name in names if folder_of(name) == folder_of(module)}
        for module, names in graph().items()
    }
    assert sum(map(len, inside.values())) > 30
    TopologicalSorter(inside).prepare()  # raises CycleError, which names the cycle


def modules_after(code: str) -> set[str]:
    """Run `code` in a new process. Return the top-level modules that are loaded then."""
    code += "\nimport sys; print('\\n' + ' '.join({m.split('.')[0] for m in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


LINES = [["show"], ["--help"], [], ["launch", "--help"], ["doctor", "--help"], ["train", "--stpes", "3"],
         ["launch", "--nproc", "0", "x.py"], ["status", "--run-dir", "nowhere"],
         ["status", "none", "--run-dir", "nowhere"], ["explain", "README.md"]]


@pytest.mark.parametrize(("code", "needed", "not_needed"), [
    ("from train import config, main; import rankup.explain; from rankup.group import stop; "
     "from rankup.observe import goodput, logs, metrics, stacks, status, tracker",
     {"train", "pydantic"}, {"torch", "numpy", "torchvision", "tensorboard"}),
    ("import rankup.cli, rankup.agent.fork_server", {"rankup"}, {"torch", "numpy", "train"}),
    (f"from train.main import main\nfor line in {LINES}: main(line)", {"train", "pydantic"}, {"torch"}),
])
def test_cheap_modules_and_commands_do_not_import_torch(
    code: str, needed: set[str], not_needed: set[str]
) -> None:
    loaded = modules_after(code)
    assert needed <= loaded
    assert not loaded & not_needed


def test_rank_env_imports_only_the_standard_library() -> None:
    """Agents and cluster nodes import it in milliseconds, and pydantic alone would double that."""
    loaded = modules_after("import rankup.env.rank_env, rankup.errors")
    assert "rankup" in loaded
    assert loaded - modules_after("") <= {*sys.stdlib_module_names, "rankup"}


def test_garbage_is_collected_again_after_slow_imports() -> None:
    try:
        assert commands._imported("..config", "Config") is Config
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


SCHEDULERS = re.compile(r"slurm|sbatch|srun|scancel|kube|k8s|pytorchjob|trainjob|volcano|\bpods?\b", re.IGNORECASE)


def code_and_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name and string, except comments and docstrings."""
    text = path.read_text()
    docstrings = {
        node.body[0].lineno for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL) and token.start[0] not in docstrings:
            yield token.start[0], token.string


def test_schedulers_are_named_only_in_env() -> None:
    # explain reads the output of all schedulers, files writes their launch files and submit submits them, launch uses a
    # whole allocation of Slurm, and the command line describes all of these
    names = ("env", "explain", "files", "submit", "slurm.py", "slurm_task.py", "cli.py", "launch.py")
    homes = {ROOT / "rankup" / name for name in names}
    assert all(home.exists() for home in homes)
    others = [path for path in files() if not homes & {path, *path.parents}]
    assert len(others) > 30
    named = [f"{p}:{line}: {text}" for p in others for line, text in code_and_messages(p) if SCHEDULERS.search(text)]
    assert named == []
    # The search works: it finds them in env
    assert any(SCHEDULERS.search(text) for _, text in code_and_messages(ROOT / "rankup" / "env" / "launchers.py"))


OWN_VARIABLE = re.compile(r"""environ(\.get\(|\[)["']RANKUP_|getenv\(["']RANKUP_""")


def test_rankup_variables_are_read_only_in_env_and_agent() -> None:
    homes = {"rankup.env", "rankup.agent"}
    others = [path for path in files() if folder_of(module_of(path)) not in homes]
    assert len(others) > 30
    assert [str(path) for path in others if OWN_VARIABLE.search(path.read_text())] == []
    assert OWN_VARIABLE.search((ROOT / "rankup" / "env" / "rank_env.py").read_text())
