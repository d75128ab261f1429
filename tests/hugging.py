"""transformers and peft, imported where torchvision may have been built for another PyTorch."""

import copy
import importlib
import importlib.util
import warnings

import pytest
import torch

from coterie.data.federation import TRAIN

_LIBRARY = None
if importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    # transformers imports torchvision. Where that was built for another PyTorch, the two operators
    # that it asks for on import are declared first.
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torchvision")


def attach_lora(module, rank=4, **given):
    """A model of peft, as `get_peft_model` makes it, without what peft says of deprecated names."""
    peft = importlib.import_module("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(module, peft.LoraConfig(r=rank, **given))


def require_peft():
    """The package peft; the test is skipped where it is missing."""
    return pytest.importorskip("peft")


def run_fedavg_plainly(module, data, mean_loss, rounds, rate):
    """FedAvg with one step of SGD on all training samples of a client in each round.

    `mean_loss(module, client)` is the mean of the losses of a client's training samples.
    """
    module = copy.deepcopy(module).train()
    trained = [one for one in module.parameters() if one.requires_grad]
    numbers = torch.tensor([float((one == TRAIN).sum()) for one in data.split])
    for _ in range(rounds):
        start, ends = [one.detach().clone() for one in trained], []
        for client in range(len(numbers)):
            for one, value in zip(trained, start, strict=True):
                one.data.copy_(value)
            optimizer = torch.optim.SGD(trained, rate)
            optimizer.zero_grad()
            mean_loss(module, client).backward()
            optimizer.step()
            ends.append([one.detach().clone() for one in trained])
        shares = numbers / numbers.sum()
        for place, one in enumerate(trained):
            each = (share * end[place] for share, end in zip(shares, ends, strict=True))
            one.data.copy_(sum(each))
    return module
