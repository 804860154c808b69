"""Embeddings, their norm and dropout as one operator and as the modules that it replaces."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck

from fastbert import ops
from fastbert.layers import BertEmbeddings
from fastbert.modeling import BertModel
from fastbert.ops import backend, embedding, philox
from fastbert.ops.dropout_add_norm import dropout_noise
from fastbert.ops.embedding import _embed, _embed_backward
from tests.packed_batches import make_batches
from tests.small_models import small_config

WIDTH, ROWS = 10, (17, 2, 6)
SEED = 2**40 + 3


def parameters(dtype=torch.float64, norm_dtype=None, width=WIDTH):
    """The three tables, and weight and bias of the norm."""
    shapes = [(rows, width) for rows in ROWS] + [(width,), (width,)]
    dtypes = [dtype] * 3 + [norm_dtype or dtype] * 2
    return [torch.randn(shape).to(kind).requires_grad_() for shape, kind in zip(shapes, dtypes)]


def some_ids(*shape):
    return [torch.randint(0, rows, shape) for rows in ROWS]


def reference(ids, tensors, seed=None, dropout_p=0.0, eps=1e-12, padding_idx=None):
    *tables, weight, bias = tensors
    h = sum(F.embedding(i, table, p) for i, table, p in zip(ids, tables, (padding_idx, None, None)))
    centred = h - h.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias
    if seed is not None:
        y = y * dropout_noise(seed, y.shape[:-1].numel(), y.shape[-1], dropout_p, torch.float64).view(y.shape)
    return y


def public(ids, tensors, seed=None, dropout_p=0.0, eps=1e-12, padding_idx=None):
    return ops.embed(*ids, *tensors, eps, dropout_p, padding_idx=padding_idx)


def registered(ids, tensors, seed=None, dropout_p=0.0, eps=1e-12, padding_idx=None):
    return _embed(*ids, *tensors, eps, padding_idx, seed, dropout_p)[0]


both = pytest.mark.parametrize("embed", [public, registered], ids=["public", "operator"])


@pytest.fixture
def fixed_seed(monkeypatch):
    seed = torch.tensor([SEED])
    monkeypatch.setattr(philox, "draw_seed", lambda device: seed)
    return seed


@pytest.mark.parametrize("dropout_p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@both
def test_value_and_gradients(embed, num_tokens, padding_idx, dropout_p, fixed_seed):
    ids, tensors = some_ids(num_tokens), parameters()
    direction = torch.randn(num_tokens, WIDTH, dtype=torch.float64)
    seed = fixed_seed if dropout_p else None
    results = []
    for function in (embed, reference):
        y = function(ids, tensors, seed, dropout_p, padding_idx=padding_idx)
        results.append((y, *torch.autograd.grad((y * direction).sum(), tensors)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@both
def test_rows_without_gradient_are_exactly_zero(embed):
    """Those that no id names, and the padding row, however often it is looked up."""
    tensors = parameters(torch.float32)
    ids = [torch.tensor(i) for i in ([3, 3, 5, 3, 9, 5], [0, 0, 0, 0, 0, 0], [0, 1, 2, 0, 1, 2])]
    y = embed(ids, tensors, padding_idx=3)
    words, types, positions, *_ = torch.autograd.grad(y.square().sum() + y.pow(3).sum(), tensors)
    assert words.any(1).nonzero().flatten().tolist() == [5, 9]
    assert types.any(1).nonzero().flatten().tolist() == [0]
    assert positions.any(1).nonzero().flatten().tolist() == [0, 1, 2]


def test_worked_by_hand():
    words = torch.tensor([[0.0, 0.0], [1.0, 3.0]], requires_grad=True)
    types, positions = torch.tensor([[0.5, 0.5]]), torch.tensor([[-0.5, 1.5]])
    weight, bias = torch.tensor([2.0, 3.0]), torch.tensor([10.0, 20.0])
    zero = torch.tensor([0])
    # h = 1, 5: mean 3, variance 4
    y = ops.embed(torch.tensor([1]), zero, zero, words, types, positions, weight, bias, 0.0)
    assert y.tolist() == [[8.0, 23.0]]
    # a norm of two numbers keeps only their order: no gradient comes through
    assert torch.autograd.grad(y.sum(), words)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0, 5)], ids=str)
def test_any_shape_of_ids_and_broadcasting(shape):
    ids, tensors = some_ids(*shape), parameters()
    torch.testing.assert_close(public(ids, tensors), reference(ids, tensors), atol=1e-9, rtol=1e-9)
    if len(shape) == 2:
        ids[1], ids[2] = torch.zeros(1, dtype=torch.int32), torch.arange(shape[1])
        torch.testing.assert_close(public(ids, tensors), reference(ids, tensors), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("dtype", "norm_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]
)
def test_the_operators_are_registered_as_they_should_be(dtype, norm_dtype, dropout_p):
    ids, tensors = some_ids(7), parameters(dtype, norm_dtype)
    seed = torch.tensor([SEED]) if dropout_p else None
    opcheck(_embed, (*ids, *tensors, 1e-5, 3, seed, dropout_p))
    *tables, weight, bias = (t.detach() for t in tensors)
    y, mean, rstd = _embed(*ids, *tables, weight, bias, 1e-5, None, seed, dropout_p)
    dy = torch.randn_like(y)
    opcheck(_embed_backward, (dy, *ids, *tables, weight, mean, rstd, None, seed, dropout_p))


# ---- ids outside their tables -----------------------------------------------------------------------------

OUTSIDE = [
    (0, 17, "input_ids holds 17, the table has vocab_size = 17 rows .0..16."),
    (0, -1, "input_ids holds -1, the table has vocab_size = 17"),
    (1, 2, "token_type_ids holds 2, the table has type_vocab_size = 2"),
    (2, 6, "position_ids holds 6, the table has max_position_embeddings = 6"),
    (2, 2**40, "position_ids holds 1099511627776, the table has"),
]


@pytest.mark.parametrize(("which", "outside", "message"), OUTSIDE)
@both
def test_ids_outside_a_table_are_named_before_anything_is_read(embed, which, outside, message, monkeypatch):
    ids, tensors = some_ids(5), parameters()
    ids[which][3] = outside
    with monkeypatch.context() as without:
        without.setattr(F, "embedding", None)
        with pytest.raises(IndexError, match=message):
            embed(ids, tensors)
    # the same process goes on
    ids[which][3] = 0
    torch.testing.assert_close(embed(ids, tensors), reference(ids, tensors), atol=1e-9, rtol=1e-9)


def test_a_compiled_call_names_them_too():
    torch.compiler.reset()
    ids, tensors = some_ids(5), parameters()
    compiled = torch.compile(lambda *ids: public(ids, tensors), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*ids), reference(ids, tensors), atol=1e-9, rtol=1e-9)
    ids[0][2] = 17
    with pytest.raises(IndexError, match="input_ids holds 17, the table has vocab_size = 17"):
        compiled(*ids)
    torch.compiler.reset()


def test_what_a_gpu_reported_is_raised_once(monkeypatch):
    """A kernel on a GPU leaves (id, limit) in the host's memory; no tensor is read from the GPU."""
    report = torch.full((3, 2), -1, dtype=torch.int64)
    monkeypatch.setattr(embedding, "_report", lambda device_type: report)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ops.raise_reported_ids()
    report[1] = torch.tensor([-7, 2])
    with pytest.raises(
        IndexError, match=r"token_type_ids holds -7, the table has .* = 2 rows .*earlier batch"
    ):
        ops.raise_reported_ids()
    ops.raise_reported_ids()
    # an empty table has no row 0
    report[0] = torch.tensor([0, 0])
    with pytest.raises(IndexError, match="input_ids holds 0, the table has vocab_size = 0 rows"):
        ops.raise_reported_ids()


