"""Averages of models that began apart, with the spread of their weights kept."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coterie._util.settings import Configurable
from coterie.errors import ConfigError
from coterie.functional.aggregation import ReceivedModels, average_models, view_tensors


@dataclass(frozen=True)
class VarianceCorrected(Configurable):
    r"""The mean, with each weight matrix spread as widely as those of the models that it merges.

    The mean of $K$ unrelated matrices has a $K$-th of their variance: layers that were initialized
    so that signals keep their size lose them. Each matrix or kernel $\bar W$ of the mean becomes
    $\mu + (\bar W - \mu) \sqrt{\sum_k w_k \operatorname{var} W_k / \operatorname{var} \bar W}$,
    with $\mu$ the mean of its entries. Of models that agree the factor is 1. Biases, scales and
    statistics of normalizations are averaged.

    Tian, Al-Ars, Kitsak, Hofstee, Vanishing variance problem in fully decentralized neural-network
    systems, 2024, https://arxiv.org/abs/2404.04616.
    """

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Raises:
            ConfigError: when no tensor has two axes: there is nothing to correct.

        Example:
            >>> from coterie.models.layout import Slot
            >>> models = torch.tensor([[1.0, -1.0, 3.0], [-1.0, 1.0, 5.0], [1.0, -1.0, 4.0]])
            >>> slots = [Slot("weight", (1, 2), 0, 2), Slot("bias", (1,), 2, 3)]
            >>> received = ReceivedModels(models, torch.ones(3), None, models[0], slots)
            >>> VarianceCorrected()(received)
            tensor([ 1., -1.,  4.])
        """
        slots = [slot for slot in received.slots if len(slot.shape) > 1]
        if not slots:
            raise ConfigError(
                "aggregation 'variance-corrected' corrects weight matrices, and no shared tensor "
                "is one; use the mean"
            )
        merged = average_models(received.models, received.shares)
        for name, mean in view_tensors(merged, slots).items():
            widths = received.tensors[name].double().flatten(1).var(dim=1, correction=0)
            spread = mean.double().var(correction=0)
            wanted = (received.shares * widths).sum()
            # A mean whose entries are all equal has no direction to be spread in.
            if float(spread) > 0:
                center = mean.double().mean()
                mean.copy_(center + (mean.double() - center) * torch.sqrt(wanted / spread))
        return merged
