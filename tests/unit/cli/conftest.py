"""What tests of the command line share."""

import sys

import pytest

from coterie.cli import app


@pytest.fixture
def coterie(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder; returns (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("COTERIE_DATA", raising=False)

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit) as status:
            app.main()
        written = capsys.readouterr()
        return status.value.code, written.out, written.err

    return call
