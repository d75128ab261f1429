"""The methods: one file each; the one line here that imports its methods builds them in.

METHODS is what the command line, study files, contract tests and pages read; methods of other
packages are found by `registry.find_method`.
"""

from inspect import isabstract as _isabstract

from coterie.methods.base import Method

# isort: off
from coterie.methods.apfl import Apfl as Apfl
from coterie.methods.cfl import Cfl as Cfl
from coterie.methods.dac import Dac as Dac, DacNoTwoHop as DacNoTwoHop, DacVar as DacVar
from coterie.methods.ditto import Ditto as Ditto
from coterie.methods.fedavg import FairAvg as FairAvg, FedAvg as FedAvg, FedAvgM as FedAvgM
from coterie.methods.feddrift import FedDrift as FedDrift
from coterie.methods.fedgwc import FedGwc as FedGwc
from coterie.methods.fedper import (
    DFedAlt as DFedAlt,
    FedBN as FedBN,
    FedPer as FedPer,
    FedRep as FedRep,
)
from coterie.methods.fedprox import FedProx as FedProx
from coterie.methods.fesem import FeSem as FeSem
from coterie.methods.fix_topology import FixTopology as FixTopology
from coterie.methods.ifca import Ifca as Ifca
from coterie.methods.local import Local as Local
from coterie.methods.oneshot import OneShot as OneShot
from coterie.methods.oracle import Oracle as Oracle
from coterie.methods.panm import PanmGrad as PanmGrad, PanmLoss as PanmLoss
from coterie.methods.pens import Pens as Pens
from coterie.methods.perfedavg import PerFedAvg as PerFedAvg
from coterie.methods.pfedme import PFedMe as PFedMe
from coterie.methods.pooled import Pooled as Pooled
from coterie.methods.ppdl import Ppdl as Ppdl
from coterie.methods.random_gossip import Random as Random
from coterie.methods.sosicfl import (
    SosicFl as SosicFl,
    SosicFlAll as SosicFlAll,
    SosicFlPlus as SosicFlPlus,
)
# isort: on

METHODS: dict[str, type[Method]] = {
    found.kind: found
    for found in [*globals().values()]
    if isinstance(found, type) and issubclass(found, Method) and not _isabstract(found)
}
"""Every built-in method by its kind."""
