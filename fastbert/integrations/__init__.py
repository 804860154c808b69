"""The engine inside models that other libraries made: transformers and sentence-transformers.

    from fastbert.integrations import accelerate

    model = SentenceTransformer("all-MiniLM-L6-v2")  # or AutoModelFor….from_pretrained(…), a PEFT model, …
    accelerate(model)                                # the same object, now without computing padding

None of these libraries is imported before a model of theirs is given.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` did: names are those of `model.named_modules()`, "" for the model itself."""

    model: nn.Module
    accelerated: tuple[str, ...]  # every BERT of the model that now runs without padding
    left: dict[str, str]  # every transformers model that does not, with the reason

    def restore(self) -> None:
        """Give the model transformers' own code back."""
        restore(self.model)


def accelerate(model: nn.Module) -> Acceleration:
    """Let every BERT inside `model` compute kept tokens only, in place.

    `model` is a transformers BERT of any head, a SentenceTransformer, a CrossEncoder, a PEFT model, or any
    module that holds one; weights, parameters, API and `state_dict` stay the same objects, and only the
    classes of the encoder, its layers and token-level heads change (to subclasses of their own). Calling it
    again changes nothing more. Outputs equal transformers' at every kept token and in what is pooled, with
    padding on either side. Where nothing reads them, positions at padding are not computed: hidden states are
    0 there, and question-answering logits the least number of their dtype, so that they take no part in the
    softmax. A token that has a label is computed even at padding, as long as the label is an argument of the
    head.

    What cannot be taken over (another architecture, a decoder, cross attention, relative positions) is left
    as it is, with one warning that names the reason; `left` of the returned value has it, too. Left to
    transformers for the call in question are attention maps, masks that depend on the query, traced and
    exported models, and a layer whose inner modules were replaced or carry hooks. A hook on a whole layer
    sees the padded tensors that it expects.
    """
    from fastbert.integrations import transformers_bert

    accelerated, left = transformers_bert.take_over(model)
    for name, reason in left.items():
        warnings.warn(f"{name or type(model).__name__} is left as it is: {reason}", stacklevel=2)
    return Acceleration(model, tuple(accelerated), left)


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module of `model` has its own class again. Harmless where nothing was done."""
    from fastbert.integrations import transformers_bert

    transformers_bert.give_back(model)
