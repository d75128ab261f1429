import json
import re
import shutil

import pytest

from coterie.errors import ConfigError, DataError
from coterie.report.page import write_report
from coterie.report.studies import write_studies

HOSTILE = '</script><script>alert("x")</script><b>&'


@pytest.fixture
def two(small):
    """The study `small`, and a copy of it in another folder."""
    other = small.parent / "other"
    shutil.copytree(small, other)
    return small, other


@pytest.mark.full
def test_studies_stand_beside_each_other_with_links_to_each(two):
    """DAC is at 63.75 ± 1.25 in both, .125 and .15 above Local: with one degree of freedom that is p = 0.058."""
    reports = [write_report(folder) for folder in two]
    path = write_studies(two, reports)
    assert path == two[0].parent / "studies.html"
    text = path.read_text()
    assert text.count("63.75 <small>± 1.25</small>*") == 2
    assert "cannot be distinguished from it with 2 seeds" in text
    for folder in two:
        assert f'href="{folder.name}/report.html"' in text
        assert f'href="{folder.name}/report.html#method=DAC"' in text
        assert f'href="{folder.name}/report.html#pair=DAC,Local"' in text
    assert "DAC over Local: not established: +13.7 (-2.1 to 29.6)" in text
    assert not re.search(r'(src|href)="(http|//)', text)


def test_a_page_elsewhere_leads_to_the_reports(two, tmp_path):
    reports = [write_report(folder) for folder in two]
    path = write_studies(two, reports, tmp_path / "pages.html")
    for link in re.findall(r'href="([^"#]+)', path.read_text()):
        assert (path.parent / link).is_file()


def test_what_is_missing_is_said_of_its_study(two):
    reports = [write_report(folder) for folder in two]
    (two[0] / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"PAR1 cut off")
    text = write_studies(two, reports).read_text()
    assert re.search(r"<li>[^<]*: DAC: seed 0 damaged", text)
    assert "One seed settles nothing" in text


def test_names_from_outside_are_escaped(small, write_run, final_rows):
    rows = final_rows([0.5] * 4, [0, 0, 0, 1])
    folder = small.parent / "x"
    for seed in (0, 1):
        for label in (HOSTILE, "plain, a=b&c"):
            place = folder / str(len(label)) / f"seed-{seed}"
            write_run(place, kind="dac", label=label, seed=seed, metrics=rows, study=HOSTILE)
    text = write_studies([small, folder], [write_report(small), write_report(folder)]).read_text()
    assert text.count("<script") == 1
    assert "plain%2C%20a%3Db%26c" in text


def test_a_study_that_is_given_twice_is_refused(small):
    report = write_report(small)
    with pytest.raises(DataError, match="given twice"):
        write_studies([small, small / "."], [report, report])


def test_the_payload_of_a_report_has_the_pairs_in_words(small):
    text = write_report(small).read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    (family,) = [
        one
        for one in data["pairs"]["families"]
        if (one["metric"], one["cluster"]) == ("accuracy", "all")
    ]
    assert family["leaders"] == ["DAC", "Local"]
    assert family["pairs"][0]["text"] == ["+13.7", "-2.1 to 29.6"]
    assert family["pairs"][0]["verdict"].startswith("DAC over Local: not established")
    assert set(data["pairs"]["tables"]) == {"LaTeX", "Markdown"}
    assert "pairs" not in data["results"], "the page has them once"


def test_no_page_replaces_a_study(two):
    reports = [write_report(folder) for folder in two]
    study = two[0].parent / "study.toml"
    study.write_text('name = "mine"\n')
    for write in (lambda: write_report(two[0], study), lambda: write_studies(two, reports, study)):
        with pytest.raises(ConfigError, match=r"study\.toml exists and is another kind of file"):
            write()
    assert study.read_text() == 'name = "mine"\n'
