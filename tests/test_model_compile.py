"""torch.compile(fullgraph=True) of every public function and of the model: equal to running without it."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastbert import ops
from fastbert.batch import PackedBatch
from fastbert.heads import BertForSequenceClassification
from fastbert.modeling import BertForPreTraining
from fastbert.ops import PaddedLayout, SequenceLayout, backend
from tests.packed_batches import make_batches
from tests.small_models import small_config, spread_weights

ATOL = 2e-5
HEADS, DIM = 2, 8
# traces, differentiates and runs operator by operator: as strict as inductor, and quick
QUICK = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_gradients(function, *inputs):
    """The result of function, and the gradients of a direction of it."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(1)
    out = function(*inputs)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return out.detach(), *torch.autograd.grad((out * direction).sum(), inputs)


def assert_equal_compiled(function, *inputs, compiler=QUICK):
    expected = with_gradients(function, *inputs)
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for ours, theirs in zip(with_gradients(compiled, *inputs), expected):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_varlen_attention(dropout_p):
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)

    def attend(qkv):
        return ops.varlen_attention(qkv, SequenceLayout.build(cu_seqlens, 5, qkv.shape[0]), dropout_p)

    assert_equal_compiled(attend, torch.randn(11, 3, HEADS, DIM))
    assert backend.last_run()["attention_backward"] == "eager"


@pytest.mark.parametrize("kind", ["none", "keys", "bool", "additive", "probabilities"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_padded_attention(kind, dropout_p):
    mask = {
        "none": None,
        "keys": torch.arange(10).view(2, 5) % 3 != 1,
        "bool": torch.ones(2, 1, 5, 5).tril().bool(),
        "additive": torch.randn(2, HEADS, 1, 5),
        "probabilities": torch.arange(10).view(2, 5) % 3 != 1,
    }[kind]

    def attend(qkv):
        layout = PaddedLayout.build(mask, 2, 5, qkv.device)
        context, probabilities = ops.padded_attention(qkv, layout, dropout_p, kind == "probabilities")
        return context if probabilities is None else torch.cat([context.flatten(), probabilities.flatten()])

    assert_equal_compiled(attend, torch.randn(2, 5, 3, HEADS, DIM))


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "modules"])
def test_qkv_projection(wrapped):
    linears = [nn.Linear(6, 8) for _ in range(3)]
    parameters = [p for linear in linears for p in linear.parameters()]

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    if wrapped:
        linears[1].__class__ = Doubled

    def project(x):
        return ops.qkv_projection(x, *linears, HEADS)

    x = torch.randn(2, 5, 6)
    assert_equal_compiled(project, x)
    gradients = []
    for function in (project, torch.compile(project, fullgraph=True, backend=QUICK)):
        gradients.append(torch.autograd.grad(function(x).square().sum(), parameters))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_runs_the_operators():
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    linears = [nn.Linear(6, HEADS * DIM) for _ in range(3)]

    def attend(x):
        qkv = ops.qkv_projection(x, *linears, HEADS)
        return ops.varlen_attention(qkv, SequenceLayout.build(cu_seqlens, 5, x.shape[0])).square()

    assert_equal_compiled(attend, torch.randn(11, 6), compiler="inductor")


def test_another_choice_of_backend_compiles_again():
    if backend.kernels_expected(torch.device("cpu")):
        pytest.skip("the interpreter runs kernels on a CPU")
    layout = SequenceLayout.build(torch.tensor([0, 4, 9], dtype=torch.int32), 5, 9)
    attend = torch.compile(lambda x: ops.varlen_attention(x, layout), fullgraph=True, backend="eager")
    qkv = torch.randn(9, 3, HEADS, DIM)
    expected = attend(qkv)
    with (
        backend.use("triton"),
        pytest.raises(Exception, match="attention cannot run on triton: tensors on a CPU"),
    ):
        attend(qkv)
    assert torch.equal(attend(qkv), expected)


# ---- the model --------------------------------------------------------------------------------------------


def small_model(**overrides):
    model = BertForPreTraining(small_config(**overrides))
    spread_weights(model)
    return model.train()


def parts_and_gradients(function, model, batch):
    torch.manual_seed(1)
    model.zero_grad()
    parts = function(batch)
    (parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count).backward()
    return parts, [p.grad.clone() for p in model.parameters()]


def assert_equal_losses(ours, theirs):
    for name in ("mlm_sum", "nsp_sum"):
        torch.testing.assert_close(getattr(ours[0], name), getattr(theirs[0], name), atol=ATOL, rtol=1e-6)
    for name in ("mlm_count", "mlm_correct", "nsp_count", "nsp_correct"):
        assert torch.equal(getattr(ours[0], name), getattr(theirs[0], name))
    for x, y in zip(ours[1], theirs[1]):
        torch.testing.assert_close(x, y, atol=ATOL, rtol=0)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_loss_parts(packed, dropout_p):
    model = small_model(attention_probs_dropout_prob=dropout_p, hidden_dropout_prob=dropout_p)
    # rows that no loss reads are computed in a graph only: with dropout, the rest would get other masks
    unread = {} if dropout_p else {"filler": 5, "empty_ends": 2, "unused_slots": 3}
    batch = make_batches([9, 7, 12], vocab_size=211, **unread)[0 if packed else 1]
    compiled = torch.compile(model.loss_parts, fullgraph=True, backend=QUICK)
    theirs = parts_and_gradients(model.loss_parts, model, batch)
    assert_equal_losses(parts_and_gradients(compiled, model, batch), theirs)
    # another batch of the same shapes compiles nothing
    shuffled = batch.input_ids.flatten().roll(1).view_as(batch.input_ids)
    batch = replace(batch, input_ids=shuffled)
    with torch.compiler.set_stance("fail_on_recompile"):
        ours = parts_and_gradients(compiled, model, batch)
    assert_equal_losses(ours, parts_and_gradients(model.loss_parts, model, batch))


