"""Files, links, commands, flags, settings and messages that the pages name exist."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from inspect import signature
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from rankup import cli, errors, init
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT
from train.commands import COMMANDS
from train.commands.line import parse_args
from train.config import Config, load_config
from train.config.load import fields_of
from train.workloads import Workload

TOP_LEVEL = {
    "docker", "k8s", "slurm", "rankup", "train", "tests", "compose.yaml", "Makefile",
    "README.md", "README.zh.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "CITATION.cff", "LICENSE",
    "SECURITY.md", "pyproject.toml", "site", "bench", "CODE_OF_CONDUCT.md",
}
# Flags and words with an underscore that belong to other projects
FOREIGN_FLAGS = {"--network", "--shm-size", "--logdir", "--gpus-per-task", "--ntasks-per-node", "--local-rank",
                 "--use-env", "--bind-to", "--allow-run-as-root", "--oversubscribe", "--version", "--gloo", "--mpi",
                 "--separator", "--prefix", "--timestamps", "--overlap", "--jobid", "--mca",
                 # of pip, uv and docker compose
                 "--requirement", "--constraint", "--editable", "--frozen", "--inexact", "--no-dev", "--no-deps",
                 "--no-install-project", "--system-site-packages", "--quiet", "--build", "--build-arg",
                 "--project-directory", "--find-links", "--shell", "--platform",
                 # Of Slurm, its containers and apptainer
                 "--nodes", "--ntasks", "--cpus-per-task", "--kill-on-bad-exit", "--export", "--gpus-per-node",
                 "--no-kill", "--wait", "--signal", "--het-group", "--container-image", "--container-mounts",
                 "--container-workdir", "--nv", "--bind", "--pwd", "--unset", "--chdir", "--parsable",
                 # Of git, rsync and kubectl
                 "--porcelain", "--branch", "--untracked-files", "--cached", "--others", "--exclude-standard",
                 "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--submodule",
                 "--src-prefix", "--dst-prefix", "--binary", "--checksum", "--copy-dest", "--all", "--format",
                 "--local", "--ignore-not-found", "--grace-period", "--array", "--open-mode", "--error",
                 "--field-selector", "--tail", "--max-log-requests", "--ignore-errors", "--since-time", "--detach"}
FOREIGN_WORDS = {
    "weights_only", "weight_decay_rate", "ip_local_port_range", "use_libuv", "state_dict", "load_state_dict",
    "set_epoch", "requires_grad",
    "channels_last", "persistent_workers",
    # Of Accelerate, Lightning and the Trainer
    "accumulate_grad_batches", "gradient_accumulation_steps", "save_state", "load_state", "skip_first_batches",
    "ckpt_path", "save_steps", "resume_from_checkpoint", "gather_for_metrics", "compute_metrics",
    "load_best_model_at_end", "set_trigger", "check_trigger", "save_hyperparameters", "report_to", "is_main_process",
    "rank_zero_only", "is_world_process_zero", "notebook_launcher",
}
# Messages of torch
TORCH_SAYS = re.compile(
    r"^(Expected to have finished|unable to allocate shared|Bus error|__path__ attribute not found|use_libuv|\[c10d\]|"
    r"Setting OMP_NUM_THREADS|ChildFailedError|exitcode|RendezvousConnectionError|--)"
)


@cache
def tracked() -> list[str]:
    """Return the files in git, and new files that git does not ignore."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


