"""Contract tests for pieces of your own, and tiny federations to run them on.

    from coterie.testing import check_method
    check_method(MyMethod())

Each check raises AssertionError with a sentence that names the broken guarantee.
"""

from coterie.testing.data import check_partition, check_shift
from coterie.testing.exchanges import check_exchange
from coterie.testing.losses import check_loss, check_metric
from coterie.testing.methods import check_method, run_grouped, run_method
from coterie.testing.models import check_model
from coterie.testing.rules import check_aggregation, check_selection
from coterie.testing.tiny import TinyTokens, tiny_federation, tiny_settings, tiny_source
from coterie.testing.transports import check_transport

__all__ = [
    "TinyTokens",
    "check_aggregation",
    "check_exchange",
    "check_loss",
    "check_method",
    "check_metric",
    "check_model",
    "check_partition",
    "check_selection",
    "check_shift",
    "check_transport",
    "run_grouped",
    "run_method",
    "tiny_federation",
    "tiny_settings",
    "tiny_source",
]
