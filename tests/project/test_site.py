"""The site builds from the pages without a broken link, and its notebook does what its page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.project.test_docs import tracked
from tests.rigs.jobs import ROOT

NOTEBOOK = ROOT / "train" / "examples" / "kill_a_rank.ipynb"


def site(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the checkout `root` with the tools of this environment."""
    env = {**os.environ, "VENV": sys.prefix}
    return subprocess.run([root / "site/site.sh"], cwd=root, env=env, capture_output=True, text=True)


def test_site_shows_every_page_and_refuses_a_broken_link(tmp_path: Path) -> None:
    # In a copy, because a build writes to build/, and the second build needs a broken page
    for file in tracked():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    built = site(tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.glob("*/**/*.md") if "build" not in page.parts}
    for page in pages - {".github/pull_request_template.md"}:
        shown = page.replace("README.md", "index.html").replace(".md", "/index.html")
        assert (tmp_path / "build/site" / shown).exists(), page
    first = (tmp_path / "build/site/index.html").read_text()
    assert not re.findall(r"(?:src|href)=\"https://(?:fonts|unpkg|cdn)", first), "the site asks other servers"
    (tmp_path / "rankup/nodes.md").write_text("# Nodes\n\n[A heading](loop.md#that-is-not-there)\n")
    broken = site(tmp_path)
    assert broken.returncode != 0
    assert "does not contain an anchor '#that-is-not-there'" in broken.stderr


def test_notebook_compares_the_weights_of_a_run_with_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONWARNINGS")  # the kernel itself warns when it ends
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = [digests(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ran = [digests(cell) for cell in notebook.cells]
    assert [len(each) for each in ran] == [len(each) for each in shown], "the notebook has outputs of another version"
    quiet, killed = next(each for each in ran if each)
    assert quiet == killed
    assert any("no finished step was lost" in str(cell.get("outputs")) for cell in notebook.cells)


def digests(cell: Any) -> list[str]:
    """Return the digests that a cell printed."""
    return re.findall(r"'([0-9a-f]{16})'", str(cell.get("outputs", "")))
