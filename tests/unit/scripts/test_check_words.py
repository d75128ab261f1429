"""The check of words: it finds dialect in prose, and leaves names and code alone."""

import check_words
import pytest
from check_words import find_words, format_folder, load_words, main, split_allowed


def found_in(tmp_path, name: str, text: str) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(one.line, one.text) for one in find_words(path, load_words(), tmp_path)]


def test_comments_docstrings_and_messages_are_read(tmp_path):
    text = '"""Runs\n\nof whoever asks."""\n\nvalue = 1  # beside the file\nraise OSError("the user\'s file")\n'
    assert found_in(tmp_path, "module.py", text) == [
        (3, "whoever"),
        (5, "beside"),
        (6, "the user's"),
    ]


def test_names_keys_and_code_are_not_prose(tmp_path):
    text = '"""See `told`."""\n\ntold = {"told": 1}\nprint(f"found {told} values")\n'
    assert found_in(tmp_path, "module.py", text) == []
    assert found_in(tmp_path, "page.md", "`told`\n\n```python\ntold = 1\n```\n") == []


def test_phrases_of_stored_data_are_not_checked(tmp_path):
    assert found_in(tmp_path, "page.md", "Noise is drawn anew at every access.\n") == []
    assert found_in(tmp_path, "page.md", "Noise is drawn anew.\n") == [(1, "anew")]


def test_a_phrase_is_found_across_the_end_of_a_line(tmp_path):
    assert found_in(tmp_path, "page.md", "All\nthose\nthat finished.\n") == [(2, "those that")]


def test_a_phrase_is_reported_once_and_before_the_word_in_it(tmp_path):
    assert found_in(tmp_path, "page.md", "They cannot be told apart.\n") == [(1, "told apart")]


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("README.md", "."),
        ("docs/index.md", "docs"),
        ("docs/how-to/run.md", "docs/how-to"),
        ("src/coterie/rng.py", "src/coterie"),
        ("src/coterie/report/data/cost.py", "src/coterie/report"),
    ],
)
def test_folders_of_the_counts(path, folder):
    assert format_folder(path) == folder


def test_only_findings_outside_the_allowed_folders_fail(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("docs/a.md", "b.md"):
        (tmp_path / name).write_text("anew\n", encoding="utf-8")
    findings = [
        one
        for name in ("docs/a.md", "b.md")
        for one in find_words(tmp_path / name, load_words(), tmp_path)
    ]
    failing, counts = split_allowed(findings, ["docs"])
    assert [str(one) for one in failing] == ["b.md:1: anew: write again, or new instead"]
    assert counts == {"docs": 1}


def test_the_exit_status_says_whether_a_word_was_found(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("Plain words.\n", encoding="utf-8")
    monkeypatch.setattr(
        check_words, "find_words", lambda path, words: find_words(path, words, tmp_path)
    )
    assert main([str(page)]) == 0
    page.write_text("Beside it.\n", encoding="utf-8")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out.startswith("page.md:1: Beside: write next to")
