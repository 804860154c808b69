"""torch.compile of pre-training, in place: parameters keep their names, and checkpoints do, too.

For inference `torch.compile(model)` is all there is to it: a model is one graph, from a padded batch too, for
any number of tokens. (Only labels of tokens beside an attention mask break it: they decide what is computed.)
"""

from __future__ import annotations

import torch

from fastbert.errors import UserError
from fastbert.modeling import BertForPreTraining

BACKEND = "inductor"


def compile_losses(model: BertForPreTraining) -> None:
    """Let `model.loss_parts` run through torch.compile from its next call on, forward and backward.

    Training and evaluation are compiled once each, for batches of one shape. UserError with the reason,
    before anything is changed, if torch.compile does not work here.
    """
    problem = compiler_problem(model.device)
    if problem:
        raise UserError(f"--compile cannot be used here ({problem}): leave it out")
    model.loss_parts = torch.compile(model.loss_parts, backend=BACKEND)  # type: ignore[method-assign]


def compiler_problem(device: torch.device) -> str:
    """Why torch.compile does not work on the device, or "". Compiles a sum to find out: some seconds."""
    try:
        torch.compile(lambda x: x + x, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # whatever compilers and drivers raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0].rstrip(".:") if lines else type(error).__name__
    return ""
