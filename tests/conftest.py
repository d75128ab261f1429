"""What several test files share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real datasets: COTERIE_DATA, or shared/data beside the checkout."""
    chosen = os.environ.get("COTERIE_DATA")
    folder = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the real datasets are not here: {folder} does not exist; set COTERIE_DATA to their folder")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, so that nothing decoded earlier is used."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("COTERIE_CACHE", str(folder))
    return folder
