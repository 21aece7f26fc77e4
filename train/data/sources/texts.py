"""Labelled texts: lines of `label<TAB>text` in the files train, dev and test of one folder."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError

from ...config import Config

SAMPLE = Path(__file__).parents[2] / "samples" / "texts"
LAYOUT = (
    "A folder holds train.txt, and dev.txt or test.txt, with one label<TAB>text per line; names such as "
    "cnews.train.txt are found too. For CSV files set --dataset hf:FOLDER."
)
NAMES = {"train": ("train",), "dev": ("validation", "valid", "val", "dev"), "test": ("test",)}
NAMED = 5  # how many bad lines a message names; it only counts the others


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a data set: texts, or names of images, and their labels."""

    path: Path
    texts: tuple[str, ...]
    labels: tuple[str, ...]


def load_texts(config: Config) -> tuple[Part, Part, tuple[str, ...]]:
    """Return the training part, the part to evaluate on, and the classes. The texts are in `data_dir`, by default the
    sample that ships. If there is no part `eval_split`, use the other of dev and test. Raises UserError."""
    folder = SAMPLE if config.data_dir is None else Path(config.data_dir).expanduser()
    train_path = _file(folder, "train")
    other = "test" if config.eval_split == "dev" else "dev"
    evaluation_path = _file(folder, config.eval_split) or _file(folder, other)
    if train_path is None or evaluation_path is None:
        missing = "train" if train_path is None else "dev or test"
        raise UserError(f"{folder}: must hold texts to train and to evaluate on, got no {missing} file. {LAYOUT}")
    train = checked(_rows(train_path), train_path)
    classes = tuple(sorted({*train.labels}))
    if len(classes) < 2:
        raise UserError(f"{train_path}: must have at least two labels to tell apart, got only {classes[0]}.")
    return train, checked(_rows(evaluation_path), evaluation_path, classes), classes


def read_lines(path: str) -> tuple[str, ...]:
    """Read a file without labels, one text per line. Skip empty lines. Raises UserError, also if there is no text."""
    lines = tuple(text for line in _lines(Path(path)) if (text := line.strip()))
    if not lines:
        raise UserError(f"--input must be a file with one text a line, got {path}, which is empty.")
    return lines


def _file(folder: Path, part: str) -> Path | None:
    """Find the file of a part, such as train.txt or cnews.train.txt. Raises UserError if there are two."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".tsv") and path.name[0] != ".")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}). {LAYOUT}") from error
    found = [path for path in files if path.stem.split(".")[-1] in NAMES[part]]
    if len(found) > 1:
        raise UserError(f"{folder}: must hold one {part} file, got {found[0].name} and {found[1].name}. Remove one.")
    return found[0] if found else None


def _lines(path: Path) -> list[str]:
    try:
        # Split only at newlines: splitlines() also splits at other characters, which an article may contain
        return path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8, got other bytes at {error.start}.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            label, _, text = line.partition("\t")
            yield number, label.strip(), text.strip()


def checked(
    rows: Iterable[tuple[int, str, str]], path: Path, classes: Sequence[str] = (), *, unit: str = "line",
    of: str = "text",
) -> Part:
    """Return `rows` of the file `path`, each (number, label, text), as a Part. `classes`: the allowed labels; empty
    allows any. `unit`, `of`: what messages call a row and a text. Raises UserError for bad rows, and for no rows."""
    texts, labels, bad = list[str](), list[str](), list[str]()
    known = frozenset(classes)
    for number, label, text in rows:
        texts.append(text)
        labels.append(label)
        if not label or not text:
            bad.append(f"{unit} {number}: no {of if label else 'label'}")
        elif known and label not in known:
            bad.append(f"{unit} {number}: unknown label {label[:20]}")
    if not texts:
        raise UserError(f"{path}: holds no {unit}s. {LAYOUT}")
    if bad:
        listed = "; ".join(bad[:NAMED]) + ("; ..." if len(bad) > NAMED else "")
        raise UserError(f"{path}: {len(bad)} of {len(texts)} {unit}s are bad ({listed}). Correct or remove them.")
    return Part(path, tuple(texts), tuple(labels))
