"""Imports in train/ run one way, cheap modules stay cheap, and schedulers are known in one place."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from jobs import ROOT, environment

TRAIN = ROOT / "train"

# Lower layers first. A layer holds parts that stand side by side and don't import each other; a part is a chain, in
# which later modules import earlier ones. A module may import whatever stands in a lower layer.
LAYERS: list[list[list[str]]] = [
    [["errors"], ["cgroups"], ["literals", "explain"]],
    [["yamltext", "settings", "fields", "flags", "config"], ["address", "cpus", "ranks", "env"], ["initmethod"]],
    [["advice", "findings", "checks"]],
    [["stop"], ["status"], ["log"]],
    [
        ["network", "store", "meetfile", "roster", "rendezvous", "ways", "health", "suspects", "watch", "group"],
        ["spawn", "launch"],
    ],
    [
        ["data", "feed"],
        ["sources.download", "sources.sets", "sources.idx", "sources.cache", "sources.fetch", "sources.fake",
         "sources.folder", "sources.cifar", "sources.mnist", "sources", "sources.texts"],
        ["models"], ["encoder"], ["bertfiles", "bert"], ["scores"], ["pictures"], ["compress"], ["hvd"],
        ["parallel"], ["optim"], ["sharded", "shard", "checkpoint", "weights"], ["lease"], ["metrics"],
        ["profiling"],
        ["workloads", "workloads.images", "workloads.text"],
    ],
    [["evaluation"], ["record"]],
    [["finish"]],
    [["loop"], ["apply"], ["links", "together", "doctor"]],
    [["chart", "compare"], ["scaling", "sockets", "wire"]],
    [["bench"]],
    [["commands"]],
    [["main"]],
    [["samples.make_digits"], ["samples.make_texts"]],
]  # fmt: skip
PLACE = {
    module: (layer, part, index)
    for layer, parts in enumerate(LAYERS)
    for part, chain in enumerate(parts)
    for index, module in enumerate(chain)
}
EXCEPTIONS = {
    ("workloads", "data"): "a workload hands out its samples in the classes of data",
    ("workloads.images", "data"): "the same",
    ("workloads.images", "models"): "a workload is data, model and loss together",
    ("workloads.images", "sources"): "the same",
    ("workloads.images", "sources.folder"): "predict reads a single image as the folder's images are read",
    ("workloads.images", "pictures"): "which pictures there are depends on what is trained",
    ("workloads", "workloads.images"): "`load` imports the workload that the settings name",
    ("workloads", "workloads.text"): "the same",
    ("workloads.text", "data"): "as images",
    ("workloads.text", "encoder"): "as images",
    ("workloads.text", "bert"): "as images",
    ("workloads.text", "sources.texts"): "as images",
    ("workloads.text", "pictures"): "as images",
    ("workloads.text", "scores"): "what a confusion matrix says is part of what a batch of texts means",
}


def graph() -> dict[str, set[str]]:
    """module -> modules of train/ that it imports, at its top or in a function."""
    modules = {module_of(path): path for path in TRAIN.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        found[module] = {name for name in imported(path, modules) if name}  # "" is the package, which is empty
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(TRAIN).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide from this test"
            if (node.module or "").split(".")[0] == "train":
                of = str(node.module).removeprefix("train").removeprefix(".")
                for alias in node.names:
                    inner = f"{of}.{alias.name}".removeprefix(".")
                    yield inner if inner in modules else of
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("train").removeprefix(".") for a in node.names if a.name.split(".")[0] == "train")


def allowed(importer: str, imports: str) -> bool:
    (layer, part, index), (other_layer, other_part, other_index) = PLACE[importer], PLACE[imports]
    if layer != other_layer:
        return other_layer < layer
    return part == other_part and other_index < index


def test_imports_name_every_module() -> None:
    modules = graph().keys() - {""}
    assert len(modules) > 30
    assert modules == PLACE.keys(), "give each module its place in LAYERS"


def test_imports_run_one_way() -> None:
    wrong = [
        f"{importer} imports {name}"
        for importer, names in graph().items()
        for name in names
        if not allowed(importer, name) and (importer, name) not in EXCEPTIONS
    ]
    assert wrong == []


def test_imports_need_each_exception() -> None:
    known = graph()
    stale = [pair for pair in EXCEPTIONS if pair[1] not in known[pair[0]] or allowed(*pair)]
    assert stale == []


def modules_after(code: str) -> set[str]:
    """The top-level modules that are loaded after `code` ran in a process of its own."""
    code += "\nimport sys; print('\\n' + ' '.join({m.split('.')[0] for m in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


def test_imports_of_cheap_modules_leave_torch_out() -> None:
    loaded = modules_after("from train import config, env, explain, stop, log, status, launch, main")
    assert {"train", "pydantic"} <= loaded
    assert not loaded & {"torch", "numpy", "torchvision", "tensorboard"}


def test_imports_of_commands_that_do_not_train_leave_torch_out() -> None:
    lines = [["show"], ["--help"], [], ["train", "--stpes", "3"], ["launch", "--nproc", "0"]]
    loaded = modules_after(f"from train.main import main\nfor line in {lines}: main(line)")
    assert {"train", "pydantic"} <= loaded
    assert "torch" not in loaded


SCHEDULERS = re.compile(r"slurm|sbatch|srun|scancel|kube|k8s|pytorchjob|trainjob|volcano|\bpods?\b", re.IGNORECASE)


def code_and_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of names and strings; not comments, nor docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL) and token.start[0] not in docstrings:
            yield token.start[0], token.string


def test_imports_and_messages_name_schedulers_in_env_alone() -> None:
    # explain.py reads what they all print
    files = [path for path in TRAIN.rglob("*.py") if path.name not in ("env.py", "explain.py")]
    assert len(files) > 30
    named = [f"{p}:{line}: {text}" for p in files for line, text in code_and_messages(p) if SCHEDULERS.search(text)]
    assert named == []
    # The search finds them where they are
    assert any(SCHEDULERS.search(text) for _, text in code_and_messages(TRAIN / "env.py"))
