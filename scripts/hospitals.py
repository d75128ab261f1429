r"""Write docs/reference/four-hospitals.md: the results of the stored studies of hospitals and their limits.

    coterie run four-hospitals --workers 2 && python scripts/stored.py keep runs/four-hospitals
    coterie run flamby-heart-disease && python scripts/stored.py keep runs/flamby-heart-disease
    coterie run flamby-heart-disease --set data.options.scale=together --set 'name="flamby-heart-disease-together"' \
        --set 'methods=[{kind="pooled",label="Pooled",rounds=1,steps="none",epochs=50,optimizer="adam"}]'
    python scripts/stored.py keep runs/flamby-heart-disease-together
    python scripts/hospitals.py               (`--check` only says whether the page is up to date)

No number of the tables is typed. FLamby's are in published.csv in the folder of the stored study, from the
results of five seeds in its repository.
"""

import csv
import json
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from _pages import REFERENCE, STORED, markdown, table, write
from stored import told

from coterie.data import heart_disease
from coterie.functional.paired import (
    CONFIDENCE,
    Estimate,
    correct_holm,
    mean_difference,
    overlap_from_share,
)
from coterie.results.tables import TextTable

PAGE = REFERENCE / "four-hospitals.md"
HOSPITALS = ("cleveland", "hungary", "long-beach-va", "switzerland")
SHOWN = {
    "accuracy": ("accuracy, %", 100, 1),
    "auroc": ("AUROC", 100, 1),
    "brier": ("Brier score", 100, 2),
}
"""Title, factor and decimals of the metrics; AUROC and Brier score are in hundredths."""
SIGN = {"accuracy": 1, "auroc": 1, "brier": -1}
FOLDS = 5

HEAD = """<!-- made by scripts/hospitals.py; do not edit -->
# Four hospitals: what the study says

`coterie run four-hospitals` trains a logistic regression on whether a patient has heart disease, at four hospitals,
in under a minute on two cores that have nothing else to do. The data are bundled: 920 patients of
Cleveland, Hungary (Budapest), Switzerland
(Zurich and Basel) and Long Beach, of 1988 (Janosi, Steinbrunn, Pfisterer, Detrano, [doi
10.24432/C52P4X](https://doi.org/10.24432/C52P4X), [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/)). They
are too old and too few to say anything of patients today; they are a real federation, where the hospitals differ in
their patients, in how many are ill and in what they measure.

{patients}

Each hospital fills what is missing and standardizes by its own training rows; an entry of the input says what was
missing. *Pooled* is a reference, not a method between hospitals: one model, trained on the rows of all, each filled
and scaled by its hospital.

## How it is measured

Five folds, five times: 25 seeds. In each five, every patient is tested once, by a model that was trained (and chosen,
on a fifth of the rest) without that patient; folds have ill and healthy in the hospital's share. Values are means of
the folds. AUROC is that of each fold, averaged: a mean over all predictions of a division would compare the outputs
of five models that are on no common scale. Of the {well} healthy patients of Switzerland each fold tests one or two,
which is why its AUROC says little. The expected calibration error, which the study also reports, is too large with so
few patients in 15 bins; the Brier score is the better word on calibration here.

The 25 folds are not 25 experiments: training sets overlap, and the patients are the same five times. Intervals are
Student's with the variance of the mean taken as (1/25 + 1/4) times that of the folds' differences, as Nadeau and
Bengio ([2003](https://doi.org/10.1023/A:1024068626366)) propose: 1/4 is the size of a test set over that of its
training set. That is 7.25 times the variance of independent folds, 2.7 times the width, and the intervals still speak
of these hospitals alone. `coterie compare` and the report take the same intervals. A difference is
established after Holm's correction for the number of methods in a column; the number of columns and tables is not
corrected for.
"""

FLAMBY = """## FLamby's protocol

`coterie run flamby-heart-disease` repeats Fed-Heart-Disease of [FLamby](https://arxiv.org/abs/2210.04620): 740
patients without missing values in 10 columns (13 entries), the split of its code (the same patients: 199, 172, 85 and
30 to train with, 104, 89, 45 and 16 to test), logistic regression with one output, batches of 4. Pooled and local
training take 50 epochs of Adam, federated training 15 rounds of 100 steps of SGD, all with a step size of 0.001. Test
accuracy in %, mean and standard deviation over five seeds; FLamby's are those of the results in its repository.
"""

