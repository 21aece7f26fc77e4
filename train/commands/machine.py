"""What kind of machine this is. No torch here."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name, such as "Intel(R) Xeon(R) Processor @ 2.50GHz"; at least its architecture."""
    path = Path("/proc/cpuinfo")  # Linux only; platform.processor() is empty there
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
