"""explain in two languages: every text is there in both, and the language is that of the user's locale, or --lang."""

import json
import re
import string
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from train.commands.explain.diagnosis import diagnose
from train.commands.explain.explain import advice, diagnose_files
from train.commands.explain.faults import Fault, known_faults, language_of, table, texts_in
from train.commands.explain.report import format_report
from train.main import main

LOGS = Path(__file__).parent / "logs"
PORT_TAKEN = LOGS / "port-taken.log"
IS_CHINESE = re.compile(r"[\u4e00-\u9fff]")
# ASCII punctuation beside a Chinese character is a slip of the keyboard
HALF_WIDTH = re.compile(r"[\u4e00-\u9fff][,;:!?()]|[,;!?()][\u4e00-\u9fff]")
# A word of one script beside one of the other has a space between, as in the pages
NO_SPACE = re.compile(r"[\u4e00-\u9fff][A-Za-z0-9`{]|[A-Za-z0-9`}][\u4e00-\u9fff]")


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def numbers_and_flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+|\b[A-Z][A-Z_]{3,}\b|\b\d+\b", text))


def test_chinese_table_has_the_same_faults_in_the_same_order() -> None:
    assert list(texts_in("zh")) == [fault.name for fault in known_faults()]


@pytest.mark.parametrize("fault", known_faults(), ids=lambda fault: fault.name)
def test_fault_says_the_same_in_both_languages(fault: Fault) -> None:
    chinese = texts_in("zh")[fault.name]
    for field in ("title", "why", "remedy"):
        english, translated = getattr(fault, field), getattr(chinese, field)
        assert bool(english) == bool(translated), field
        assert placeholders(english) == placeholders(translated), field
        assert numbers_and_flags(english) <= numbers_and_flags(translated), field
        assert not HALF_WIDTH.search(translated), translated
        assert not NO_SPACE.search(translated), translated
        # A reason may be the word of somebody else, and a title a name
        assert not translated or IS_CHINESE.search(translated), field


def test_sentences_are_the_same_in_both_languages() -> None:
    assert list(table("en")["sentences"]) == list(table("zh")["sentences"])


@pytest.mark.parametrize("name", table("en")["sentences"])
def test_sentence_has_the_same_placeholders_in_both_languages(name: str) -> None:
    english, chinese = table("en")["sentences"][name], table("zh")["sentences"][name]
    assert placeholders(english) == placeholders(chinese)
    assert numbers_and_flags(english) == numbers_and_flags(chinese)
    assert not HALF_WIDTH.search(chinese)


# The greatest part of a report that a reader of Chinese sees: no English is left but what the log itself says
@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_report_in_chinese_finds_the_same_and_says_it_in_chinese(log: Path) -> None:
    english, chinese = diagnose_files([log]), diagnose_files([log], language="zh")
    told = ("title", "why", "remedy")
    untold = [[{**asdict(d), **dict.fromkeys(told)} for d in found] for found in (english, chinese)]
    assert untold[0] == untold[1]
    lines = format_report(chinese, "zh").splitlines()
    assert len(lines) == len(format_report(english).splitlines())
    quoted = {indent + text for d in chinese for text in (*d.traceback, d.seen) for indent in ("  日志  ", " " * 8)}
    assert all(IS_CHINESE.search(line) for line in lines if line not in quoted), lines


def test_report_in_chinese_names_rank_and_host_once() -> None:
    lost = "lost a peer at step 512: suspected: rank 2 on node1 (its process has ended) (exit code 171)"
    oom = [f"[node{rank} r{rank}/3] CUDA out of memory" for rank in range(3)]

    def first_line(lines: list[str]) -> str:
        log = [f"{line}\n" for line in lines]
        return format_report(diagnose(log, "zh"), "zh").splitlines()[0]

    assert first_line([f"[node0 r0/3] {lost}"]) == "node1 上的 rank 2 失联了（第 1 行）"
    assert first_line(oom) == "GPU 显存不足，node0、node1、node2 上的 rank 0-2（第 1 行）"
    assert first_line([oom[0], oom[2]]) == "GPU 显存不足，node0、node2 上的 rank 0、2（第 1 行）"
    assert first_line(oom[:1]) == "GPU 显存不足，node0 上的 rank 0（第 1 行）"
    assert first_line(["node1  | CUDA out of memory"]) == "GPU 显存不足，节点 node1（第 1 行）"


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "", "LC_MESSAGES": ""}, "zh"),
        ({"LC_ALL": "de_DE.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_language_is_that_of_the_locale(environ: dict[str, str], language: str) -> None:
    assert language_of(environ) == language


def test_explain_answers_in_the_language_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*words: str) -> str:
        assert main(["explain", str(PORT_TAKEN), *words]) == 20
        return capsys.readouterr().out

    assert answer().startswith("the master's port is taken")
    assert answer("--lang", "zh").startswith("MASTER_PORT 端口被占用")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert answer().startswith("MASTER_PORT 端口被占用")
    assert answer("--lang", "en").startswith("the master's port is taken")
    # A program reads names, and does not depend on whoever starts it
    (first, *_), (chinese, *_) = json.loads(answer("--json")), json.loads(answer("--json", "--lang", "zh"))
    assert first["name"] == chinese["name"] == "port-in-use"
    assert first["title"] == "the master's port is taken"
    assert chinese["title"] == "MASTER_PORT 端口被占用"
    assert first.keys() == chinese.keys()


def test_explain_prints_where_the_locale_has_no_chinese_letters() -> None:
    command = [sys.executable, "-m", "train.main", "explain", str(PORT_TAKEN), "--lang", "zh"]
    env = environment({"PYTHONIOENCODING": "ascii"})
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (20, "")
    assert "EADDRINUSE" in done.stdout


def test_chinese_page_shows_what_explain_prints(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(
        "1: Traceback (most recent call last):\n"
        "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "0: RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:19612.\n"
        "srun: error: node1: task 1: Exited with exit code 1\n"
    )
    shown = format_report(diagnose_files([log], language="zh"), "zh")
    page = (ROOT / "train" / "migrate.zh.md").read_text(encoding="utf-8")
    assert f"$ python -m train.main explain slurm-7.out --lang zh\n{shown}\n```" in page


def test_traceback_of_our_own_gets_its_advice_in_english() -> None:
    """It goes into logs, which explain reads."""
    assert advice("Traceback (most recent call last):\nKeyError: 'RANK'").startswith("this is: RANK is not set.")
