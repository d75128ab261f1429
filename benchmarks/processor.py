"""How far results of a study are apart where PyTorch rounds as on another processor.

    python benchmarks/processor.py --out docs/reference/runs/performance/processor.json

The study is run with all that this processor has, and with the instructions of x86-64-v3 alone
(`portable = true`): sums are then taken in another order, as on another machine. It needs a
processor with AVX-512.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from coterie._util.origin import write_results

STUDY, METRIC = "rotated-digits", "accuracy"


def load_means(folder: Path) -> dict[tuple[str, str], float]:
    """Return the mean of each method and cluster over seeds."""
    rows = json.loads((folder / "summary.json").read_text("utf-8"))["rows"]
    return {(r["label"], r["cluster"]): r["mean"] for r in rows if r["metric"] == METRIC}


def run_study(capability: str, *more: str) -> dict[tuple[str, str], float]:
    """Return the means of a run of the study with some of PyTorch's kernels, and further options."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "coterie", "run", STUDY, "--seeds", "8", "--workers", "1"]
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        subprocess.run(
            [*command, *more, "--out", folder], env=env, check=True, stdout=subprocess.DEVNULL
        )
        return load_means(Path(folder) / STUDY)


def main() -> None:
    """Run the study, compare, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    one, other = run_study("avx512"), run_study("avx2", "--set", "portable=true")
    results = [
        {"method": label, "cluster": cluster, "avx512": mean, "avx2": other[label, cluster]}
        for (label, cluster), mean in one.items()
    ]
    write_results(given.out, results, ("data", "engine", "models"), vars(given), seeds=range(8))


if __name__ == "__main__":
    main()
