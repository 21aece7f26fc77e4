"""Texts: files and mistakes in them, batches of texts of similar length, and a run from training to prediction."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.config import Config
from train.data.samples import EpochSampler
from train.data.sources.texts import SAMPLE, load_texts
from train.workloads.classification import MOST, class_scores, macro_f1, report
from train.workloads.text import CharacterTokenizer, TextEncoder, TextSamples, build

GOOD = "food\ta warm soup\nsports\ta late goal\nfood\t热汤\n"


def texts_in(folder: Path, **files: str | bytes) -> Config:
    """Write files such as `train` and `dev`, or `train_tsv` for train.tsv, to a folder. Return settings for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        stem, _, ending = name.partition("_")
        path = folder / f"{stem}.{ending or 'txt'}"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Config(workload="text", data_dir=str(folder))


# Files ----------------------------------------------------------------------------------------------------------


def test_shipped_texts_have_no_duplicates() -> None:
    names = sorted(path.name for path in SAMPLE.iterdir())
    assert names == ["dev.txt", "test.txt", "train.txt"]
    lines = [line for name in names for line in (SAMPLE / name).read_text(encoding="utf-8").splitlines()]
    assert len(set(lines)) == len(lines) == 1200  # no text is in two parts
    assert sum(not line.isascii() for line in lines) > 400


def test_texts_of_a_folder_have_the_labels_of_the_training_part(tmp_path: Path) -> None:
    train, evaluation, classes = load_texts(texts_in(tmp_path, train=GOOD, dev="sports\ta\tgoal\n"))
    assert classes == ("food", "sports")
    assert train.texts == ("a warm soup", "a late goal", "热汤")
    assert train.labels == ("food", "sports", "food")
    assert (evaluation.texts, evaluation.labels) == (("a\tgoal",), ("sports",))
    numbers = CharacterTokenizer(train.texts, max_seq_len=11).number
    assert [*numbers.items()][:2] == [("a", 3), (" ", 4)]  # there are five "a" and four spaces


def test_texts_of_windows_files_are_the_same(tmp_path: Path) -> None:
    windows = b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()
    plain = build(texts_in(tmp_path / "a" / "texts", train=GOOD, dev=GOOD))
    marked = build(texts_in(tmp_path / "b" / "texts", train=windows, dev=GOOD))
    assert plain.data_name.startswith("texts-")
    assert marked.data_name == plain.data_name  # has a digest of the texts and labels


def test_texts_in_the_layout_of_cnews_are_found(tmp_path: Path) -> None:
    (tmp_path / "._cnews.train.txt").write_bytes(b"\0\5\x16")  # macOS writes such files
    for name, text in (("train", GOOD), ("val", "food\tval\n"), ("test", "food\ttest\n"), ("vocab", "a\n")):
        (tmp_path / f"cnews.{name}.txt").write_text(text, encoding="utf-8")
    for split, text in (("dev", "val"), ("test", "test")):
        assert load_texts(Config(workload="text", data_dir=str(tmp_path), eval_split=split))[1].texts == (text,)


BAD = GOOD * 10 + "no tab at all\n\tno label\nfood\t\n"


def test_bad_lines_are_counted_and_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=(
        r"train.txt: 3 of 33 lines are bad \(line 31: no text; line 32: no label; line 33: no text\)"
    )):
        load_texts(texts_in(tmp_path, train=BAD, dev=GOOD))
    with pytest.raises(UserError, match=r"train.txt: must be UTF-8, got other bytes at 53\."):
        load_texts(texts_in(tmp_path, train=GOOD.encode() + b"food\t\xff\n", dev=GOOD))
    with pytest.raises(UserError, match=r"dev.txt: 1 of 4 lines are bad \(line 4: unknown label travel\)"):
        load_texts(texts_in(tmp_path, train=GOOD, dev=GOOD + "travel\tby sea\n"))


