"""Print a list of packages as CycloneDX 1.5 JSON: the packages in the lock files, or those in an image.

python3 docker/host/sbom.py [IMAGE]      with IMAGE: its Debian packages and its Python packages
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[2]
# Print a line for each package: pypi, name, version; or deb, name, version, debian or ubuntu, architecture
IN_IMAGE = r"""
. /etc/os-release
dpkg-query --show --showformat "deb \${Package} \${Version} $ID \${Architecture}\n"
python3 -c 'from importlib.metadata import distributions as all
for each in all(): # dpkg has listed what Debian installs into dist-packages in /usr/lib
    if not str(each.locate_file("")).startswith("/usr/lib/python3/"): print("pypi", each.name, each.version)'
"""


def locked() -> list[dict[str, Any]]:
    """Return the packages in the lock files. The same files give the same list."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "docker").glob("requirements*.lock")):
        for name, pinned in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", path.read_text()):
            found.setdefault((normal(name), pinned), []).append(path.name)
    return [{**python(name, version), "properties": [{"name": "lock", "value": lock} for lock in locks]}
            for (name, version), locks in sorted(found.items())]


def inside(image: str) -> list[dict[str, Any]]:
    command = ["docker", "run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", IN_IMAGE]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [python(normal(name), more[0]) if kind == "pypi" else debian(name, *more)
            for kind, name, *more in map(str.split, sorted(set(lines)))]


def python(name: str, version: str) -> dict[str, Any]:
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{quote(version)}",
            "bom-ref": f"{name}@{version}"}


def debian(name: str, version: str, system: str, architecture: str) -> dict[str, Any]:
    purl = f"pkg:deb/{system}/{quote(name)}@{quote(version)}?arch={architecture}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(image: str = "") -> None:
    """Print the list without a time or serial number, so that the same packages give the same text."""
    version = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert version
    kind, name = ("container", image) if image else ("application", "rankup")
    metadata = {"component": {"type": kind, "name": name, "version": version[1], "bom-ref": name}}
    lines = ",\n".join(json.dumps(each) for each in (inside(image) if image else locked()))
    head = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": metadata})
    print(f'{head[:-1]}, "components": [\n{lines}\n]}}')


if __name__ == "__main__":
    main(*sys.argv[1:])
