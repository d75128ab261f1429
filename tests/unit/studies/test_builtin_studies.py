from coterie.studies import builtin_studies, config


def test_every_named_file_is_a_study_and_what_is_only_extended_has_no_entry_among_them():
    """A file that begins with "_" is listed as a base alone."""
    found, bases = (
        builtin_studies.find_builtin_studies(),
        builtin_studies.find_builtin_studies(bases=True),
    )
    assert set(bases) - set(found) == {
        name for name in bases if name.rpartition("/")[2].startswith("_")
    }
    assert found.items() <= bases.items()
    assert list(found) == sorted(found)
    assert all(found[name].name == f"{name.rpartition('/')[2]}.toml" for name in found)
    assert {"rotated-digits", "dac/tau"} <= set(found)
    assert config.load_study("dac/tau").name == "dac/tau"
