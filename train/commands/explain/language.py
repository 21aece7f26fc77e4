"""The two languages in which explain answers, and all that it says beside the texts of the faults. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]


def language_of(environ: Mapping[str, str]) -> Language:
    """Chinese where the user's locale is; the first of these variables that is not empty decides, as in POSIX."""
    locale = next(filter(None, (environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


@dataclass(frozen=True, slots=True)
class Sentences:
    """What a report is made of, in one language; the texts of the faults are beside it, in TOML."""

    nothing_wrong: str
    root: str
    time: str
    first: str
    seen: str
    traceback: str
    why: str
    remedy: str
    unsure: str
    also_seen: str
    suffered: str
    harmless: str
    item: str  # of a list
    more: str
    place: str
    times: str
    # Behind a title: who has the fault
    behind: str
    rank: str
    ranks: str
    host: str
    rank_on_host: str
    ranks_on_host: str
    names_host: str  # a title that has this says the host itself
    comma: str  # between ranks, and between hosts
    and_so_on: str
    # An exception that is not in the table
    unknown_title: str
    unknown_why: str
    unknown_remedy: str
    # What torchrun's summary alone says of a rank
    summary_title: str
    summary_why: str
    summary_remedy: str


ENGLISH = Sentences(
    nothing_wrong="nothing wrong was found in these lines.",
    root="{title}{who} ({place})",
    time="  when  {time}",
    first="  first {who}, {time}",
    seen="  seen  {text}",
    traceback="        {text}",
    why="  why   {text}",
    remedy="  fix   {text}",
    unsure="  note  these logs do not have times in all lines: another of the causes below may have come first.",
    also_seen="also seen:",
    suffered="what others suffered from it:",
    harmless="harmless: {title} ({place}{times}): {why}",
    item="  {title}{who} ({place}{times}): {text}",
    more="  and {count} more",
    place="line {line}",
    times=", {count} times",
    behind=", {who}",
    rank="rank {ranks}",
    ranks="ranks {ranks}",
    host="on {hosts}",
    rank_on_host="rank {ranks} on {hosts}",
    ranks_on_host="ranks {ranks} on {hosts}",
    names_host="on {host}",
    comma=", ",
    and_so_on=", ...",
    unknown_title="an error that is not known here",
    unknown_why="this is the last line of its traceback, or the last line that looks like an error.",
    unknown_remedy="It is not in the table of known faults. The last lines of its traceback say where it happened.",
    summary_title="torchrun saw a rank fail before all others",
    summary_why="what that rank printed is not in these logs, or it printed nothing.",
    summary_remedy="torchrun --log-dir DIR --redirects 3 keeps what each rank prints, for the next time. "
                   "`@record` on the main function adds the traceback to torchrun's summary.",
)
CHINESE = Sentences(
    nothing_wrong="这些日志里没有发现问题。",
    root="{title}{who}（{place}）",
    time="  时间  {time}",
    first="  最先  {who}，{time}",
    seen="  日志  {text}",
    traceback="        {text}",
    why="  原因  {text}",
    remedy="  办法  {text}",
    unsure="  注意  这些日志不是每一行都带时间，最先出错的也可能是下面列出的其他原因。",
    also_seen="另外还发现：",
    suffered="由此引发的其他报错：",
    harmless="可以忽略：{title}（{place}{times}）：{why}",
    item="  {title}{who}（{place}{times}）：{text}",
    more="  还有 {count} 条",
    place="第 {line} 行",
    times="，共 {count} 次",
    behind="，{who}",
    rank="rank {ranks}",
    ranks="rank {ranks}",
    host="节点 {hosts}",
    rank_on_host="{hosts} 上的 rank {ranks}",
    ranks_on_host="{hosts} 上的 rank {ranks}",
    names_host="{host} 上",
    comma="、",
    and_so_on=" 等",
    unknown_title="未收录的错误",
    unknown_why="这是报错堆栈的最后一行，或者最后一行看起来像报错的内容。",
    unknown_remedy="已知故障表里没有它。出错的位置见堆栈的最后几行。",
    summary_title="据 torchrun 的汇总，这个 rank 最先失败",
    summary_why="这些日志里没有那个 rank 的输出，或者它什么都没有打印。",
    summary_remedy="下次用 torchrun --log-dir DIR --redirects 3 启动，可以保存每个 rank 的输出。"
                   "给主函数加上 `@record`，torchrun 的汇总里就会有报错堆栈。",
)
SENTENCES: dict[Language, Sentences] = {"en": ENGLISH, "zh": CHINESE}
