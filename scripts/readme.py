"""Put the result tables of a stored run of the bundled study into README.md, between its markers.

    coterie run --out runs && cp runs/rotated-digits/summary.json docs/reference/runs/rotated-digits/
    python scripts/readme.py

No number of the README is typed by hand.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "docs/reference/runs/rotated-digits/summary.json"
START, END = "<!-- results: scripts/readme.py -->\n", "<!-- end of results -->\n"


def table(summary: dict) -> str:
    """Return the accuracy of every method, in per cent, as a Markdown table."""
    cells = {(r["label"], r["cluster"]): r for r in summary["rows"] if r["metric"] == "accuracy"}
    labels = list(dict.fromkeys(label for label, _ in cells))
    clusters = [c for c in dict.fromkeys(cluster for _, cluster in cells) if c not in ("all", "clusters")]
    columns = [*clusters, "all", "clusters"]
    names = [*clusters, "mean over clients", "mean over clusters"]
    lines = [f"| test accuracy, % | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for label in labels:
        row = [cells[label, column] for column in columns]
        lines.append(f"| {label} | " + " | ".join(f"{100 * r['mean']:.1f} ± {100 * r['std']:.1f}" for r in row) + " |")
    seeds = {r["seeds"] for r in cells.values()}
    wall = sum(t["wall_s"] for t in summary["timing"])
    samples = sum(t["train_samples"] for t in summary["timing"])
    lines += ["", f"Mean ± population standard deviation over {max(seeds)} seeds; {len(summary['timing'])} runs, "
              f"{samples:,} training samples, {wall:.0f} s of computing."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite README.md; with --check, only say whether it is up to date."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    new = before + START + table(json.loads(STORED.read_text())) + END + after
    if "--check" in sys.argv:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
