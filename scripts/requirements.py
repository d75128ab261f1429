"""Write docs/how-to/deploy/requirements.txt: every package that a node needs, in one version, by its digest.

    python scripts/requirements.py

Versions are those of constraints.txt, and the newest of what it does not name; the package
index states the digests. Run it with the Python and on the system that the image has: digests
are of wheels for one platform.
"""

import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs/how-to/deploy/requirements.txt"


def wanted() -> list[str]:
    """Return what the package and its extra `net` require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["net"]]


def resolved(requirements: Sequence[str]) -> dict[str, Any]:
    """Return pip's report of what it would install."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
             "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt", "--report", report, *requirements],
            check=True,
        )  # fmt: skip
        return json.loads(report.read_text("utf-8"))


def text(report: Mapping[str, Any], made_on: str) -> str:
    """Return the file.

    Args:
        report: of pip.
        made_on: Python and system in words.

    Raises:
        SystemExit: when the index states no digest of a package.
    """
    lines = [
        f"# made by scripts/requirements.py for {made_on}; do not edit. For another system, make it there.",
        "# torch is the build for CPUs, which has an index of its own: see Containerfile.",
    ]
    for one in sorted(report["install"], key=lambda one: one["metadata"]["name"].lower()):
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            sys.exit(f"the index states no SHA-256 of {name} {version}")
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the file."""
    made_on = f"Python {sys.version_info.major}.{sys.version_info.minor}, {platform.system()} {platform.machine()}"
    FILE.write_text(text(resolved(wanted()), made_on), encoding="utf-8")


if __name__ == "__main__":
    main()
