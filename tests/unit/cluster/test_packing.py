"""Objects and modules on their way to a worker."""

import sys

import numpy as np
import pytest
import torch

from coterie.cluster import packing
from coterie.cluster.packing import collect_modules, install_modules, pack, unpack
from coterie.errors import ConfigError

pytest.importorskip("ray")


def test_tensors_and_arrays_lie_beside_the_rest_and_are_not_copied():
    big = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    given = {
        "x": big,
        "n": np.arange(10),
        "label": "DAC",
        "half": big.bfloat16(),
        "part": big[:, ::2],
    }
    packed = pack(given)
    found = unpack(packed)
    assert found["label"] == "DAC"
    for name in ("x", "half", "part"):
        assert torch.equal(found[name], given[name])
    assert np.array_equal(found["n"], given["n"])
    assert found["x"].data_ptr() == big.data_ptr(), "one memory"
    assert len(packed.head) < 40_000 + given["part"].nbytes + given["half"].nbytes
    assert packed.nbytes >= big.nbytes


def test_a_parameter_stays_one():
    found = unpack(pack(torch.nn.Linear(2, 1)))
    assert [p.requires_grad for p in found.parameters()] == [True, True]


def test_a_function_of_a_script_goes_along():
    factor = 3
    assert unpack(pack(lambda x: factor * x))(2) == 6


def test_modules_beside_a_study_travel_with_those_they_import(tmp_path, monkeypatch):
    (tmp_path / "lab_rules").mkdir()
    (tmp_path / "lab_rules" / "__init__.py").write_text(
        "import numpy\nfrom lab_words import WORD\n"
    )
    (tmp_path / "lab_rules" / "inner.py").write_text("DEEP = 1\n")
    (tmp_path / "lab_words.py").write_text("WORD = 'found'\n")
    (tmp_path / "lab_other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("lab_rules")
    try:
        found = collect_modules({"lab_rules.inner", "numpy", "coterie.rng", "json"})
        assert set(found) == {"lab_rules/__init__.py", "lab_rules/inner.py", "lab_words.py"}
        monkeypatch.setattr(packing, "LARGEST", 10)
        with pytest.raises(
            ConfigError, match="bytes with those they import; expected at most 10: install them"
        ):
            collect_modules({"lab_rules"})
    finally:
        for name in ("lab_rules", "lab_words"):
            sys.modules.pop(name, None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
    install_modules(found, tmp_path / "away")
    import lab_words  # pyright: ignore[reportMissingImports]

    assert lab_words.WORD == "found"
    assert lab_words.__file__ == str(tmp_path / "away" / "lab_words.py")
    sys.modules.pop("lab_words")


def test_a_module_stays_inside_its_folder(tmp_path):
    with pytest.raises(ConfigError, match="expected a path inside its folder"):
        install_modules({"../evil.py": b""}, tmp_path / "in")
    assert not (tmp_path / "evil.py").exists()
