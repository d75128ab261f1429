"""The methods, one file each, and METHODS: the list that the command line, study files and contract tests read."""

from coterie.methods.base import Method
from coterie.methods.fix_topology import FixTopology
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.random_gossip import Random

METHODS: dict[str, type[Method]] = {
    method.kind: method
    for method in (
        Local,
        Random,
        Oracle,
        FixTopology,
    )
}
"""Every method by its kind."""
