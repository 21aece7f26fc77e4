"""The programs that pages list, for tests that run them."""

import re

from tests.rigs.jobs import ROOT


def workload(page: str) -> str:
    """Return the only listing of that page that is a workload."""
    listings = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / page).read_text())
    (found,) = [each for each in listings if "def build(" in each]
    return str(found)