DIFFERENT = """\
* *Pooled* differs because FLamby scales the training rows by those of all hospitals, and then tests each hospital on
  rows that are scaled by its own. With that, our numbers are those of the row below it (`--set
  data.options.scale=together`). A patient more or less at Cleveland is 1.0 %, at Switzerland 6.3 %.
* *Local*: the model of each hospital on its own test set. FLamby also reports them on the other hospitals'.
* *FedAvg* and *FedProx* end near their first model after 1,500 small steps, so the seed decides much, at Switzerland
  most of all; their means differ by less than the deviation over seeds but for Hungary. Why Hungary is better here is
  not known: first models and the order of batches are drawn by other generators, and batches start again in every
  round here, while FLamby continues through its epoch. A `mu` of 0.01 changes nothing at such step sizes, here or
  there.
* FLamby's other strategies (Scaffold, FedAdam, FedYogi, FedAdagrad, Cyclic) have no counterpart here; Ditto and DAC
  have none there.
"""


def runs(name: str) -> list[dict]:
    """Return the values of each run of a stored study."""
    return json.loads((STORED / name / "runs.json").read_text("utf-8"))


def values(stored: Sequence[Mapping], metric: str) -> dict[str, np.ndarray]:
    """Return the values of each method: a row for each seed, a column for each hospital and one for their mean."""
    found: dict[str, list[list[float]]] = {}
    for run in sorted(stored, key=lambda run: run["seed"]):
        own = [run["clients"][metric][name] for name in HOSPITALS]
        found.setdefault(run["label"], []).append([*own, float(np.mean(own))])
    return {label: np.array(rows) for label, rows in found.items()}


def difference(own: np.ndarray, baseline: np.ndarray) -> Estimate:
    """Return the means of the differences over the folds, with intervals: of each hospital, and of their mean."""
    return mean_difference((own - baseline).T, overlap=overlap_from_share(1 / FOLDS))


def patients() -> str:
    """Return who the patients are, as a table."""
    rows = heart_disease.load_table()
    lines = []
    for name in HOSPITALS:
        own = rows[rows["hospital"] == name]
        missing = [
            f"{column} {100 * own[column].isna().mean():.0f} %"
            for column in own
            if own[column].isna().mean() > 0.3
        ]
        ill = int((own["disease"] == "yes").sum())
        lines.append(
            (name, len(own), ill, f"{100 * ill / len(own):.1f} %", ", ".join(missing) or "none")
        )
    return table(
        ("hospital", "patients", "ill", "", "missing in more than 30 % of the rows"), lines
    )


def results(stored: Sequence[Mapping], metric: str) -> str:
    """Return the means of the folds, as a table."""
    title, factor, digits = SHOWN[metric]
    rows = [
        (label, *(f"{factor * one:.{digits}f}" for one in found.mean(0)))
        for label, found in values(stored, metric).items()
    ]
    return table((title, *HOSPITALS, "mean of four"), rows)


def gains(
    stored: Sequence[Mapping], metric: str, baseline: str
) -> tuple[str, list[tuple[str, str, bool]]]:
    """Return the gains over a method, as a table, and where an interval does not hold 0: method, hospital, better."""
    title, factor, digits = SHOWN[metric]
    found = {label: SIGN[metric] * factor * own for label, own in values(stored, metric).items()}
    compared = {
        label: difference(own, found[baseline]) for label, own in found.items() if label != baseline
    }
    corrected = correct_holm(np.array([one.p for one in compared.values()]).T).T
    rows, told_apart, bold = [], [], set()
    for row, (label, one) in enumerate(compared.items()):
        halves = (one.high - one.low) / 2
        rows.append(
            (
                label,
                *(
                    f"{m:+.{digits}f} ± {h:.{digits}f}"
                    for m, h in zip(one.mean, halves, strict=True)
                ),
            )
        )
        for place, name in enumerate((*HOSPITALS, "the mean of four")):
            if corrected[row, place] <= 1 - CONFIDENCE:
                told_apart.append((label, name, one.mean[place] > 0))
                bold.add((row, place + 1))
    head = (f"{title}: gain over {baseline}", *HOSPITALS, "mean of four")
    return markdown(TextTable("", head, rows, strong=bold)), told_apart


def words(found: Sequence[tuple[str, str, bool]], what: str) -> str:
    """Say which gains and losses are established."""
    parts = []
    for better in (True, False):
        by_method: dict[str, list[str]] = {}
        for label, name, side in found:
            if side == better:
                by_method.setdefault(label, []).append(name)
        parts += [
            f"{label} {'gains' if better else 'loses'} at {' and '.join(names)}"
            for label, names in by_method.items()
        ]
    return (
        f"{what}: {'; '.join(parts)}." if parts else f"{what}: no gain and no loss is established."
    )


