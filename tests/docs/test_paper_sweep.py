"""The page on a sweep for a paper: its file and its three commands, as they stand there."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/paper-sweep.md"


@pytest.mark.slow
def test_one_file_and_three_commands_make_the_figure_and_the_table(tmp_path):
    """Three methods by three values in each, over three seeds; the table is LaTeX with intervals."""
    name, file, commands = re.search(
        r'```toml title="(.*?)"\n(.*?)```.*?```sh\n(.*?)```', PAGE.read_text(), re.DOTALL
    ).groups()
    (tmp_path / name).write_text(file)
    lines = commands.splitlines()
    assert len(lines) == 3
    for line in lines:
        line, _, out = line.partition(" > ")
        program, *words = shlex.split(line)
        assert program == "coterie"
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if out:
            (tmp_path / out).write_text(done.stdout)
    assert len([*tmp_path.glob("runs/label-shift/*/*/seed-*/metrics.parquet")]) == 27
    assert (tmp_path / "label-shift.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "label-shift.csv").open() as table:
        rows = list(csv.DictReader(table))
    points = {(row["method"], float(row["data.shift.0.concentration_per_class"])) for row in rows}
    assert points == {(m, v) for m in ("DAC", "FedAvg", "Local") for v in (0.1, 1.0, 10.0)}
    assert {row["seeds"] for row in rows} == {"3"}
    assert all(float(row["low"]) < float(row["mean"]) < float(row["high"]) for row in rows)
    head, *body = re.findall(r"^.* & .*$", (tmp_path / "label-shift.tex").read_text(), re.M)
    assert head == r"method & n & alpha = 0.1 & alpha = 1 & alpha = 10 \\"
    assert [line.split(" & ")[:2] for line in body] == [
        ["DAC", "3"],
        ["FedAvg", "3"],
        ["Local", "3"],
    ]
    assert all(len(re.findall(r"\d+\.\d+ \(\S+ to \S+\)", line)) == 3 for line in body)
