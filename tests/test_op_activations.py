"""Activations by name, the feed-forward half, the norm and the embedding lookups."""

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from fastbert import ops


# values of the erf and the tanh form; the two differ by up to 4.7e-4
@pytest.mark.parametrize(
    ("hidden_act", "expected"),
    [
        ("gelu", [0.84134475, 2.69063917, -0.00936083, -0.15426877]),
        ("gelu_new", [0.84119199, 2.69111241, -0.00888759, -0.15428599]),
        ("gelu_pytorch_tanh", [0.84119199, 2.69111241, -0.00888759, -0.15428599]),
        ("relu", [1.0, 2.7, 0.0, 0.0]),
    ],
)
def test_activation_values(hidden_act, expected):
    x = torch.tensor([[1.0, 2.7, -2.7, -0.5]])
    y = ops.linear_act(x, torch.eye(4), torch.zeros(4), hidden_act)
    torch.testing.assert_close(y, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("hidden_act", sorted(ops.ACTIVATIONS))
def test_activation_and_its_derivative_match_transformers(hidden_act):
    x = torch.linspace(-6, 6, 241, dtype=torch.float64, requires_grad=True)
    ours, theirs = ops.activation(hidden_act)(x), ACT2FN[hidden_act](x)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_unknown_activation_is_an_error_and_a_function_is_taken():
    with pytest.raises(ValueError, match="hidden_act 'geluu' is not one of gelu"):
        ops.activation("geluu")
    assert ops.activation(torch.sin) is torch.sin


# a constant row: the variance is 0 and eps vanishes in half precision; a row of 300s: squares overflow fp16
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [3.0, 300.0])
def test_norm_of_a_constant_row_is_the_bias(dtype, value):
    x = torch.full((2, 768), value, dtype=dtype)
    weight, bias = torch.ones(768, dtype=dtype), torch.full((768,), 0.5, dtype=dtype)
    y = ops.dropout_add_norm(x, None, weight, bias, 1e-12)
    assert torch.equal(y, torch.full_like(y, 0.5))


def test_dropout_add_norm_matches_torch():
    x, residual = torch.randn(5, 33), torch.randn(5, 33)
    weight, bias = torch.randn(33), torch.randn(33)
    y = ops.dropout_add_norm(x, residual, weight, bias, 1e-5, dropout_p=0.3, training=False)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (33,), weight, bias, 1e-5))
    # all of x dropped: only the residual is left
    y = ops.dropout_add_norm(x, residual, weight, bias, 1e-5, dropout_p=1.0, training=True)
    torch.testing.assert_close(y, F.layer_norm(residual, (33,), weight, bias, 1e-5))


def test_embed_adds_three_rows_and_spares_the_padding_row():
    words, types, positions = (torch.randn(n, 4, requires_grad=True) for n in (7, 2, 5))
    ids, segments, places = torch.tensor([0, 6, 6]), torch.tensor([0, 1, 1]), torch.tensor([4, 0, 1])
    summed = ops.embed(ids, segments, places, words, types, positions, padding_idx=0)
    torch.testing.assert_close(summed[1], words[6] + types[1] + positions[0])
    summed.sum().backward()
    assert torch.equal(words.grad[0], torch.zeros(4))
    assert torch.equal(words.grad[6], torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("ids", "segments", "places", "message"),
    [
        ([7], [0], [0], "input_ids holds 7, the table has vocab_size = 7"),
        ([-1], [0], [0], "input_ids holds -1, the table has vocab_size = 7"),
        ([0], [2], [0], "token_type_ids holds 2, the table has type_vocab_size = 2"),
        ([0], [0], [5], "position_ids holds 5, the table has max_position_embeddings = 5"),
    ],
)
def test_ids_outside_a_table_are_named(ids, segments, places, message):
    tables = [torch.zeros(n, 4) for n in (7, 2, 5)]
    with pytest.raises(IndexError, match=message):
        ops.embed(*(torch.tensor(x) for x in (ids, segments, places)), *tables)
