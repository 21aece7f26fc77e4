"""A file that is written atomically has its old content or its new one, whatever happens."""

import threading
from pathlib import Path

import pytest

from rankup.places.files import staged, write_atomically


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def write_half() -> None:
        with staged(path) as staging:
            staging.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_reader_never_sees_half_of_what_two_writers_write(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    contents = {letter * 100_000 for letter in "ab"}
    ended = threading.Event()

    def write(content: str) -> None:
        while not ended.is_set():
            write_atomically(path, content)

    write_atomically(path, "a" * 100_000)
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    try:
        assert {path.read_text() for _ in range(200)} <= contents
    finally:
        ended.set()
        for writer in writers:
            writer.join()
    assert names(path.parent) == ["file"]
