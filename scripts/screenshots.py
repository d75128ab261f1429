"""Write the stored report of the bundled study again, with its pictures for README.md; needs Debian's chromium.

coterie run --out runs && python scripts/screenshots.py runs/rotated-digits && python scripts/readme.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from coterie.report import write_report

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "docs/reference/runs/rotated-digits"
IMAGES = ROOT / "docs/images"
VIEWS = {"overview": 1760, "reads": 1180}  # height of the picture, in pixels


def main() -> int:
    """Copy what a run left, then open each view once."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if len(sys.argv) != 2 or browser is None:
        print(__doc__, file=sys.stderr)
        return 2
    STORED.mkdir(parents=True, exist_ok=True)
    report = write_report(sys.argv[1], STORED / "report.html")
    shutil.copy(Path(sys.argv[1]) / "summary.json", STORED)
    for view, height in VIEWS.items():
        picture = IMAGES / f"report-{view}.png"
        with tempfile.TemporaryDirectory() as profile:
            options = [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
            ]
            options += [f"--window-size=1200,{height}", "--virtual-time-budget=8000", f"--screenshot={picture}"]
            subprocess.run([browser, *options, f"{report.as_uri()}#{view}"], check=True, capture_output=True)
        print(picture.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
