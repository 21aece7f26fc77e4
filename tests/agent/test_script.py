"""What a script is: its file, its own modules, whether it imports rankup or horovod, and its command line."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from rankup.agent.script import Script
from rankup.errors import UserError


def write(folder: Path, text: str, name: str = "job.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def imported(script: Script) -> set[str]:
    return {name.removeprefix("imported ") for name in script.must_match() if name.startswith("imported ")}


def test_script_and_its_own_modules_must_match(tmp_path: Path) -> None:
    script = write(tmp_path, "import json, torch\nfrom helpers import (\n    loss,  # the loss\n)")
    for name in ("__init__", "loss", "unused"):
        write(tmp_path, f"{name} = 1", f"helpers/{name}.py")
    found = Script.find([str(script)]).must_match()
    own = {"imported helpers/__init__.py", "imported helpers/loss.py"}
    assert found.keys() == own | {"python version", "torch version", "rankup's code", "script job.py"}
    assert found["torch version"][0].isdigit()

    write(tmp_path, "loss = 2", "helpers/loss.py")
    changed = Script.find([str(script)]).must_match()
    assert {name for name in found if found[name] != changed[name]} == {"imported helpers/loss.py"}


def test_own_modules_of_a_script_are_those_of_its_package(tmp_path: Path) -> None:
    text = "from . import near\nfrom ..outer import tools\ndef main(): from ..helpers import fit\n"
    text += "import neighbour, other"
    script = write(tmp_path, text, "package/inner/main.py")
    names = ("package/__init__.py", "package/outer.py", "package/inner/__init__.py", "package/inner/near.py")
    for name in (*names, "neighbour.py", "other.py"):
        write(tmp_path, "", name)
    write(tmp_path, "import rankup", "package/helpers.py")
    assert imported(Script.find([str(script)])) == {"../helpers.py", "../outer.py", "near.py"}
    assert Script.find([str(script)]).imports_rankup


def test_module_is_found_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import other", "package/inner.py")
    write(tmp_path, "import package.inner", "package/__main__.py")
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "", "other.py")
    script = Script.find(["-m", "package.inner", "a"])
    assert (script.file, script.name) == (tmp_path / "package/inner.py", "-m package.inner")
    assert imported(script) == {"../other.py"}
    assert Script.find(["-m", "package"]).file == tmp_path / "package/__main__.py"
    assert Script.find(["-m", "no_such"]).must_match()["script -m no_such"] == "a module that Python itself finds"


def test_module_of_an_editable_install_is_found_by_its_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may have a part elsewhere, as rankup has its program."""
    places = {"tool": write(tmp_path, "", "one/__init__.py"), "tool.part": write(tmp_path, "", "two/__init__.py")}

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, places[name]) if name in places else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    found = [write(tmp_path, "", name) for name in ("one/__main__.py", "two/main.py")]
    assert [Script.find(["-m", name]).file for name in ("tool", "tool.part.main")] == found


