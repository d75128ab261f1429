"""Local."""

import torch

from coterie.methods.local import Local


def test_local_never_reads_and_merges_nothing(play):
    """Invariant 5: rounds of Local are local training alone."""
    run = play(Local())
    state, info = run.exchange()
    assert torch.equal(state.params, run.state.params)
    assert not info
