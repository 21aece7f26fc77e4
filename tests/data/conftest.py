"""Fixtures that several tests of the data sets share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.photographs import write_photographs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 12 photographs for training and 6 for evaluation, in folders of two classes."""
    root = tmp_path_factory.mktemp("photographs")
    write_photographs(root / "train", 12, width=100, height=75)
    write_photographs(root / "val", 6, width=100, height=75, first=100)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of `datasets`, outside the home of the user who runs the tests."""
    import datasets

    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hf_home")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        patch.setenv("HF_HOME", str(home))
        yield home
