"""Contract tests for methods and exchanges, your own included, and tiny federations to run them on.

    from coterie.testing import check_method
    check_method(MyMethod())

Each check raises AssertionError with a sentence that names the broken guarantee.
"""

from coterie.testing.exchanges import check_exchange
from coterie.testing.methods import check_method, follow, run_grouped
from coterie.testing.tiny import TinyTokens, tiny_federation, tiny_settings

__all__ = ["TinyTokens", "check_exchange", "check_method", "follow", "run_grouped", "tiny_federation", "tiny_settings"]