def documents() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `document` once for each page."""
    if "document" in metafunc.fixturenames:
        metafunc.parametrize("document", documents())


def fences(text: str) -> list[tuple[str, str]]:
    """Return language and content of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    """Return all code spans, and the lines of shell blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, block in fences(text) if language == "sh" for line in block.splitlines()]
    return [*re.findall(r"`([^`\n]+)`", outside), *lines]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def known_flags() -> set[str]:
    options = [name for model in COMMANDS.values() for name in fields_of(model)]
    names = [name.replace("_", "-") for name in [*Config.model_fields, *options]]
    ours = {"--config", "--help", *(f"--{name}" for name in names)}
    switches = {f"--no-{name}" for name in names}
    torchruns = {option for action in get_args_parser()._actions for option in action.option_strings}
    of_rankup = {flag for command in cli.COMMANDS.values() for flag in command.flags}
    folders = ("bench", "tests/agent", "train/examples")
    scripts = "".join(path.read_text() for of in folders for path in ROOT.glob(f"{of}/*.py"))
    of_scripts = set(re.findall(r'add_argument\("(--[a-z-]+)"', scripts))
    assert "--kills" in of_scripts
    return ours | switches | torchruns | of_rankup | of_scripts | FOREIGN_FLAGS


def test_docs_link_to_existing_files_and_headings(document: str) -> None:
    text = read(document)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


# Files in a user's repository, and files that ended
OF_USERS = {"k8s/train.yaml", "slurm/pretrain.sbatch", "slurm/job.sh", "slurm/task.sh", "slurm/simple.sbatch",
            "docker/compose.own.yaml"}


def test_docs_name_paths_that_exist(document: str) -> None:
    ours = re.compile(rf"^({'|'.join(re.escape(name) for name in TOP_LEVEL)}|\.ci)(/[\w./-]+)?$")
    for span in code(read(document)):
        for word in span.split():
            if ours.match(word) and not word.startswith("train/<") and word not in OF_USERS:
                beside = (ROOT / document).parent / word
                assert (ROOT / word).exists() or beside.exists(), f"{document}: {word}"


def program_lines(document: str) -> list[list[str]]:
    """Return the words of each command line after `train.main` or `rankup`, without placeholders."""
    found = []
    for span in code(read(document)):
        match = re.search(r"(?:-m train\.main|train/main\.py|-m rankup|^rankup)\s+(\S.*)$", span)
        if match and not re.match(r"COMMAND|\.\.\.|help |--version", match[1]):
            quoted = span[: match.start()].count('"') % 2  # SCRIPT="train/main.py doctor" make up
            words = match[1].partition('"')[0] if quoted else match[1]
            found.append(shlex.split(words.replace(" ...", ""), comments=True))
    return found


def test_docs_name_command_lines_that_the_program_accepts(
    document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for span in code(read(document)):
        if match := re.search(r"\btorchrun (-.*-m train\.main .*)$", span):
            get_args_parser().parse_args(shlex.split(match[1]))
    for words in program_lines(document):
        if words[0] == "launch":
            if words[1:] in ([], ["--help"]):
                continue
            given = cli.COMMANDS["launch"].parse_args(words[1:])
            if given.words[0] not in ("train/main.py", "train.main"):
                continue
            words = given.words[1:] or ["train"]
        if words[0] in cli.COMMANDS:
            if words[1:] != ["--help"]:
                cli.COMMANDS[words[0]].parse(words[1:])
            continue
        parsed = parse_args(words)
        assert parsed.command in COMMANDS, words
        load_config(parsed.settings, file=parsed.options.config, mistakes=parsed.mistakes)


def test_docs_name_the_main_commands() -> None:
    named = {words[0] for document in documents() for words in program_lines(document)}
    assert named >= {"train", "evaluate", "predict", "show", "launch"}


def test_docs_name_make_targets_that_exist(document: str) -> None:
    targets = {
        name for line in re.findall(r"^([a-z0-9 -]+):.*## ", read("Makefile"), re.MULTILINE) for name in line.split()
    }
    assert len(targets) >= 8
    for span in code(read(document)):
        for target in re.findall(r"(?:^|[;&|] *)make ([a-z][a-z0-9-]*)", span):
            assert target in targets, f"{document}: {span}"


def test_docs_name_flags_and_settings_that_exist(document: str) -> None:
    # On pages about launchers most flags and words with an underscore are those of the launchers
    for span in code(read(document)) if not document.startswith(("docker/", "slurm/", "k8s/")) else ():
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            assert flag.replace("_", "-") in known_flags(), f"{document}: {span}"
        if re.fullmatch(r"[a-z]+(_[a-z]+)+", span) and span not in FOREIGN_WORDS:
            known = {*Config.model_fields, *Workload.__dataclass_fields__, *signature(init).parameters}
            assert span in known, f"{document}: {span}"


@cache
def strings_of_the_program() -> list[tuple[str, str]]:
    """Return place and text of each string in rankup/ and train/, with {} for each value in an f-string."""
    found = []
    for name in tracked():
        if name.startswith(("rankup/", "train/")) and name.endswith(".py"):
            for node in ast.walk(ast.parse(read(name))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                    found.append((f"{name}:{node.lineno}", "".join(map(str, parts))))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append((f"{name}:{node.lineno}", node.value))
    return found


def test_docs_quote_messages_that_the_program_prints() -> None:
    rows = [row for row in read("train/troubleshooting.md").splitlines() if row.startswith("| `")]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row.split("|")[1])]  # in the first column
    messages = [span for span in spans if not TORCH_SAYS.match(span)]
    assert len(messages) > 10
    texts = [text for _, text in strings_of_the_program()]
    for message in messages:
        # The program's strings lack the values, and words that depend on values
        words = max(re.split(r"[\w.]*\d[\w:]*|\.\.\.|\(.*?\)|\"|: |, ", message), key=len).split()
        starts = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
        assert any(start in text for start in starts if len(start) > 10 for text in texts), (
            f"no string of the program has: {message} (searched: {words})"
        )


def test_docs_messages_name_flags_and_files_that_exist() -> None:
    flags, files = 0, 0
    for where, text in strings_of_the_program():
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?=[\s.,;:)=]|$)", text):
            flags += 1
            assert flag.replace("_", "-") in known_flags(), f"{where}: {text}"
        for name in re.findall(r"(?<![\w./])(?:rankup|train|tests|docker|slurm|k8s)/[\w./-]+\.\w+", text):
            files += 1
            assert (ROOT / name).exists(), f"{where}: {text}"
    assert flags > 20
    assert files > 0


CHINESE = re.compile(r"[\u4e00-\u9fff]")


def headings(text: str) -> list[str]:
    """Return the levels of the headings outside fenced blocks, such as "##"."""
    return re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def rows(text: str) -> list[list[str]]:
    """Return the numbers in each row of each table."""
    return [sorted(numbers(row)) for row in text.splitlines() if row.startswith("|")]


def links(text: str) -> list[str]:
    """Return the targets of links, with English names for Chinese pages and without links between the two READMEs."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return sorted(target.replace(".zh.md", ".md") for target in targets if not target.startswith("README."))