@pytest.mark.parametrize(("arguments", "expected"), [
    (["-x"], ["--local_rank=1", "-x"]), (["--local_rank", "5"], ["--local_rank", "5"]),
])
def test_local_rank_is_an_argument_if_the_script_declares_it(
    arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    script = write(tmp_path, 'parser.add_argument("--local_rank", type=int)')
    words = Script.find([str(script), *arguments]).command(local_rank=1)
    assert words == [str(script), *expected]


def test_command_works_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Script.find(["job.py", "--lr", "1"]).command(local_rank=0) == [str(tmp_path / "job.py"), "--lr", "1"]
    assert Script.find(["-m", "json.tool", "x"]).command(local_rank=0) == ["-m", "json.tool", "x"]


@pytest.mark.parametrize(("text", "forked"), [
    ("import torch\nimport rankup", True),
    ("try:\n    import rankup\nexcept ImportError:\n    rankup = None", True),
    ("import torch\nif __name__ == '__main__':\n    with x:\n        import rankup as r", True),
    ("import own", True),
    ("from own import tools", True),
    ("import indirect", False),
    ("def f():\n    import rankup", True),
    ("'''\nimport rankup\n'''", False),
    ("import rankup_tools", False),
    ("from . import rankup", False),
    ("import rankup\ndef f(:", False),
    (r"import rankup; '\d'", True),  # Python warns of this
])
def test_script_is_forked_if_it_imports_rankup(text: str, forked: bool, tmp_path: Path) -> None:
    write(tmp_path, "import rankup", "own.py")
    write(tmp_path, "import own", "indirect.py")
    assert Script.find([str(write(tmp_path, text))]).imports_rankup is forked


HOROVOD = "import torch, horovod.torch as hvd\nprint('trains')\n"


@pytest.mark.parametrize(("text", "environ", "got"), [
    (HOROVOD, {"HOROVOD_SIZE": "1"}, "1"),  # a launcher of several ranks inside horovodrun -np 1
    (HOROVOD, {"HOROVOD_CONTROLLER": "gloo"}, "nothing"),  # a setting that says nothing about ranks
    ("'''The first line of a script.'''\nfrom horovod import torch as hvd", {}, "nothing"),
])
def test_horovod_script_is_refused_if_each_rank_would_train_alone(
    text: str, environ: dict[str, str], got: str, tmp_path: Path
) -> None:
    script = Script.find([str(write(tmp_path, text))])
    way_out = r"Start the script itself: horovodrun -np 2 --gloo python job\.py, or mpirun -np 2 python job\.py"
    with pytest.raises(UserError, match=f"job.py: HOROVOD_SIZE must be 2 .*, got {got}: .*{way_out}"):
        script.check(environ, world_size=2)
    script.check(environ, world_size=1)


@pytest.mark.parametrize(("package", "way_out"), [
    ("horovod", "HOROVOD_SIZE must be 2 .*: horovodrun -np 2"),
    ("mpi4py", r"OMPI_COMM_WORLD_SIZE must be 2 to import mpi4py, got nothing: .* mpirun -np 2 python job\.py\."),
])
def test_script_whose_ranks_need_another_launcher_is_refused(package: str, way_out: str, tmp_path: Path) -> None:
    """Also if a file of its own imports the package."""
    write(tmp_path, f"from {package} import MPI", "dist_util.py")
    for text in (f"import {package}.run", "import dist_util"):
        script = Script.find([str(write(tmp_path, text))])
        with pytest.raises(UserError, match=f"^job.py: {way_out}"):
            script.check({}, world_size=2)
        script.check({}, world_size=1)
    for variables in ({"PMIX_RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "2"}) if package == "mpi4py" else ():
        script.check(variables, world_size=2)


@pytest.mark.parametrize(("text", "environ"), [
    (HOROVOD, {"HOROVOD_SIZE": "2"}),
    (HOROVOD, {"HOROVOD_CONTROLLER": "mpi"}),
    ("try:\n    import horovod\nexcept ImportError:\n    horovod = None", {}),
    ("import horovod_tools", {}),
    ("from .horovod import tools", {}),
], ids=["horovodrun", "mpi", "optional", "another", "own"])
def test_script_that_may_work_without_horovod_is_started(text: str, environ: dict[str, str], tmp_path: Path) -> None:
    Script.find([str(write(tmp_path, text))]).check(environ, world_size=2)


@pytest.mark.parametrize(("text", "names"), [
    ("'''Text.'''\nimport os\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader, Dataset\nimport mine",
     ["torch.nn", "torch.utils.data.DataLoader", "torch.utils.data.Dataset"]),
    ("from . import mine\nfrom .torch import x\nfrom yaml import *", ["yaml"]),
    ("import os\nos.environ['X'] = '1'\nimport torch", []),
    ("import torch, torch\nimport pandas, requests, numpyro\nif True: pass\nimport yaml", ["torch"]),
    ("import x = 3", []),
])
def test_safe_imports_are_the_first_known_packages_of_a_script(text: str, names: list[str], tmp_path: Path) -> None:
    assert Script.find([str(write(tmp_path, text))]).safe_imports() == names


def test_users_own_package_is_imported_only_by_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a package is beside the script, or in the current folder, but not in an environment there."""
    script = write(tmp_path, "import torch, yaml, numpy, tqdm, fire", "elsewhere/job.py")
    for name in ("elsewhere/yaml.py", "tqdm/__init__.py", "env/lib/site-packages/fire/__init__.py"):
        write(tmp_path, "", name)
    monkeypatch.chdir(tmp_path)
    for folder in ("env/lib/site-packages", "."):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert Script.find([str(script)]).safe_imports() == ["torch", "numpy", "fire"]


def test_preloaded_modules_are_named_relative_to_the_scripts_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'import os\n__preload__ = [".loop", "numpy"]\nX = 3'
    plain, inside = write(tmp_path / "repo/plain", text), write(tmp_path / "repo/pack/part", text)
    for folder in (tmp_path, tmp_path / "repo/pack", tmp_path / "repo/pack/part"):
        write(folder, "", "__init__.py")
    assert Script.find([str(inside)]).own_imports() == (["pack.part.loop", "numpy"], str(tmp_path / "repo"))
    assert Script.find([str(plain)]).own_imports() == (["loop", "numpy"], str(plain.parent))
    for value in ("X()", "None"):
        file = write(plain.parent, f"__preload__ = {value}")
        assert Script.find([str(file)]).own_imports() == ([], str(plain.parent))
    monkeypatch.chdir(tmp_path)  # the folder is a package, but the module is not in it
    assert Script.find(["-m", "timeit"]).own_imports()[0] == []
