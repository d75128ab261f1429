"""Coterie: personalized decentralized and clustered federated learning under distribution shift.

The public names, and nothing else. Each is loaded when it is first used, so that importing the package stays light;
`__init__.pyi` says the same to type checkers.
"""

import importlib
from typing import Any

_HOME = {
    "load_study": "coterie.studies.config",
    "DataConfig": "coterie.data.build",
    "build_federation": "coterie.data.build",
    "StudyConfig": "coterie.studies.definition",
    "make_study": "coterie.studies.definition",
    "CoterieError": "coterie.errors",
    "Exchange": "coterie.exchange.base",
    "Faulty": "coterie.exchange.faulty",
    "InMemory": "coterie.exchange.in_memory",
    "Inbox": "coterie.exchange.base",
    "Message": "coterie.exchange.base",
    "Federation": "coterie.data.federation",
    "TestSet": "coterie.data.federation",
    "from_arrays": "coterie.data.arrays",
    "from_dataset": "coterie.data.arrays",
    "from_datasets": "coterie.data.arrays",
    "Truth": "coterie.data.federation",
    "METHODS": "coterie.methods",
    "Method": "coterie.methods.base",
    "PeerMethod": "coterie.methods.base",
    "Round": "coterie.methods.base",
    "State": "coterie.methods.base",
    "Cfl": "coterie.methods.cfl",
    "Dac": "coterie.methods.dac",
    "DacNoTwoHop": "coterie.methods.dac",
    "DacVar": "coterie.methods.dac",
    "Ditto": "coterie.methods.ditto",
    "FairAvg": "coterie.methods.fedavg",
    "FedAvg": "coterie.methods.fedavg",
    "FedAvgM": "coterie.methods.fedavg",
    "FedGwc": "coterie.methods.fedgwc",
    "FedProx": "coterie.methods.fedprox",
    "FeSem": "coterie.methods.fesem",
    "FixTopology": "coterie.methods.fix_topology",
    "Ifca": "coterie.methods.ifca",
    "Local": "coterie.methods.local",
    "OneShot": "coterie.methods.oneshot",
    "Oracle": "coterie.methods.oracle",
    "PanmGrad": "coterie.methods.panm",
    "PanmLoss": "coterie.methods.panm",
    "Pens": "coterie.methods.pens",
    "Random": "coterie.methods.random_gossip",
    "SosicFl": "coterie.methods.sosicfl",
    "SosicFlAll": "coterie.methods.sosicfl",
    "SosicFlPlus": "coterie.methods.sosicfl",
    "write_report": "coterie.report.page",
    "plot": "coterie.papers.figures",
    "Rng": "coterie.rng",
    "Run": "coterie.simulation.run",
    "simulate": "coterie.simulation.run",
    "Settings": "coterie.simulation.settings",
    "Study": "coterie.studies.run",
    "resume_study": "coterie.studies.run",
    "run_study": "coterie.studies.run",
    "run_sweep": "coterie.studies.sweep",
    "LocalTraining": "coterie.engine.task",
    "Task": "coterie.engine.task",
}
_NAMES = {"load_study": "load"}  # names that say more here than in their module

__version__ = "0.1.0"
__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    return __all__