def test_docs_readmes_agree_in_both_languages() -> None:
    english, chinese = read("README.md"), read("README.zh.md")
    assert "](README.zh.md)" in "".join(english.splitlines()[:5])
    assert "](README.md)" in "".join(chinese.splitlines()[:5])
    assert headings(chinese) == headings(english)
    without_remarks = [sorted(re.sub(r"\s+#.*", "", line) for line in code(text)) for text in (chinese, english)]
    assert without_remarks[0] == without_remarks[1]
    assert links(chinese) == links(english)
    assert rows(chinese) == rows(english)
    assert set(numbers(english)) <= set(numbers(chinese))  # not the reverse: a month has a number in Chinese
    assert len(CHINESE.findall(chinese)) > 1000
    assert [language for language, _ in fences(chinese)] == [language for language, _ in fences(english)]
    for (_, block), (_, other) in zip(fences(english), fences(chinese), strict=True):
        for line, translated in zip(block.splitlines(), other.splitlines(), strict=True):
            # Commands and output are not translated. In the list of files the remarks behind the names are
            same = line.split()[0] == translated.split()[0] and CHINESE.search(translated)
            assert same or line == translated, translated


def test_readme_begins_with_a_command() -> None:
    assert read("README.md").splitlines().index("```sh") + 1 < 20


def test_docs_top_level_is_fixed() -> None:
    top = {name.split("/")[0] for name in tracked()}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "rankup", "train", "tests"} <= top
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def launch_files() -> list[str]:
    pattern = re.compile(
        r"^(Makefile|\.ci/run|compose[\w.]*\.yaml|docker/([\w.]*Dockerfile|(host/)?[\w.]+\.(sh|yaml))|slurm/[\w.]+|k8s/.*\.yaml|train/[\w.]+\.sh)$"
    )
    return [
        name
        for name in tracked()
        if pattern.match(name) and not (ROOT / name).is_symlink() and not name.endswith(".md")
    ]


def test_docs_workflow_runs_existing_targets() -> None:
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert [line.split("#")[0].strip() for line in lines if ".ci/run" in line] == ["sudo .ci/run"]
    targets = {words[1] for words in map(str.split, lines) if words[0] == "make"}
    assert targets == {"k8s-kind", "k8s-logs"}
    assert all(re.search(rf"^[a-z0-9 -]*\b{target}\b.*:.*## ", read("Makefile"), re.MULTILINE) for target in targets)
    uses = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in uses)


