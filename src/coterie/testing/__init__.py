"""Contract tests for methods and exchanges, and tiny federations to run them on: for your own methods too.

    from coterie.testing import check_method
    check_method(MyMethod())

Each check raises AssertionError with a sentence that says which promise is broken.
"""

from coterie.testing.exchanges import check_exchange
from coterie.testing.methods import check_method, follow, run_grouped
from coterie.testing.tiny import tiny_federation, tiny_settings

__all__ = ["check_exchange", "check_method", "follow", "run_grouped", "tiny_federation", "tiny_settings"]