def test_lengths_of_static_shapes_compile_nothing():
    """What a training step does: token budget, slots and longest length are fixed, the lengths are not."""
    model = small_model()
    compiled = torch.compile(model.loss_parts, fullgraph=True, backend=QUICK)
    first = make_batches([9, 7, 12], vocab_size=211, seed=1)[0]
    parts_and_gradients(compiled, model, first)
    for lengths in ([12, 12, 4], [5, 11, 12]):
        batch = replace(make_batches(lengths, vocab_size=211, seed=2)[0], num_tokens=first.num_tokens)
        assert batch.max_seqlen == first.max_seqlen
        with torch.compiler.set_stance("fail_on_recompile"):
            ours = parts_and_gradients(compiled, model, batch)
        assert_equal_losses(ours, parts_and_gradients(model.loss_parts, model, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    model = small_model()
    batch = make_batches([9, 7, 12], vocab_size=211)[0]
    compiled = torch.compile(model.loss_parts, fullgraph=True, backend=QUICK)
    results = []
    for function in (compiled, model.loss_parts):
        with torch.autocast("cpu", dtype):
            parts = function(batch)
        model.zero_grad()
        (parts.mlm_sum / parts.mlm_count).backward()
        results.append((parts.mlm_sum.detach(), [p.grad for p in model.bert.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=0, rtol=1e-2)
    for ours, theirs in zip(results[0][1], results[1][1]):
        if theirs is not None:  # the pooler's
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_encoder(packed):
    model = small_model().bert
    batches = make_batches([9, 7, 12], vocab_size=211, filler=5)

    def encode(batch):
        if isinstance(batch, PackedBatch):
            return model(batch, output_hidden_states=True)
        return model(
            batch.input_ids, batch.attention_mask, batch.token_type_ids, output_attentions=True
        )  # computes every position: unpadding asks for the number of kept tokens

    batch = batches[0 if packed else 1]
    ours, theirs = torch.compile(encode, fullgraph=True, backend=QUICK)(batch), encode(batch)
    assert ours.keys() == theirs.keys()
    for x, y in zip(flat(ours.to_tuple()), flat(theirs.to_tuple())):
        torch.testing.assert_close(x, y, atol=ATOL, rtol=0)


def flat(values):
    for value in values:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


def test_checkpointing_repeats_the_masks_when_compiled():
    model = small_model(attention_probs_dropout_prob=0.2)
    batch = make_batches([9, 7, 12], vocab_size=211)[0]
    plain = parts_and_gradients(model.loss_parts, model, batch)
    model.gradient_checkpointing_enable()
    compiled = torch.compile(model.loss_parts, fullgraph=True, backend=QUICK)
    assert_equal_losses(parts_and_gradients(compiled, model, batch), plain)


# ---- sizes that change ------------------------------------------------------------------------------------

# the first is compiled for its sizes; the second, which shows that they change, for any
LENGTHS = ([9, 7, 12], [5, 11, 3, 4], [20, 3], [8, 8, 8, 8, 8])


@pytest.mark.parametrize("kind", ["losses", "packed", "padded"])
def test_another_number_of_tokens_compiles_nothing(kind):
    model = small_model()
    counter = CompileCounterWithBackend(QUICK)
    target = model.loss_parts if kind == "losses" else model.bert.eval()
    compiled = torch.compile(target, fullgraph=True, backend=counter)
    for lengths in LENGTHS:
        packed, padded = make_batches(lengths, vocab_size=211)
        if kind == "losses":
            theirs = parts_and_gradients(model.loss_parts, model, packed)
            assert_equal_losses(parts_and_gradients(compiled, model, packed), theirs)
            continue
        inputs = (packed,) if kind == "packed" else (padded.input_ids, padded.attention_mask)
        with torch.no_grad():
            for x, y in zip(compiled(*inputs).to_tuple(), target(*inputs).to_tuple()):
                torch.testing.assert_close(x, y, atol=ATOL, rtol=0)
    assert counter.frame_count == 2


def test_few_tokens_from_a_padded_batch():
    """One, none, and a row without any: what a size that torch.compile does not know may turn out to be."""
    model = small_model().bert.eval()
    compiled = torch.compile(model, fullgraph=True, backend=QUICK)
    ids = torch.randint(5, 211, (3, 4))
    for kept in ([[1, 0, 0, 0], [0] * 4, [0] * 4], [[0] * 4] * 3, [[1, 1, 1, 1], [0] * 4, [0, 1, 0, 1]]):
        mask = torch.tensor(kept)
        with torch.no_grad():
            for x, y in zip(compiled(ids, mask).to_tuple(), model(ids, mask).to_tuple()):
                torch.testing.assert_close(x, y, atol=ATOL, rtol=0)


def test_a_head_on_a_padded_batch():
    model = BertForSequenceClassification(small_config(num_labels=3)).train()
    spread_weights(model)
    compiled = torch.compile(model, fullgraph=True, backend=QUICK)
    _, padded = make_batches([9, 7, 12], vocab_size=211)
    results = []
    for function in (compiled, model):
        model.zero_grad()
        output = function(padded.input_ids, padded.attention_mask, labels=torch.tensor([2, 0, 1]))
        output.loss.backward()
        results.append((output.loss.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], atol=ATOL, rtol=1e-5)
    assert [name.startswith("_orig_mod.") for name in model.state_dict()].count(True) == 0
