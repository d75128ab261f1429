"""Objects and modules on their way to a worker."""

import importlib.util
import os
import sys

import numpy as np
import pytest
import torch

from coterie.cluster import packing
from coterie.cluster.packing import (
    Packed,
    collect_modules,
    find_defining_modules,
    find_named_modules,
    install_modules,
    pack,
    unpack,
)
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


def test_import_paths_are_found_anywhere_in_settings():
    settings = {
        "methods": [{"kind": "lab.rules:Mine"}, ("lab.b:c.d",)],
        "loss": "lab.losses:focal",
        "title": "a: b",
        "path": "c:/data",
        "place": "ray:1",
        "name": "lab",
        "rounds": 3,
        "none": None,
    }
    assert find_named_modules(settings) == {"lab.rules", "lab.b", "lab.losses"}
    assert find_named_modules({}) == find_named_modules([]) == set()


def test_a_function_names_its_module_and_an_object_that_of_its_class():
    assert find_defining_modules(np.load) == {"numpy", "builtins"}
    assert find_defining_modules(torch.nn.Linear(1, 1)) == {"torch.nn.modules.linear"}
    assert find_defining_modules(5) == {"builtins"}


def test_a_tensor_that_numpy_cannot_hold_in_place_is_packed_by_torch():
    """Each comes back as it was: its gradient flag, its lazy conjugation, its layout."""
    plain = torch.arange(6.0)
    complex_ = torch.complex(plain, plain + 1)
    given = {
        "with a gradient": plain.clone().requires_grad_(),
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "bfloat16": plain.bfloat16(),
    }
    packed = pack(given)
    assert len(packed.arrays) == 0 or sum(one.nbytes for one in packed.arrays) < 10_000
    for name, found in unpack(packed).items():
        assert torch.equal(found.to_dense(), given[name].to_dense()), name
        assert found.requires_grad is given[name].requires_grad, name
        assert found.layout is given[name].layout, name
    assert len(pack(plain).arrays) == 1


def test_bytes_of_both_parts_are_counted():
    assert Packed(b"123", (np.zeros(4, np.uint8), np.zeros(5, np.uint8))).nbytes == 12


def test_a_namespace_package_and_a_module_alone_are_sent_whole(tmp_path, monkeypatch):
    """A package without an `__init__.py` has no file, only a folder; relative imports stay in it."""
    (tmp_path / "lab_space" / "deep").mkdir(parents=True)
    (tmp_path / "lab_space" / "one.py").write_text("from . import two\nimport lab_alone\n")
    (tmp_path / "lab_space" / "two.py").write_text("X = 2\n")
    (tmp_path / "lab_space" / "deep" / "three.py").write_text("")
    (tmp_path / "lab_alone.py").write_text("import lab_space.one\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("lab_space.one")
    try:
        found = collect_modules(["lab_space", "nowhere_at_all"])
        one = {"lab_space/one.py", "lab_space/two.py", "lab_space/deep/three.py", "lab_alone.py"}
        assert set(found) == one
        assert set(collect_modules(["lab_alone"])) == one, "what it imports, and that once"
        size = sum(map(len, found.values()))
        monkeypatch.setattr(packing, "LARGEST", size)
        collect_modules(["lab_space"])
        monkeypatch.setattr(packing, "LARGEST", size - 1)
        with pytest.raises(ConfigError, match=f"are {size} bytes"):
            collect_modules(["lab_space"])
    finally:
        for name in ("lab_space", "lab_space.one", "lab_space.two", "lab_alone"):
            sys.modules.pop(name, None)


def test_what_is_installed_is_not_sent():
    assert collect_modules(["json", "numpy", "torch", "coterie", "pytest"]) == {}


def test_without_modules_the_import_path_stays(tmp_path):
    before = list(sys.path)
    install_modules({}, tmp_path / "in")
    assert sys.path == before
    assert not (tmp_path / "in").exists()


def test_modules_that_came_are_found_before_others_of_their_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    install_modules({"a/b/c.py": b"x"}, tmp_path / "in")
    assert sys.path[0] == str(tmp_path / "in")
    assert (tmp_path / "in/a/b/c.py").read_bytes() == b"x"


def test_modules_are_found_in_a_folder_that_python_has_looked_into_before(tmp_path, monkeypatch):
    """Python keeps the listing of a folder for as long as its time stays: here a second file comes at once."""
    folder = tmp_path / "in"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert importlib.util.find_spec("came_later") is None
    before = folder.stat()
    install_modules({"came_later.py": b"WORD = 3"}, folder)
    # As on a file system whose times are seconds.
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert importlib.util.find_spec("came_later") is not None
