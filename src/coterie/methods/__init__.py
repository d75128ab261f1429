"""The methods: one file each; METHODS is the list that the command line, study files and contract tests read."""

from coterie.methods.base import Method
from coterie.methods.cfl import Cfl
from coterie.methods.dac import Dac, DacNoTwoHop, DacVar
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FairAvg, FedAvg, FedAvgM
from coterie.methods.fedgwc import FedGwc
from coterie.methods.fedprox import FedProx
from coterie.methods.fesem import FeSem
from coterie.methods.fix_topology import FixTopology
from coterie.methods.ifca import Ifca
from coterie.methods.local import Local
from coterie.methods.oneshot import OneShot
from coterie.methods.oracle import Oracle
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.methods.pens import Pens
from coterie.methods.random_gossip import Random
from coterie.methods.sosicfl import SosicFl, SosicFlAll, SosicFlPlus

METHODS: dict[str, type[Method]] = {
    method.kind: method
    for method in (
        Local,
        Random,
        Oracle,
        FixTopology,
        Dac,
        DacVar,
        DacNoTwoHop,
        Pens,
        PanmLoss,
        PanmGrad,
        FedAvg,
        FedAvgM,
        FedProx,
        FairAvg,
        Ditto,
        Ifca,
        FeSem,
        Cfl,
        FedGwc,
        SosicFl,
        SosicFlAll,
        SosicFlPlus,
        OneShot,
    )
}
"""Every method by its kind."""
