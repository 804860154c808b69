"""What a training step must compute, counted."""

from __future__ import annotations

from fastbert.config import BertConfig


def training_flops(config: BertConfig, num_tokens: int, sum_squares: int, num_masked: float) -> float:
    """Model FLOPs of forward + backward (a multiply-add is 2; nothing for padding or recomputation).

    `sum_squares` is the sum of the squared sequence lengths: attention costs 12 · L · h · s a token.
    """
    h, layers = config.hidden_size, config.num_hidden_layers
    linear = 6 * layers * (4 * h * h + 2 * h * config.intermediate_size)
    attention = 12 * layers * h * sum_squares
    head = 6 * num_masked * (h * config.vocab_size + h * h)
    return linear * num_tokens + attention + head
