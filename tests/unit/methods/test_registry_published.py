"""Options of published code: which class takes a table, and what is stored of a method."""

from dataclasses import asdict, fields

import pytest

from coterie.methods import METHODS
from coterie.methods.dac import Dac
from coterie.methods.fedgwc import FedGwc
from coterie.methods.registry import (
    PUBLISHED,
    all_settings,
    find_published,
    name_of,
    resolve_class,
    with_published_options,
)
from coterie.papers.dac import PublishedDac
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.studies import config

STUDY = 'seeds = [0]\n[data]\ndataset = "digits"\n[[methods]]\nkind = "{}"\nlabel = "it"\n{}\n'


def read(kind: str, *settings: str):
    """The method of a study file with one method."""
    return config.parse_study_text(STUDY.format(kind, "\n".join(settings)), "it").methods[0].method


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_a_table_with_all_options_at_their_defaults_is_the_method_itself(kind):
    """As stored configurations have them."""
    method = METHODS[kind]()
    stored = all_settings(method)
    found, table = resolve_class(METHODS[kind], stored)
    assert found is METHODS[kind]
    assert found(**table) == method


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_each_option_with_another_value_takes_the_published_class(kind):
    published = find_published(METHODS[kind])
    assert published is not None
    assert name_of(published) == (kind, "")
    own = {item.name for item in fields(METHODS[kind])}
    for item in fields(published):
        if item.name not in own:
            other = not item.default if isinstance(item.default, bool) else "another"
            assert resolve_class(METHODS[kind], {item.name: other})[0] is published


@pytest.mark.parametrize(
    ("kind", "setting", "expected"),
    [
        ("dac", "two_hop_pick = 'least'", PublishedDac),
        ("dac", "two_hop_pick = 'most'", Dac),
        ("dac", "aggregation = 'fedsim_prior'", PublishedDac),
        ("dac", "aggregation = 'fedsim'", Dac),
        ("dac", "tau_schedule = 'entropy'", PublishedDac),
        ("fedgwc", "preset = 'released'", PublishedFedGwc),
        ("fedgwc", "preset = 'coterie'", FedGwc),
        ("fedgwc", "nesterov = true", PublishedFedGwc),
    ],
)
def test_a_study_file_reaches_both_by_one_kind(kind, setting, expected):
    """What is written of the method is read as the same method, with all options or with its own."""
    method = read(kind, setting)
    assert type(method) is expected
    study = config.parse_study_text(STUDY.format(kind, setting), "it")
    for decided in (True, False):
        again = config.parse_study_text(config.format_study(study, decided=decided), "again")
        assert again.methods[0].method == method


def test_a_method_is_stored_with_the_options_that_it_always_has():
    """So that a run has the identity that it had when they were settings of the method."""
    full = with_published_options(FedGwc(beta=2.0))
    assert isinstance(full, PublishedFedGwc)
    assert (full.beta, full.preset, full.ddof, full.explore) == (2.0, "coterie", 1, True)
    assert all_settings(Dac())["two_hop_pick"] == "most"
    assert all_settings(METHODS["local"]()) == asdict(METHODS["local"]())