@pytest.mark.parametrize(("files", "message"), [
    ({"dev": GOOD}, "got no train file"), ({"train": GOOD}, "got no dev or test file"),
    ({"train": "", "dev": GOOD}, "train.txt: holds no lines"),
    ({"train": "food\ta\n", "dev": GOOD}, "at least two labels"),
    ({"train": GOOD, "train_tsv": GOOD, "dev": GOOD}, "must hold one train file, got train.tsv and train.txt"),
])
def test_folder_without_valid_texts_gives_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_texts(texts_in(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_missing_folder_of_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/none: cannot be read"):
        load_texts(Config(workload="text", data_dir=str(tmp_path / "none")))


# Batches --------------------------------------------------------------------------------------------------------

LENGTHS = torch.randint(1, 100, (1003,), generator=torch.Generator().manual_seed(1))


def ordered(pool: int = 10) -> EpochSampler:
    return EpochSampler(1003, 24, 5, lengths=LENGTHS, pool=pool)


@pytest.mark.parametrize("pool", [1, 7, 10, 1000])
def test_order_by_length_takes_each_sample_once(pool: int) -> None:
    order = ordered(pool=pool)
    for epoch in (0, 1):
        assert sorted(order.epoch(epoch).tolist()) == list(range(1003))
    assert not torch.equal(order.epoch(0), order.epoch(1))
    plain = EpochSampler(1003, 24, 5)
    # Lengths do not decide which samples are left out
    assert set(order.epoch(3)[-19:].tolist()) == set(plain.epoch(3)[-19:].tolist())


def test_order_by_length_saves_padding_and_stays_random() -> None:
    def padded(order: EpochSampler) -> int:
        return sum(int(LENGTHS[indices].max()) * len(indices) for indices in order)

    assert padded(ordered()) < 0.75 * padded(EpochSampler(1003, 24, 5))
    longest = [int(LENGTHS[indices].max()) for indices in ordered()]
    assert longest != sorted(longest)


def test_batch_is_as_long_as_its_longest_text() -> None:
    samples = TextSamples(["abc", "", "ab" * 50], [0, 1, 2], CharacterTokenizer("ab", max_seq_len=11))
    tokens, labels = samples.batch(torch.tensor([1, 0]), None)
    assert tokens.tolist() == [[2, 0, 0, 0], [2, 3, 4, 1]]
    assert labels.tolist() == [1, 0]
    assert samples.batch(torch.tensor([2]), 0)[0].shape == (1, 11)


def test_encoder_ignores_padding() -> None:
    torch.manual_seed(0)
    model = TextEncoder(vocabulary=9, num_classes=3, dropout=0.0)
    tokens = torch.randint(1, 9, (4, 6))
    wider = torch.nn.functional.pad(tokens, (0, 5))
    torch.testing.assert_close(model(wider), model(tokens), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens[:, :3]), model(tokens))


def test_class_scores_and_macro_f1_follow_their_definitions() -> None:
    # Computed by hand. Class 2 is never predicted, and class 3 is neither predicted nor true
    confusion = torch.tensor([[3, 1, 0, 0], [1, 4, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]])
    rows = class_scores(confusion, ("a", "b", "c", "d"))
    assert [row["samples"] for row in rows] == [4, 5, 2, 0]
    assert [row["precision"] for row in rows] == pytest.approx([3 / 4, 4 / 7, 0, 0])
    assert [row["recall"] for row in rows] == pytest.approx([3 / 4, 4 / 5, 0, 0])
    assert [row["f1"] for row in rows] == pytest.approx([3 / 4, 8 / 12, 0, 0])
    assert macro_f1(confusion) == pytest.approx((3 / 4 + 8 / 12 + 0) / 3)
    # Predicted but never true counts as 0
    assert macro_f1(torch.tensor([[3, 1], [0, 0]])) == pytest.approx((6 / 7 + 0) / 2)


def test_table_of_scores_has_all_classes_or_is_omitted() -> None:
    names = tuple(f"类 {number}" for number in range(MOST + 1))
    sums = {"confusion": torch.eye(MOST, dtype=torch.int64)}
    text, details = report(sums, names[:MOST])
    assert [text.count(name + " ") for name in names] == [2] * MOST + [0]
    assert [row["class"] for row in details["classes"]] == [*names[:MOST]]
    # Too many classes to read, a matrix of another number of classes, no matrix
    for found in ({"confusion": torch.eye(MOST + 1, dtype=torch.int64)}, sums, {"correct": torch.ones(2)}):
        assert report(found, names) == ("", {})


# Runs -----------------------------------------------------------------------------------------------------------

LINE = ("--workload", "text", "--tensorboard=false", "--batch-size", "60")


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    forks.ends("train", *LINE, "--epochs", "4", "--name", "run", "--run-dir", folder)
    return folder / "run"


def test_one_and_two_ranks_learn_the_texts_equally(forks: Forks, trained: Path, tmp_path: Path) -> None:
    output = forks.ends("train", *LINE, "--epochs", "4", "--name", "two", "--run-dir", tmp_path, world_size=2)
    assert "macro_f1" in output
    alone, two = result(trained)["metrics"], result(tmp_path / "two")["metrics"]
    assert alone["macro_f1"] > 0.6
    assert two["loss"] == pytest.approx(alone["loss"], rel=1e-3)


def test_text_evaluation_is_exact_on_any_number_of_ranks(forks: Forks, trained: Path) -> None:
    outcomes = []
    for world_size in (1, 3):
        output = forks.ends("evaluate", "--name", "run", "--run-dir", trained.parent, "--eval-split", "test",
                            "--eval-batch-size", "16", "--limit-eval", "101", world_size=world_size)
        assert "confusion matrix: true class down" in output
        outcome = json.loads((trained / "evaluation.json").read_text())
        outcomes.append({name: outcome[name] for name in ("metrics", "count", "classes", "confusion")})
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["count"] == sum(sum(row) for row in outcomes[0]["confusion"]) == 101
    right = sum(row[number] for number, row in enumerate(outcomes[0]["confusion"]))
    assert outcomes[0]["metrics"]["accuracy"] == pytest.approx(right / 101)
    scores = [row["f1"] for row in outcomes[0]["classes"]]
    assert outcomes[0]["metrics"]["macro_f1"] == pytest.approx(sum(scores) / 5)


def predicted(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["input"], row["label"]) for row in csv.DictReader(file)]


def test_texts_of_a_file_are_predicted(forks: Forks, trained: Path, tmp_path: Path) -> None:
    lines = (SAMPLE / "test.txt").read_text(encoding="utf-8").splitlines()[:40]
    texts = [line.partition("\t")[2] for line in lines]
    (tmp_path / "in.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    where = ("--name", "run", "--run-dir", trained.parent)
    forks.ends("predict", *where, "--input", tmp_path / "in.txt", "--output", tmp_path / "file.csv", world_size=2)
    rows = predicted(tmp_path / "file.csv")
    assert [text for text, _ in rows] == texts
    right = sum(label == line.partition("\t")[0] for (_, label), line in zip(rows, lines, strict=True))
    assert right > 20
    (tmp_path / "empty.txt").touch()
    output = forks.ends("predict", *where, "--input", tmp_path / "empty.txt", "--output", tmp_path / "no.csv", code=2)
    assert f"got {tmp_path}/empty.txt, which is empty." in output