def test_docs_version_is_in_one_place() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert set(yaml.safe_load(read("CITATION.cff"))) >= {"cff-version", "title", "authors", "license"}
    assert "\nversion:" not in read("CITATION.cff")
    program = [name for name in tracked() if name.startswith(("rankup/", "train/")) and name.endswith(".py")]
    assert not [name for name in program if version in read(name)]


def test_docs_launch_files_begin_with_three_lines_of_comment() -> None:
    assert {"Makefile", ".ci/run", "train/demo.sh"} <= set(launch_files())
    for name in launch_files():
        lines = [line for line in read(name).splitlines() if not line.startswith(("#!", "# syntax"))][:3]
        assert len(lines) == 3, name
        assert all(re.match(r"# \w", line) for line in lines), f"{name}: {lines}"


def test_docs_list_the_exit_codes() -> None:
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", read("train/README.md"), re.MULTILINE)}
    assert listed == codes


def listed_in(block_with: str) -> list[str]:
    """Return the first words of the lines in the block of train/README.md that lists `block_with`."""
    blocks = [[line.split()[0] for line in block.splitlines() if line] for _, block in fences(read("train/README.md"))]
    (wanted,) = [block for block in blocks if block_with in block]
    return wanted


def test_docs_list_each_file_of_the_program() -> None:
    there = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "train").iterdir()}
    assert set(listed_in("loop.py")) == there - {"__init__.py", "__pycache__/", "README.md"}


def test_docs_list_the_files_of_a_run(forks: Forks, tmp_path: Path) -> None:
    tiny = ["--dataset", "digits", "--model", "mlp", "--max-steps", "2", "--run-dir", str(tmp_path), "--name", "run"]
    forks.ends("train", *tiny)
    left = {path.name + ("/" if path.is_dir() else "") for path in (tmp_path / "run").iterdir()}
    assert {name for name in left if not name.startswith(".")} == set(listed_in("result.json"))


def test_docs_and_messages_name_extras_that_exist() -> None:
    extras = set(tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"])
    named = [
        (name, extra)
        for name in tracked() if name.endswith((".md", ".py", ".lock", "Dockerfile")) and name != "CHANGELOG.md"
        for found in re.findall(r"(?:rankup|\.)\\?\[(\w+)\\?\]'|extra `(\w+)`|EXTRAS=([a-z]\w*)", read(name))
        for extra in found if extra
    ]
    assert {"s3", "test", "text"} <= {extra for _, extra in named}
    assert [(name, extra) for name, extra in named if extra not in extras] == []


def test_docs_lock_files_fit_the_bounds_of_the_project() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    locked: dict[str, str] = {}
    for path in sorted((ROOT / "docker").glob("requirements*.lock")):
        packages = re.split(r"(?m)^(?=[a-z])", path.read_text())[1:]
        assert packages, path
        for package in packages:
            requirement, _, marker = package.partition(" \\\n")[0].partition(" ; ")
            name, version = requirement.split("==")
            # One list may have a version for older Pythons, and another version for newer ones
            name += f" ; {marker}" if marker.startswith("python_full_version") else ""
            assert locked.setdefault(name, version) == version, "two lock files differ"
            assert re.search(r"(?m)^    --hash=sha256:[0-9a-f]{64}", package), package
            assert "://" not in package, "a lock file has an address"
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    wanted = [Requirement(text) for text in [*project["dependencies"], *extras]]
    assert len(wanted) > 10
    for requirement in wanted:
        if requirement.name != "rankup":
            assert locked[requirement.name.lower()] in requirement.specifier, requirement


def test_docs_sbom_lists_the_packages_of_the_lock_files() -> None:
    printed = subprocess.run([sys.executable, ROOT / "docker/host/sbom.py"], capture_output=True, text=True, check=True)
    assert printed.stdout == read("docker/sbom.json")
    # A package may have two versions, for older and for newer Pythons
    listed = [(each["name"], each["version"]) for each in json.loads(printed.stdout)["components"]]
    assert {"torch", "s3fs", "pytest"} <= {name for name, _ in listed}
    assert len(set(listed)) == len(listed)
