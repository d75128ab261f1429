"""A table with text, empty cells and 3 to 2,000 rows a client: hospitals of very different sizes."""

import numpy as np
import pandas as pd
from torch import nn

import coterie

stream = np.random.default_rng(0)
rows = {"Łódź": 3, "São Paulo": 40, "東京": 300, "Nairobi": 2000}
table = pd.DataFrame({"hospital": np.repeat(list(rows), list(rows.values()))})
table["age"] = stream.normal(60, 12, len(table)).round()
table["smoker"] = stream.choice(["never", "former", "current"], len(table))
table["pressure"] = stream.normal(130, 15, len(table))
risk = 0.05 * (table["age"] - 60) + (table["smoker"] == "current") + 0.02 * (table["pressure"] - 130)
table["outcome"] = np.where(risk + stream.normal(0, 0.5, len(table)) > 0.3, "ill", "well")
table.loc[stream.random(len(table)) < 0.1, "pressure"] = np.nan  # not measured

# Coterie
federation = coterie.from_table(table, target="outcome", client="hospital", impute="median", scale="standard")
network = nn.Sequential(nn.Linear(len(federation.feature_names), 16), nn.ReLU(), nn.Linear(16, 2))
settings = coterie.Settings(rounds=5, metrics=["auroc", "balanced_accuracy"])
run = coterie.simulate(federation, coterie.METHODS["fedavg"](), model=network, settings=settings)
print(federation, run, sep="\n")
