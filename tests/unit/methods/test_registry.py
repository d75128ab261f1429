"""Methods by name, entry point and import path; and what is said when there is none."""

from importlib.metadata import EntryPoint

import pytest

from coterie.errors import ConfigError
from coterie.methods import METHODS, registry
from coterie.methods.base import Method, PeerMethod
from coterie.methods.local import Local
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.studies.definition import make_study
from coterie.testing import tiny_federation, tiny_settings

LOCAL = "coterie.methods.local:Local"
STUDY = 'data = { dataset = "digits", num_clients = 4 }\n[[methods]]\nkind = "coterie.methods.local:Local"\n'


class Mine(Local):  # type: ignore[misc]
    """A method that nobody offers under a name."""

    kind = "mine"


@pytest.fixture
def offers(monkeypatch):
    """Have installed packages offer methods: (name, import path) each."""

    def offer(*points):
        found = [EntryPoint(name, value, registry.GROUP) for name, value in points]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: found if group == registry.GROUP else []
        )

    return offer


def test_methods_are_the_concrete_classes_that_the_package_imports():
    assert all(
        issubclass(method, Method) and method.kind == kind for kind, method in METHODS.items()
    )
    assert {"dac", "fedavg", "local"} <= set(METHODS)


def test_a_method_is_found_by_name_by_entry_point_and_by_import_path(offers):
    offers(("ring", LOCAL))
    assert (
        registry.find_method("local")
        is registry.find_method("ring")
        is registry.find_method(LOCAL)
        is Local
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dca", "did you mean 'dac'"),
        (
            "no_such_package.ring:Ring",
            "no module 'no_such_package'; install the package that has it",
        ),
        ("coterie.methods.local:Ring", "no attribute 'Ring'"),
        ("coterie.errors:ConfigError", "expected a subclass of coterie.Method"),
        ("coterie.methods.base:PeerMethod", "lacks exchange"),
        (":Ring", "expected package.module:name"),
    ],
)
def test_what_is_no_method_is_said_in_a_line(kind, said):
    with pytest.raises(ConfigError) as raised:
        registry.find_method(kind)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_name_that_two_packages_offer_has_to_be_said_by_its_path(offers):
    offers(("ring", "one.ring:Ring"), ("ring", "two.ring:Ring"))
    with pytest.raises(
        ConfigError, match=r"'ring' is offered by .*one\.ring:Ring and by two\.ring:Ring; say which"
    ):
        registry.find_method("ring")


def test_a_package_cannot_take_the_name_of_a_built_in_method(offers):
    offers(("dac", LOCAL))
    assert registry.find_method("dac") is METHODS["dac"]
    assert registry.list_installed() == {}


def test_a_class_is_stored_under_the_name_that_finds_it_again(offers):
    path = f"{Mine.__module__}:Mine"
    assert registry.name_of(Local) == ("local", "")
    assert registry.name_of(Mine) == (path, "")
    offers(("mine", path))
    assert registry.name_of(Mine)[0] == "mine"


def test_a_method_made_in_python_is_read_from_its_file_without_its_class_and_told_the_same():
    study = make_study({"Own": Mine(), "Alone": Local()}, settings=None)
    read = config.parse_study_text(config.format_study(study), to_run=False)
    assert isinstance(read.methods[0].method, registry.StoredMethod)
    assert isinstance(read.methods[1].method, Local)
    assert config.make_study_table(read) == config.make_study_table(study)
    assert config.describe_difference(read, study) == ""
    with pytest.raises(ConfigError, match="load its study to run it"):
        simulate(
            tiny_federation(), read.methods[0].method, model="linear", settings=tiny_settings()
        )


def test_settings_of_a_stored_method_are_its_own_unless_the_study_has_them():
    """`rounds` is the study's; `participation` is not: the study's is a number, so here it is the method's own."""
    text = (
        STUDY.replace("coterie.methods.local:Local", "gone")
        + 'rounds = 7\nparticipation = "partial"\ntau = 3\n'
    )
    (entry,) = config.parse_study_text(text, to_run=False).methods
    assert entry.settings.rounds == 7
    assert entry.settings.participation == 1
    assert isinstance(entry.method, registry.StoredMethod)
    assert entry.method.settings == {"rounds": 7, "participation": "partial", "tau": 3}


def test_an_import_path_is_called_by_the_kind_of_its_class():
    """Also where a setting is changed: a label becomes a folder, which cannot have a colon."""
    study = config.parse_study_text(STUDY, overrides=["methods.local.rounds=3"])
    assert (study.methods[0].label, study.methods[0].settings.rounds) == ("local", 3)


def test_a_missing_package_is_named_where_the_file_names_it():
    text = STUDY.replace("coterie.methods.local:Local", "gone") + 'package = "ring-package==1.0"\n'
    with pytest.raises(ConfigError, match=r"install ring-package==1\.0"):
        config.parse_study_text(text)


def test_a_peer_method_without_a_kind_is_none():
    assert not hasattr(PeerMethod, "kind")
