"""Coterie: personalised decentralised and clustered federated learning under distribution shift.

The public names, and nothing else. Each is loaded when it is first used, so that importing the package stays light.
"""

import importlib
from typing import Any

_HOME = {
    "METHODS": "coterie.methods",
    "Dac": "coterie.methods.dac",
    "DacNoTwoHop": "coterie.methods.dac",
    "DacVar": "coterie.methods.dac",
    "FixTopology": "coterie.methods.fix_topology",
    "PanmGrad": "coterie.methods.panm_grad",
    "PanmLoss": "coterie.methods.panm_loss",
    "Pens": "coterie.methods.pens",
    "Local": "coterie.methods.local",
    "LocalTraining": "coterie.task",
    "Oracle": "coterie.methods.oracle",
    "Settings": "coterie.settings",
    "StudyConfig": "coterie.config",
    "load_study": "coterie.config",
    "run_study": "coterie.study",
    "resume_study": "coterie.study",
    "simulate": "coterie.run",
    "write_report": "coterie.report",
    "Federation": "coterie.federation",
    "DataConfig": "coterie.data",
    "Exchange": "coterie.exchange",
    "Inbox": "coterie.exchange",
    "InMemory": "coterie.exchange",
    "Message": "coterie.exchange",
    "Method": "coterie.methods.base",
    "PeerMethod": "coterie.methods.base",
    "Random": "coterie.methods.random_gossip",
    "Rng": "coterie.rng",
    "Round": "coterie.methods.base",
    "State": "coterie.methods.base",
    "TestSet": "coterie.federation",
    "Truth": "coterie.federation",
    "build_federation": "coterie.data",
}

_NAMES = {"load_study": "load"}  # names that say more here than in their module

__version__ = "0.1.0"
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    return __all__