def readme() -> str:
    """Return the gains in accuracy and AUROC over Local, as README shows them."""
    stored, rows = runs("four-hospitals"), []
    found = {metric: values(stored, metric) for metric in ("accuracy", "auroc")}
    for label, own in found["accuracy"].items():
        means = [f"{100 * one:.1f}" for one in own.mean(0)[:-1]]
        cells = []
        for metric in found:
            one = difference(100 * found[metric][label], 100 * found[metric]["Local"])
            half = (one.high - one.low)[-1] / 2
            cells.append("" if label == "Local" else f"{one.mean[-1]:+.1f} ± {half:.1f}")
        rows.append((label, *means, *cells))
    head = ("test accuracy, %", *HOSPITALS, "gain over Local", "in AUROC, hundredths")
    said = "Gains are means over the four, with 95 % intervals that account for overlapping folds."
    return f"{table(head, rows)}\n\n{said}\n"


def flamby() -> str:
    """Return our results with FLamby's protocol and its published ones, as a table."""
    own = values(runs("flamby-heart-disease"), "accuracy")
    together = values(runs("flamby-heart-disease-together"), "accuracy")
    published: dict[str, dict[str, list[float]]] = {}
    with (STORED / "flamby-heart-disease/published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            published.setdefault(row["method"], {}).setdefault(row["hospital"], []).append(
                float(row["accuracy"])
            )

    def cells(columns: Sequence[Sequence[float]]) -> list[str]:
        return [f"{100 * np.mean(one):.1f} ± {100 * np.std(one):.1f}" for one in columns]

    def theirs(label: str) -> list[str]:
        if label == "Local":
            order = {"cleveland": 0, "hungary": 1, "switzerland": 2, "long-beach-va": 3}
            return cells([published[f"Local {order[name]}"][name] for name in HOSPITALS])
        return cells([published[label][name] for name in HOSPITALS])

    names = {
        "Pooled": "Pooled Training",
        "Local": "Local",
        "FedAvg": "FedAvg100",
        "FedProx": "FedProx100",
    }
    rows = []
    for label, found in own.items():
        rows.append((label, "Coterie", *cells(found.T[:-1])))
        if label == "Pooled":
            rows.append((label, "Coterie, scaled together", *cells(together["Pooled"].T[:-1])))
        if label in names:
            rows.append((label, "FLamby", *theirs(names[label])))
    return table(("method", "", *HOSPITALS), rows)


def told_of(name: str) -> str:
    """Return where a stored study comes from."""
    origin = json.loads((STORED / name / "origin.json").read_text("utf-8"))
    machine, took = origin["machine"], origin.get("elapsed_s", origin["wall_s"])
    return (
        f"`{name}`: {origin['runs']} runs, {took:.0f} s on {machine['cores']} {machine['machine']} cores that had "
        f"nothing else to do, from the first file to the summary. {told(name, origin)}"
    )


def page() -> str:
    """Return the page."""
    stored = runs("four-hospitals")
    well = int(
        (
            (rows := heart_disease.load_table())["hospital"].eq("switzerland")
            & rows["disease"].eq("no")
        ).sum()
    )
    parts = [HEAD.format(patients=patients(), well=well), "## Results\n"]
    parts += [results(stored, metric) + "\n" for metric in SHOWN]
    parts.append(
        "AUROC and Brier score are in hundredths; of the Brier score, the squared error of the predicted"
    )
    parts.append("probability, lower is better.\n")
    parts.append("## Who gains, who loses\n")
    parts.append("Above 0 is better. Bold differences are established.\n")
    lines = []
    for baseline in ("Local", "Pooled"):
        for metric, (title, *_) in SHOWN.items():
            text, found = gains(stored, metric, baseline)
            parts.append(text + "\n")
            lines.append(f"* {words(found, f'{title.partition(chr(44))[0]}, over {baseline}')}")
    parts += ["In words:\n", *lines, ""]
    parts.append(CANNOT)
    parts += [FLAMBY, flamby() + "\n", DIFFERENT, "## Where the numbers come from\n"]
    names = ("four-hospitals", "flamby-heart-disease", "flamby-heart-disease-together")
    parts += [f"* {told_of(name)}" for name in names]
    return "\n".join(parts) + "\n"


CANNOT = """What this study cannot show:

* Whether a gain or loss that is not bold is real: with these patients, an interval for one hospital is several points
  wide, so that differences of a point would need many more patients. More seeds do not help, since they are of the
  same patients.
* Anything of AUROC at Switzerland, where eight patients are healthy, beyond tens of points.
* Which model to use: the logistic regression was chosen because it can be read; its learning rate by the validation
  rows of the first five folds, with Local, FedAvg, Ditto, DAC and Pooled alike (`coterie tune four-hospitals` does
  that for every method). Nothing else was tuned: the `mu` of FedProx, 0.1, is one of the values that its paper tries.
* Whether one model for all, as FedAvg's, predicts worse than Local where most are ill, and why: the means say so, and
  one intercept for hospitals that differ in the share of ill patients would be a reason, since it ranks patients as
  well (AUROC); neither is established here.
"""


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
