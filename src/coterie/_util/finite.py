"""Which rows of a table hold a NaN or an infinity."""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def not_finite(rows: Shaped[Tensor, "clients ..."]) -> Bool[Tensor, " clients"]:
    """Return, on the CPU, which rows hold a NaN or an infinity.

    Entries are checked only where the row's sum is not finite.
    """
    if rows.dim() == 1:
        return ~torch.isfinite(rows).cpu()
    # A sum shows a NaN or an infinity in one pass, but may also overflow by itself.
    rows = rows.flatten(1)
    lost = ~torch.isfinite(rows.sum(1)).cpu()
    if bool(lost.any()):
        suspect = lost.nonzero().flatten().to(rows.device)
        lost[suspect.cpu()] = ~torch.isfinite(rows[suspect]).all(1).cpu()
    return lost
