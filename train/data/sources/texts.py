"""Labelled texts: one `label<TAB>text` a line, in files train, dev and test of one folder."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError

from ...config import Config

SAMPLE = Path(__file__).parents[2] / "samples" / "texts"
LAYOUT = (
    "A folder holds train.txt and dev.txt or test.txt, one label<TAB>text a line; names such as "
    "cnews.train.txt are found too. CSV files are read by --dataset hf:FOLDER."
)
NAMES = {"train": ("train",), "dev": ("validation", "valid", "val", "dev"), "test": ("test",)}
NAMED = 5  # bad lines that a message names; the others are only counted


@dataclass(frozen=True, slots=True)
class TextSet:
    """Texts with the names of their classes."""

    path: Path
    texts: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """A training part, one to evaluate on, both whole, and their classes. `digest` is of the training part."""

    train: TextSet
    evaluation: TextSet
    classes: tuple[str, ...]
    name: str
    digest: str
    characters: tuple[str, ...]  # of the training part, the most frequent first


def load_texts(config: Config) -> Texts:
    """The training part in `data_dir` (default: the sample that ships) and the part that `eval_split` names, or else
    the other of dev and test. Raises UserError, naming file and lines."""
    folder = SAMPLE if config.data_dir is None else Path(config.data_dir).expanduser()
    train_path = _file(folder, "train")
    other = "test" if config.eval_split == "dev" else "dev"
    evaluation_path = _file(folder, config.eval_split) or _file(folder, other)
    if train_path is None or evaluation_path is None:
        missing = "train" if train_path is None else "dev or test"
        raise UserError(f"{folder}: must hold texts to train and to evaluate on, got no file {missing}. {LAYOUT}")
    train = checked(_rows(train_path), train_path)
    classes = tuple(sorted({*train.labels}))
    if len(classes) < 2:
        raise UserError(f"{train_path}: must have at least two labels to tell apart, got only {classes[0]}.")
    evaluation = checked(_rows(evaluation_path), evaluation_path, classes)
    name = "texts" if config.data_dir is None else folder.resolve().name
    return texts_of(train, evaluation, classes, name)


def texts_of(train: TextSet, evaluation: TextSet, classes: tuple[str, ...], name: str) -> Texts:
    """Both parts, with what is counted of the first."""
    counts = Counter(character for text in train.texts for character in text)
    content = repr((train.texts, [*train.labels], classes)).encode("utf-8", "surrogatepass")
    characters = tuple(sorted(counts, key=lambda character: (-counts[character], character)))
    return Texts(train, evaluation, classes, name, hashlib.sha256(content).hexdigest()[:8], characters)


def read_lines(path: str) -> tuple[str, ...]:
    """The texts of a file without labels, one a line; empty lines are skipped. Raises UserError, also for no text."""
    lines = tuple(text for line in _lines(Path(path)) if (text := line.strip()))
    if not lines:
        raise UserError(f"--input must be a file with one text a line, got {path}, which is empty.")
    return lines


def _file(folder: Path, part: str) -> Path | None:
    """The file of a part: train.txt, or with a word in front as in cnews.train.txt. Raises UserError for two."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".tsv") and path.name[0] != ".")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}). {LAYOUT}") from error
    found = [path for path in files if path.stem.split(".")[-1] in NAMES[part]]
    if len(found) > 1:
        raise UserError(f"{folder}: must hold one file {part}, got {found[0].name} and {found[1].name}. Remove one.")
    return found[0] if found else None


def _lines(path: Path) -> list[str]:
    try:
        # Split at newlines alone: an article may hold the other characters at which splitlines() splits
        return path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8, got other bytes at {error.start}.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def _rows(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            label, _, text = line.partition("\t")
            yield number, label, text


def checked(
    rows: Iterable[tuple[int, str, str]], path: Path, classes: Sequence[str] = (), *, unit: str = "line"
) -> TextSet:
    """The rows of `path`: the number, the label and the text of each. `classes`: the labels that there may be; empty
    for any. Raises UserError for bad rows, and for none."""
    texts, labels, bad = list[str](), list[str](), list[str]()
    known = frozenset(classes)
    for number, label, text in rows:
        texts.append(text.strip())
        labels.append(label.strip())
        if not labels[-1] or not texts[-1]:
            bad.append(f"{unit} {number}: no {'text' if labels[-1] else 'label'}")
        elif known and labels[-1] not in known:
            bad.append(f"{unit} {number}: unknown label {labels[-1][:20]}")
    if not texts:
        raise UserError(f"{path}: holds no {unit}s. {LAYOUT}")
    if bad:
        listed = "; ".join(bad[:NAMED]) + ("; ..." if len(bad) > NAMED else "")
        raise UserError(f"{path}: {len(bad)} of {len(texts)} {unit}s are bad ({listed}). Correct or remove them.")
    return TextSet(path, tuple(texts), tuple(labels))
