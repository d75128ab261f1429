"""transformers and peft, imported where torchvision may have been built for another PyTorch."""

import importlib
import importlib.util
import warnings

import torch

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
