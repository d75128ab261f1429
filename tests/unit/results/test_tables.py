import numpy as np
import pytest
from scipy import stats

from coterie.functional.metrics import ACCURACY
from coterie.results import tables
from coterie.results.pairs import Pair
from coterie.results.tables import TextTable, format_latex, format_markdown


def pair(a, b, established, **more):
    numbers = {"difference": 0.02, "low": 0.01, "high": 0.03, "p": 0.01, "p_corrected": 0.03, "effect": 1.5,
               "gained": 0.7, "lost": 0.3, "seeds": 4, "clients": 20, "seeds_needed": 6}  # fmt: skip
    return Pair(a, b, "accuracy", "all", established=established, **{**numbers, **more})


def rows(**means):
    return [
        {"method": label.lower(), "label": label, "cluster": "all", "metric": "accuracy", "mean": mean, "std": 0.01,
         "seeds": 4}
        for label, mean in means.items()
    ]  # fmt: skip


def test_a_mean_has_the_interval_of_its_seeds():
    values = np.array([0.5, 0.6, 0.8])
    expected = stats.ttest_1samp(values, 0.0).confidence_interval()
    found = tables.compute_mean_interval({"mean": values.mean(), "std": values.std(), "seeds": 3})
    assert found == pytest.approx((expected.low, expected.high))
    assert tables.compute_mean_interval({"mean": 0.5, "std": None, "seeds": 1}) is None


def test_seeds_that_gave_the_same_have_no_interval():
    """Three of them are no certainty about others; the deviation may be rounding."""
    for std in (0.0, 1e-17):
        assert tables.compute_mean_interval({"mean": 0.1, "std": std, "seeds": 3}) is None


def test_the_interval_of_a_mean_over_folds_is_widened_as_those_of_pairs():
    """Five folds: variance 1/4 + 1/4 in place of 1/4 of four seeds, so that the interval is wider by the root of 2."""
    (own,) = rows(A=0.5)
    half = 3.182446 * 0.01 / 3**0.5  # Student's quantile with 3 degrees of freedom
    wider = half * 2**0.5
    assert tables.compute_mean_interval(own) == pytest.approx((0.5 - half, 0.5 + half))
    found = tables.compute_mean_interval(own, overlap=0.25)
    assert found == pytest.approx((0.5 - wider, 0.5 + wider))
    other = {**own, "label": "B"}
    table = tables.build_means_table(
        [own, other], [pair("A", "B", False, overlap=0.25)], ACCURACY, "t", {}
    )
    assert table.rows[0][2] == f"50.00 ({50 - 100 * wider:.2f} to {50 + 100 * wider:.2f})*"


def test_only_what_is_established_is_bold():
    table = tables.build_means_table(
        rows(A=0.8, B=0.78, C=0.5), [pair("A", "B", True), pair("A", "C", True)], ACCURACY, "t", {}
    )
    assert (table.strong, table.foot) == ({(0, 2)}, tables.BEST)
    table = tables.build_means_table(
        rows(A=0.8, B=0.78, C=0.5), [pair("A", "B", False), pair("A", "C", True)], ACCURACY, "t", {}
    )
    assert (table.strong, table.foot) == (set(), tables.SAME)
    assert [row[2].endswith("*") for row in table.rows] == [True, True, False]
    shown = tables.build_pairs_table([pair("A", "B", False), pair("A", "C", True)], ACCURACY)
    assert shown.strong == {(1, 1)}
    assert shown.rows[1] == ("A over C", "+2.0 (1.0 to 3.0)", "0.030", "1.50", "70 %", "yes")
    assert "corrected for 2 pairs" in shown.foot


def test_a_pair_without_an_interval_has_dashes():
    none = dict.fromkeys(("low", "high", "p", "p_corrected", "effect", "seeds_needed"))
    table = tables.build_pairs_table([pair("A", "B", False, seeds=1, **none)], ACCURACY)
    assert table.rows[0] == ("A over B", "+2.0", "–", "–", "70 %", "no")
    assert table.title.endswith("one seed")
    assert table.foot == ""


def test_markdown_and_latex_escape_what_has_a_meaning_there():
    table = TextTable(
        "t\nt", ("a_b", "c"), [("50 % & {x}", "-1.5 ± 2"), ("p|q*", "<0.001")], "100 %", {(0, 1)}
    )
    assert format_markdown(table).splitlines()[2:4] == [
        "| 50 % & {x} | **-1.5 ± 2** |",
        r"| p\|q\* | <0.001 |",
    ]
    assert format_latex(table).splitlines() == [
        "% t t", r"\begin{tabular}{lr}", r"\toprule", r"a\_b & c \\", r"\midrule",
        r"50 \% \& \{x\} & \textbf{$-$1.5 $\pm$ 2} \\", r"p|q* & $<$0.001 \\", r"\bottomrule", r"\end{tabular}",
        "% 100 %",
    ]  # fmt: skip


def test_a_column_over_fewer_seeds_says_so():
    """A cluster that one of four seeds plants: n of the row is 4, that of the cell 1."""
    (own,) = rows(A=0.5)
    north = {**own, "cluster": "north", "mean": 0.25, "std": None, "seeds": 1}
    table = tables.build_means_table([north, own], [], ACCURACY, "t", {})
    assert table.rows[0][:3] == ["A", "4", "25.00 (n 1)"]
    assert "(n" not in table.rows[0][3]


def test_names_of_clusters_stay_text_in_markdown():
    """Tags would vanish, so that two clusters had one name; a p value and an ordinary name stay as they are."""
    head = ("method", "<b>A</b>", "ward_1", "*x*", "two\nlines")
    lines = format_markdown(TextTable("t", head, [("Fed_avg (2)", "<0.001", "`<n>`")])).splitlines()
    assert lines[0] == r"| method | \<b>A\</b> | ward_1 | \*x\* | two lines |"
    assert lines[2] == "| Fed_avg (2) | <0.001 | `<n>` |"
    # A star at the beginning of a line is a list.
    foot = format_markdown(TextTable("t", ("a",), [("1*",)], tables.SAME)).splitlines()[-1]
    assert foot == r"\* cannot be distinguished from the best of its column."
