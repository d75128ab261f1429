"""Write the pictures of the bundled study's stored report for README.md; needs Debian's chromium.

    coterie run && python scripts/screenshots.py runs/rotated-digits && python scripts/readme.py
    python scripts/screenshots.py        (of the report as it is stored)

With a run's folder, the stored report and the results of the study are written again first.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import _pages
from stored import keep

from coterie.report.page import write_report

STORED = _pages.STORED / "rotated-digits"
PICTURES = {  # view of the report, height in pixels, colors
    "docs/assets/report-light.png": ("overview", 1760, "light"),
    "docs/assets/report-dark.png": ("overview", 1760, "dark"),
    "docs/images/report-reads.png": ("reads", 1180, "light"),
}
# Chromium's numbers of the color schemes.
SCHEMES = {"dark": 0, "light": 1}


def picture(browser: str, path: Path, view: str, height: int, colors: str) -> None:
    """Open a view of the stored report once and keep what it shows."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[colors]}",
        ]
        options += [
            f"--window-size=1200,{height}",
            "--virtual-time-budget=8000",
            f"--screenshot={path}",
        ]
        page = f"{(STORED / 'report.html').as_uri()}#{view}"
        subprocess.run([browser, *options, page], check=True, capture_output=True)


def main() -> int:
    """Copy what a run left, if one is given, then make every picture."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if len(sys.argv) > 2 or browser is None:
        print(__doc__, file=sys.stderr)
        return 2
    for run in sys.argv[1:]:
        keep(Path(run))
        write_report(run, STORED / "report.html")
    for name, (view, height, colors) in PICTURES.items():
        (_pages.ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        picture(browser, _pages.ROOT / name, view, height, colors)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
