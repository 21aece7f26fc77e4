"""Scripts as people have them, and what is left of each as a workload: the pairs in tests/rigs/migrate/.

`python -m tests.rigs.migrations` writes their diffs into the pages that show them.
"""

import difflib
import re

from tests.rigs.jobs import ROOT

FOLDER = ROOT / "tests" / "rigs" / "migrate"
NAMES = ("one_gpu", "data_parallel", "ddp", "lightning", "accelerate", "horovod")
DIFF = re.compile(r"^```diff\n--- before_(\w+)\.py\n.*?^```\n", re.MULTILINE | re.DOTALL)


def diff(name: str) -> str:
    """The fenced block of a pair, as Markdown."""
    files = [f"{side}_{name}.py" for side in ("before", "after")]
    before, after = ((FOLDER / file).read_text().splitlines(keepends=True) for file in files)
    return "```diff\n" + "".join(difflib.unified_diff(before, after, *files, n=1)) + "```\n"


def with_diffs(page: str) -> str:
    """The text of a page with each of its diffs as it is now. A new one needs its first two lines and the last."""
    return DIFF.sub(lambda found: diff(found[1]), page)


if __name__ == "__main__":
    for path in sorted((ROOT / "train").glob("migrate*.md")):
        path.write_text(with_diffs(path.read_text()))
