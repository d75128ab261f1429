"""The values of `--on`."""

import importlib.util

import pytest

from coterie.cluster import place
from coterie.cluster.place import LOCAL, Place, connect, read
from coterie.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local", LOCAL),
        ("ray:auto", Place("ray", "auto")),
        ("ray:local", Place("ray", "local")),
        ("ray:10.0.0.7:6379", Place("ray", "10.0.0.7:6379")),
        ("ray:[fe80::1]:6379", Place("ray", "[fe80::1]:6379")),
        ("ray://head.lab:10001", Place("ray", "ray://head.lab:10001")),
        ("slurm:cpu,long", Place("slurm", "cpu,long")),
        ("slurm:local", Place("slurm", "local")),
    ],
)
def test_a_place_is_read_and_written_as_it_was_given(text, expected):
    found = read(text)
    assert found == expected
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    ["", "ray", "ray:", "ray:head", "ray://head", "ray://head:x", "ray:a b:1", "slurm", "slurm:", "slurm:a b", "k8s:x"],
)
def test_what_is_no_place_is_refused_with_those_that_are(text):
    with pytest.raises(ConfigError, match=r"^--on is .*; expected local, ray:auto, ") as told:
        read(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("text", "package"), [("ray:auto", "ray"), ("slurm:cpu", "submitit")])
def test_without_the_extra_one_line_says_what_to_install(text, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"--on {text} needs {package}, which is not installed; pip install") as told:
        read(text)
    assert "\n" not in str(told.value)
    assert read("local") == LOCAL


def test_only_ray_is_connected_to():
    with pytest.raises(ConfigError, match="--on is slurm:cpu; expected a place of Ray"), connect(Place("slurm", "cpu")):
        pass


def test_the_places_of_the_message_are_those_of_the_page_of_the_module():
    for text in place.PLACES.replace(" or ", ", ").split(", "):
        assert f"{text}  " in str(place.__doc__)
