"""The values of `--on`."""

import importlib.util
import logging
import socket

import pytest

from coterie.cluster import place
from coterie.cluster.place import LOCAL, Place, connect_ray, parse_place
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
        ("slurm:gpu:time=600,mem=16GB", Place("slurm", "gpu:time=600,mem=16GB")),
    ],
)
def test_a_place_is_read_and_written_as_it_was_given(text, expected):
    found = parse_place(text)
    assert found == expected
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ray",
        "ray:",
        "ray:head",
        "ray://head",
        "ray://head:x",
        "ray:a b:1",
        "slurm",
        "slurm:",
        "slurm:a b",
        "slurm:a:b",
        "k8s:x",
    ],
)
def test_what_is_no_place_is_refused_with_those_that_are(text):
    with pytest.raises(ConfigError, match=r"^--on is .*; expected local, ray:auto, ") as told:
        parse_place(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("text", "package"), [("ray:auto", "ray"), ("slurm:cpu", "submitit")])
def test_without_the_extra_one_line_says_what_to_install(text, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"--on {text} needs {package}, which is not installed; pip install"
    ) as told:
        parse_place(text)
    assert "\n" not in str(told.value)
    assert parse_place("local") == LOCAL


def test_only_ray_is_connected_to():
    with (
        pytest.raises(ConfigError, match="--on is slurm:cpu; expected a place of Ray"),
        connect_ray(Place("slurm", "cpu")),
    ):
        pass


@pytest.mark.parametrize("text", ["ray:127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_where_nobody_listens_one_line_says_so_at_once(text):
    """Ray itself would wait for minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with (
            pytest.raises(
                ConfigError, match=f"no Ray answers at .*127.0.0.1:{port} .*refused"
            ) as told,
            connect_ray(parse_place(text.format(port))),
        ):
            pass
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (None, "export RAY_AUTH_MODE=token, and copy"),
        ("token", "put the token of that cluster into"),
    ],
)
def test_where_ray_does_not_let_us_in_one_line_says_what_its_token_needs(mode, said, monkeypatch):
    """Ray takes half a minute to say so: here by what it raises."""
    ray = pytest.importorskip("ray")

    def refuse(**_: object) -> None:
        raise ray.exceptions.AuthenticationError("RPC error: InvalidAuthToken")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(place, "_check_reachable", lambda place: None)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(
        ConfigError, match=f"no Ray answers there .*InvalidAuthToken.*{said}"
    ) as told:
        _enter(connect_ray(parse_place("ray:127.0.0.1:6379")))
    assert "\n" not in str(told.value)


def test_the_token_that_ray_makes_here_is_for_its_user_alone(tmp_path, monkeypatch):
    """Its file is readable by all, and so its folder is not."""

    def start(**_):
        (tmp_path / ".ray" / "auth_token").write_text("secret")
        raise ConnectionError("enough")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("ray.init", start)
    with pytest.raises(ConfigError, match="enough"):
        _enter(connect_ray(parse_place("ray:local")))
    assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700


def _enter(context):
    with context:
        pass


def test_without_a_ray_on_this_machine_auto_says_what_starts_one(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    with pytest.raises(
        ConfigError, match="--on ray:auto: no Ray runs on this machine; `ray start`"
    ):
        place._check_reachable(parse_place("ray:auto"))


def test_auto_finds_a_ray_whose_address_another_has_removed(monkeypatch):
    """Ray notes the last one in a file, which any Ray of this machine removes when it ends."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {address})
        place._check_reachable(parse_place("ray:auto"))
    with pytest.raises(ConfigError, match=f"no Ray answers at {address}"):
        place._check_reachable(parse_place("ray:auto"))


def test_the_places_of_the_message_are_those_of_the_page_of_the_module():
    for text in place.PLACES.replace(" or ", ", ").split(", "):
        assert f"{text}  " in str(place.__doc__)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What a pretended Ray was started with; the environment is put back."""
    asked = []
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: asked.append(given))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("closed"))
    level = logging.getLogger("ray").level
    yield asked
    logging.getLogger("ray").setLevel(level)


QUIET = {"log_to_driver": False, "configure_logging": False}


def test_a_ray_of_this_machine_is_reachable_from_nowhere_else_and_silent(started, monkeypatch):
    with connect_ray(parse_place("ray:local"), num_cpus=2):
        own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "num_cpus": 2}
        assert started == [{"address": "local", **QUIET, **own}]
        assert place.os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert place.os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
        assert logging.getLogger("ray").level == logging.ERROR
    assert started[1:] == ["closed"]


def test_a_connection_is_closed_after_an_error_and_takes_no_arguments_of_a_start(
    started, monkeypatch, tmp_path
):
    monkeypatch.setattr(place, "_check_reachable", lambda where: None)
    with pytest.raises(KeyError), connect_ray(parse_place("ray:head:6379"), num_cpus=2):
        raise KeyError
    assert started == [{"address": "head:6379", **QUIET}, "closed"]
    assert not (tmp_path / ".ray").exists()


def test_a_connection_that_was_there_before_is_used_and_stays(started, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with connect_ray(parse_place("ray:head:6379")):
        pass
    assert started == []


def test_where_a_package_of_the_client_is_missing_one_line_says_what_to_install(
    started, monkeypatch
):
    def missing(**_):
        raise ImportError("no grpc\nhere")

    monkeypatch.setattr("ray.init", missing)
    with pytest.raises(ConfigError, match=r"^--on ray:local: no grpc here; pip install") as told:
        _enter(connect_ray(parse_place("ray:local")))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["no address at all", "head", "ray://head"])
def test_an_address_of_the_environment_that_is_none_is_said(monkeypatch, text):
    monkeypatch.setenv("RAY_ADDRESS", text)
    with pytest.raises(ConfigError, match="no Ray runs on this machine"):
        place._check_reachable(parse_place("ray:auto"))


def test_a_port_above_the_largest_is_one_line():
    with pytest.raises(ConfigError, match=r"no Ray answers at 127\.0\.0\.1:99999"):
        place._check_reachable(parse_place("ray:127.0.0.1:99999"))


def test_an_address_in_brackets_is_that_of_the_sixth_version(monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append((address, timeout))
        return socket.socket()

    monkeypatch.setattr(place.socket, "create_connection", connect)
    place._check_reachable(parse_place("ray:[fe80::1]:6379"))
    place._check_reachable(parse_place("ray://head:10001"))
    assert asked == [(("fe80::1", 6379), 10.0), (("head", 10001), 10.0)]
