"""Put the result tables of a stored run of the bundled study into README.md, between its markers.

    coterie run --out runs && cp runs/rotated-digits/summary.json docs/reference/runs/rotated-digits/
    python scripts/readme.py

No number of the README is typed by hand.
"""

import json
import sys

from _pages import ROOT, STORED, write

README = ROOT / "README.md"
START, END = "<!-- results: scripts/readme.py -->\n", "<!-- end of results -->\n"


def accuracies(summary: dict) -> str:
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


def readme() -> str:
    """Return README.md with the newest table."""
    before, rest = README.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    summary = json.loads((STORED / "rotated-digits/summary.json").read_text())
    return before + START + accuracies(summary) + END + after


if __name__ == "__main__":
    sys.exit(write({README: readme()}))
