"""FedProx: who is drawn."""

import pytest
import torch

from coterie.methods.fedavg import FedAvg
from coterie.methods.fedprox import FedProx
from coterie.rng import Rng
from coterie.testing import run_method, tiny_settings


@pytest.mark.option("FedProx.sampling", "uniform", "samples")
def test_clients_are_drawn_uniformly_or_by_samples(uneven):
    """12, 11, ... 7 samples: the three largest of log n_k + Gumbel noise; uniformly, FedAvg's cohort."""
    for sampling in ("uniform", "samples"):
        method, differs = FedProx(sampling=sampling), 0
        shared = run_method(
            method, federation=uneven, settings=tiny_settings(rounds=0)
        ).state.shared
        for index in range(40):
            rng = Rng(0).at_round(index)
            found = method.select_cohort(shared, rng, 6, 3)
            plain = FedAvg().select_cohort(None, rng, 6, 3)
            noise = torch.from_numpy(rng.generator("cohort").gumbel(size=6))
            weight = (
                torch.arange(12.0, 6, -1).double().log()
                if sampling == "samples"
                else torch.zeros(6)
            )
            assert found.tolist() == sorted((noise + weight).argsort(descending=True)[:3].tolist())
            differs += not torch.equal(found, plain)
        assert (differs > 0) == (sampling == "samples")
