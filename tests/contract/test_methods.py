"""Every method keeps the promises that every method makes."""

import pytest

from coterie.methods import METHODS
from coterie.testing import check_method


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_method_keeps_the_contract(kind):
    check_method(METHODS[kind]())
