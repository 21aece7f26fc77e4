"""What several tests of the settings need."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write tiny.yaml in an empty current directory, so that messages name it as the user would."""
    monkeypatch.chdir(tmp_path)

    def _write(text):
        data = text if isinstance(text, bytes) else text.encode()
        Path("tiny.yaml").write_bytes(data)
        return "tiny.yaml"

    return _write