@pytest.mark.gpu
def test_a_gpu_goes_on_after_an_id_outside_its_table():
    model = BertModel(small_config(vocab_size=50)).cuda().eval()
    ids = torch.randint(5, 50, (2, 9), device="cuda")
    right = model(ids).last_hidden_state
    wrong = ids.clone()
    wrong[1, 3] = 50
    states = model(wrong).last_hidden_state
    torch.cuda.synchronize()
    assert states[1].isnan().all() and torch.equal(states[0], right[0])
    with pytest.raises(IndexError, match="input_ids holds 50, the table has vocab_size = 50 rows"):
        model(ids)
    assert torch.equal(model(ids).last_hidden_state, right)


def test_the_model_names_a_length_and_an_id_beyond_its_tables():
    model = BertModel(small_config(max_position_embeddings=64, vocab_size=50)).eval()
    with pytest.raises(ValueError, match="sequence length 65 is above max_position_embeddings = 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(IndexError, match="input_ids holds 50, the table has vocab_size = 50"):
        model(torch.full((1, 4), 50))
    assert model(torch.full((1, 64), 49)).last_hidden_state.isfinite().all()


# ---- dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(
    ("dtype", "norm_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@both
def test_y_has_the_dtype_of_the_tables_and_gradients_that_of_their_tensors(
    embed, dtype, norm_dtype, enabled, fixed_seed
):
    ids, tensors = some_ids(12), parameters(dtype, norm_dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    direction = torch.randn(12, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = embed(ids, tensors, fixed_seed, 0.3)
        gradients = torch.autograd.grad((y * direction).sum(), tensors)
    right = reference(ids, exact, fixed_seed, 0.3)
    right_gradients = torch.autograd.grad((right * direction).sum(), exact)
    assert y.dtype == dtype
    # one rounding: neither the sum nor the norm is rounded before the end
    eps = torch.finfo(dtype).eps
    assert (y.double() - right).abs().max() <= max(eps, 1e-6) * right.abs().max()
    for ours, given, theirs in zip(gradients, tensors, right_gradients):
        assert ours.dtype == given.dtype
        atol = 10 * eps * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=10 * eps)


def test_gradients_of_a_frequent_id_are_summed_in_fp32():
    """In bf16, 256 + 1 is 256: a sum of 5,000 terms would stop growing."""
    ids = [torch.zeros(5000, dtype=torch.long)] * 3
    *tables, weight, bias = (t.detach() for t in parameters(torch.bfloat16))
    _, mean, rstd = _embed(*ids, *tables, weight, bias, 1e-5, None, None, 0.0)
    dy = torch.rand(5000, WIDTH).to(torch.bfloat16)
    ours = _embed_backward(dy, *ids, *tables, weight, mean, rstd, None, None, 0.0)
    exact = [t.double().requires_grad_() for t in (*tables, weight, bias)]
    right = torch.autograd.grad(reference(ids, exact, eps=1e-5), exact, dy.double())
    for a, b in zip(ours, right):
        torch.testing.assert_close(a.double(), b, atol=0.01 * b.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_constant_row_is_the_bias_in_every_dtype(dtype):
    """eps 1e-12 is 0 in fp16, and the squares of 300 pass its largest number."""
    tables = [torch.full((rows, 768), value, dtype=dtype) for rows, value in zip(ROWS, (296.0, 1.0, 3.0))]
    weight, bias = torch.ones(768, dtype=dtype), torch.full((768,), 0.5, dtype=dtype)
    y = public(some_ids(4), [*tables, weight, bias])
    assert torch.equal(y, torch.full_like(y, 0.5))


def test_tables_of_different_dtypes_are_promoted_as_torch_does():
    words, types, positions, weight, bias = parameters(torch.float32)
    ids, half = some_ids(5), words.detach().half().requires_grad_()
    for embed in (public, registered):
        y = embed(ids, (half, types, positions, weight, bias))
        assert y.dtype == torch.float32
        assert torch.autograd.grad(y.square().sum(), half)[0].dtype == torch.float16


# ---- dropout ----------------------------------------------------------------------------------------------


def test_dropout_comes_behind_the_norm_and_follows_the_generator():
    ids, tensors = some_ids(400), parameters(torch.float32)
    torch.manual_seed(5)
    first, second = (public(ids, tensors, dropout_p=0.1) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, public(ids, tensors, dropout_p=0.1)) and not torch.equal(first, second)
    state = torch.get_rng_state()
    still = ops.embed(*ids, *tensors, 1e-12, 0.1, False)
    assert torch.equal(torch.get_rng_state(), state)
    dropped = first == 0  # of 4,000: four standard deviations are 0.019
    assert abs(dropped.float().mean() - 0.1) < 0.019
    torch.testing.assert_close(first[~dropped], still[~dropped] / 0.9)
    with pytest.raises(ValueError, match=r"dropout_p 1\.5 is not a probability"):
        public(ids, tensors, dropout_p=1.5)


def test_gradcheck_through_dropout(fixed_seed):
    ids, tensors = some_ids(6), parameters()
    for embed in (public, registered):
        assert torch.autograd.gradcheck(lambda *t: embed(ids, t, fixed_seed, 0.3, 1e-2), tensors)  # noqa: B023


def test_beside_the_ids_eight_bytes_a_token_are_saved():
    """Neither the sum of the rows nor a mask."""
    ids, tensors = some_ids(30), parameters(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        registered(ids, tensors, torch.tensor([SEED]), 0.1)
    parameter_storages = {t.data_ptr() for t in tensors}
    num_bytes = sum(t.nbytes for t in saved if t.data_ptr() not in parameter_storages)
    assert num_bytes == 30 * (3 * 8 + 8) + 8  # and the seed


# ---- torch.compile, repetition ----------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled_in_full(dropout_p):
    torch.compiler.reset()
    ids, tensors = some_ids(2, 9), parameters(torch.float32)

    def embed(*ids):
        return public(ids, tensors, dropout_p=dropout_p, padding_idx=0)

    results = []
    for function in (embed, torch.compile(embed, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        y = function(*ids)
        results.append((y, *torch.autograd.grad(y.square().sum() + y.pow(3).sum(), tensors)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    torch.compiler.reset()


@both
def test_ten_runs_give_the_same_bits(embed, fixed_seed):
    ids, tensors = some_ids(384), parameters(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(10):
            y = embed(ids, tensors, fixed_seed, 0.1, padding_idx=0)
            results.append((y, *torch.autograd.grad(y.sum() + y.square().sum(), tensors)))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again))


# ---- modules ----------------------------------------------------------------------------------------------


def test_the_module_is_one_call():
    module = BertEmbeddings(small_config(hidden_dropout_prob=0.1))
    ids = [torch.randint(0, rows, (2, 5)) for rows in (211, 2, 64)]
    backend._last_run.clear()
    torch.manual_seed(3)
    y = module(*ids)
    assert backend.last_run() == {"embed": "eager"}
    tensors = [t.weight for t in (module.word_embeddings, module.token_type_embeddings)]
    tensors += [module.position_embeddings.weight, module.LayerNorm.weight, module.LayerNorm.bias]
    torch.manual_seed(3)
    assert torch.equal(y, ops.embed(*ids, *tensors, module.LayerNorm.eps, 0.1))
    # the word part from outside: through the modules, with their dropout
    backend._last_run.clear()
    module.eval()
    embeds = module.word_embeddings(ids[0])
    torch.testing.assert_close(module(None, *ids[1:], embeds), module(*ids), atol=1e-6, rtol=1e-6)
    assert backend.last_run() == {"dropout_add_norm": "eager", "embed": "eager"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.word_embeddings.register_forward_hook(lambda module, inputs, output: 3 * output),
        lambda m: m.position_embeddings.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0,)),
        lambda m: m.LayerNorm.register_forward_hook(lambda module, inputs, output: output + 1),
        lambda m: m.dropout.register_forward_hook(lambda module, inputs, output: output + 1),
        lambda m: setattr(m, "LayerNorm", nn.LayerNorm(64, elementwise_affine=False)),
        lambda m: setattr(m.word_embeddings, "max_norm", 0.5),
    ],
    ids=["words", "positions", "norm", "dropout", "norm without parameters", "max_norm"],
)
def test_a_module_that_is_more_than_plain_is_called(change):
    plain = BertEmbeddings(small_config())
    nn.init.normal_(plain.LayerNorm.weight)
    module = copy.deepcopy(plain)
    change(module)
    ids = [torch.randint(0, rows, (2, 5)) for rows in (211, 2, 64)]
    unchanged = plain(*ids)
    words, types, positions = module.word_embeddings, module.token_type_embeddings, module.position_embeddings
    expected = module.dropout(module.LayerNorm(words(ids[0]) + types(ids[1]) + positions(ids[2])))
    y = module(*ids)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(y, unchanged, atol=1e-3)


@pytest.mark.parametrize("change", [{"scale_grad_by_freq": True}, {"sparse": True}, {"padding_idx": 1}])
def test_tables_whose_gradients_are_special_are_left_to_torch(change):
    module = BertEmbeddings(small_config())
    modules = [module.word_embeddings, module.token_type_embeddings, module.position_embeddings]
    assert ops.can_embed(*modules, module.LayerNorm, module.dropout)
    for name, value in change.items():
        setattr(module.position_embeddings, name, value)
    assert not ops.can_embed(*modules, module.LayerNorm, module.dropout)


def test_pads_give_the_word_table_no_gradient():
    """Filler of a packed batch looks up id 0 thousands of times."""
    model = BertModel(small_config(pad_token_id=0))
    batch, _ = make_batches([5, 9], vocab_size=211, filler=30)
    words = model.embeddings.word_embeddings.weight
    hidden = model(batch).last_hidden_state
    (gradient,) = torch.autograd.grad(hidden.square().sum() + hidden.sum(), words)
    assert not gradient[0].any() and gradient[batch.input_ids[:14]].any(1).all()


# ---- the backend ------------------------------------------------------------------------------------------


def test_what_the_kernel_does_not_take_runs_eagerly_and_says_so(monkeypatch):
    if backend.kernels_expected(torch.device("cpu")):
        pytest.skip("the interpreter runs kernels on a CPU")
    # as a GPU would decide
    decision = backend.Decision("triton", "the Triton kernels run on cuda")
    monkeypatch.setattr(backend, "_decide", lambda *args: decision)
    backend._said.clear()
    ids, wide = some_ids(2), [t.detach() for t in parameters(torch.float32, width=8200)]
    with pytest.warns(backend.EagerFallbackWarning, match="embed runs on eager: a row is 8200 wide"):
        y = public(ids, wide)
    torch.testing.assert_close(y.double(), reference(ids, [t.double() for t in wide]), atol=1e-4, rtol=1e-4)
    mixed = [t.detach() for t in parameters(torch.float32)]
    mixed[1] = mixed[1].half()
    with pytest.warns(backend.EagerFallbackWarning, match="the tables have different dtypes"):
        public(ids, mixed)
    backend._said.clear()


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_recycled_gradient_is_the_same_in_the_same_memory(padding_idx):
    """Over three steps of an accumulating and a plain loop, on tables with other gradients between."""
    tensors = parameters()
    copies = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    addresses = []
    for step in range(3):
        micro_batches = [[*some_ids(40)] for _ in range(2 if step == 1 else 1)]
        for ids in micro_batches:
            weights = torch.randn(40, WIDTH, dtype=torch.float64)
            for each in (tensors, copies):
                (public(ids, each, padding_idx=padding_idx) * weights).sum().backward()
        for ours, theirs in zip(tensors, copies):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-14, atol=1e-14)
        addresses.append(tensors[0].grad.data_ptr())
        tensors[0].grad[0] = torch.nan  # what the memory holds afterwards plays no part
        ops.recycle_gradient(tensors[0])
        assert tensors[0].grad is None
        for tensor in (*tensors[1:], *copies):
            tensor.grad = None
    assert len(set(addresses)) == 1

    with torch.no_grad():  # takes nothing
        public(ids, tensors)
    y = public(ids, tensors).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be computed once"):
        y.backward()


def test_recycling_without_a_gradient_is_only_none():
    table = torch.zeros(3, 2, requires_grad=True)
    ops.recycle_gradient(table)
    assert table.grad is None and table not in embedding._spare
