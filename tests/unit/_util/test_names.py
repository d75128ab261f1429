from coterie._util.names import (
    distinguish_clients,
    format_client,
    format_clients,
    shorten_clients,
    shorten_text,
    to_one_line,
)

NAMES = {0: "Oslo", 1: "مستشفى الملك", 3: "🏥 " + "very " * 20}


def test_clients_are_called_by_name_where_they_have_one():
    assert [format_client(NAMES, client) for client in (0, 1, 2)] == [
        "Oslo",
        "مستشفى الملك",
        "client 2",
    ]


def test_clients_whose_names_look_alike_are_told_apart_by_their_ids():
    names = {0: "Nord", 1: "Nord\n", 2: "nord", 3: "all", 5: "client 4"}
    shown = distinguish_clients(names, range(6))
    assert shown == {
        0: "Nord (client 0)",
        1: "Nord (client 1)",
        2: "nord",
        3: "all (client 3)",
        4: "client 4 (client 4)",
        5: "client 4 (client 5)",
    }
    assert len(set(shown.values())) == 6


def test_the_first_of_many_are_told_and_long_names_are_cut():
    assert (
        format_clients(NAMES, [0, 2, 3, 1], 3) == "Oslo, 2, 🏥 " + "very " * 7 + "ve…, ..."
    )  # 40 signs
    assert format_clients({}, [4, 7]) == "4, 7"


def test_a_text_is_cut_to_its_length_with_the_ellipsis():
    assert shorten_text("a" * 24) == "a" * 24
    assert shorten_text("a" * 25) == "a" * 23 + "…"


def test_what_a_terminal_would_obey_is_gone():
    assert to_one_line("Oslo\nLima\x1b[31m\tQuito ") == "Oslo Lima [31m Quito"


def test_names_that_are_one_when_they_are_cut_keep_the_ids_of_their_clients():
    names = {0: "University hospital, ward A", 1: "University hospital, ward B", 2: "Oslo"}
    shown = shorten_clients(names, range(4), 16)
    assert shown == {0: "University… (0)", 1: "University… (1)", 2: "Oslo", 3: "client 3"}
    # Names that are the same as a whole have their id at an end that is cut.
    twins = shorten_clients({0: "x" * 30, 1: "x" * 30}, range(2), 16)
    assert twins == {0: "x" * 11 + "… (0)", 1: "x" * 11 + "… (1)"}
