"""The page on a federation that stands, done from top to bottom by three services on loopback."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.net import servicefile

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/standing-federation.md"
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def coterie(*words: str) -> str:
    told = CliRunner().invoke(app, list(words))
    assert told.exit_code == 0, f"{words}: {told.output} {told.exception}"
    return told.stdout


def wait_for(node: str, state: str) -> None:
    """Wait until a study stands so at a member."""
    until, said = time.monotonic() + 120, ""
    while f"hearts-dac: {state}," not in said:
        said = coterie("studies", "--node", node)
        assert time.monotonic() < until, said
        time.sleep(0.2)


@pytest.mark.full
def test_the_page_leads_from_nothing_to_the_results_of_a_study(tmp_path, monkeypatch, port):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text("utf-8")
    for number, address in enumerate(("192.0.2.7", "198.51.100.9", "203.0.113.4")):
        text = text.replace(f"{address}:7447", f"127.0.0.1:{port + number}")
    services: list[subprocess.Popen[bytes]] = []
    said: list[str] = []
    try:
        for language, title, body in BLOCK.findall(text):
            if title:
                (tmp_path / title).write_text(body, encoding="utf-8")
            if language == "python":
                exec(compile(body, str(PAGE), "exec"), {})
            for line in body.splitlines() if language == "sh" else []:
                words = shlex.split(line)[1:]
                if words[:2] == ["federation", "serve"]:
                    log = (tmp_path / f"{len(services)}.log").open("wb")
                    command = [sys.executable, "-m", "coterie", *words]
                    environment = os.environ | {"OMP_NUM_THREADS": "1"}
                    services.append(
                        subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                    )
                    log.close()
                    continue
                if words[:2] == ["federation", "watch"]:
                    continue  # of a person: tests/e2e/test_federation_page.py
                if words[0] == "approve" or words[:2] == ["studies", "hearts-dac"]:
                    wait_for(words[-1], "proposed")
                elif words[0] == "report":
                    wait_for("cleveland/node.toml", "done")
                said.append(coterie(*words))
    finally:
        for process in services:
            process.terminate()
        assert [process.wait(30) for process in services] == [143] * 3
    assert "ok     the chain is whole, and signed by cleveland" in said[-1]
    assert (tmp_path / "cleveland/studies/hearts-dac/cleveland/hearts-dac/report.html").exists()
    # 14 entries and 2 classes: 30 numbers of 4 bytes.
    assert "120 bytes of numbers" in "".join(said)
    rules = servicefile.load(tmp_path / "hungary/node.toml").rules
    assert (rules.proposers, rules.hours) == (("cleveland",), "20-6")
