"""Launch files of three other projects stay as they are, until a change of a template changes them on purpose."""

import shutil
from pathlib import Path

import pytest

from rankup.cli import COMMANDS
from rankup.files.add import rendered_again

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_files_are_what_rankup_add_writes_today(name: str, tmp_path: Path) -> None:
    """Each file names the command that made it. To change one, write what this test prints as the new text into it."""
    (tmp_path / "net").mkdir()
    for script in ("train.py", "net/train.py", "net/__init__.py"):
        (tmp_path / script).write_text("import torch.distributed\n")
    (tmp_path / "requirements.txt").write_text("rankup\n")
    shutil.copytree(GOLDEN / name, tmp_path / "k8s")
    made = {path.name: text for path, text in rendered_again(tmp_path, COMMANDS["add"].parse)}
    assert made == {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
