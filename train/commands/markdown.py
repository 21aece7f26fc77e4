"""Tables in Markdown, which read well in a terminal too."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table with these columns."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
