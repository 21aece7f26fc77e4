"""Prints a list of all packages that the lock files name, as CycloneDX 1.5 JSON: python3 docker/host/sbom.py"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """The same lock files give the same bytes: no time, no serial number."""
    version = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert version
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "docker").glob("requirements*.lock")):
        for name, pinned in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", path.read_text()):
            found.setdefault((re.sub(r"[-_.]+", "-", name).lower(), pinned), []).append(path.name)
    components = [
        {"type": "library", "name": name, "version": pinned, "purl": f"pkg:pypi/{name}@{pinned.replace('+', '%2B')}",
         "bom-ref": f"{name}@{pinned}", "properties": [{"name": "lock", "value": lock} for lock in locks]}
        for (name, pinned), locks in sorted(found.items())
    ]
    metadata = {"component": {"type": "application", "name": "rankup", "version": version[1], "bom-ref": "rankup"}}
    lines = ",\n".join(json.dumps(each) for each in components)
    head = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": metadata})
    print(f'{head[:-1]}, "components": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
