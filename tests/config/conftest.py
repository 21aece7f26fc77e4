"""A fixture that several tests of the settings share."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes tiny.yaml to an empty current directory, so that messages name it as the user would."""
    monkeypatch.chdir(tmp_path)

    def _write(text):
        data = text if isinstance(text, bytes) else text.encode()
        Path("tiny.yaml").write_bytes(data)
        return "tiny.yaml"

    return _write
