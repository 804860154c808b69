"""Linear + cross-entropy kernels against fp64: losses, counts, gradients; chunks and memory."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import cross_entropy
from fastbert_kernels.cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    vocabulary_chunk,
)

from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)
from tests.peak_bytes import PeakBytes

IGNORED = -100
NAMES = ("dhidden", "dweight", "dbias")
# rows, vocabulary, width: nothing but one of each; odd; a chunk and one column; several chunks, the last one
# partly filled; several blocks of one row
SIZES = [(1, 1, 1), (5, 33, 7), (3, 65, 16), (9, 200, 24), (6, 4500, 8)]


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestKernels")


class Problem:
    """Inputs, and what torch makes of them. `other` is the dtype of weight and bias."""

    def __init__(
        self,
        size: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        *,
        other: torch.dtype | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORED,
        offset: float = 0.0,
    ) -> None:
        P, V, H = size
        other = other or dtype
        self.hidden = torch.randn(P, H).to(DEVICE, dtype)
        self.weight = (torch.randn(V, H) / H**0.5).to(DEVICE, other)
        self.bias = (torch.randn(V) + offset).to(DEVICE, other)
        self.labels = torch.randint(V, (P,), device=DEVICE)
        if P > 1:
            self.labels[1::3] = ignore_index
            with torch.no_grad():  # some predictions are right
                best = (self.hidden.double() @ self.weight.double().T + self.bias.double()).argmax(1)
            self.labels[::4] = best[::4]
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        self.dloss = torch.tensor(0.75, device=DEVICE)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]

    @property
    def options(self) -> dict[str, Any]:
        return {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}

    def logits(self) -> Tensor:
        hidden, weight, bias = (x.double() for x in self.inputs)
        return hidden @ weight.T + bias

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """loss_sum, and its gradients times dloss: products in `dtype`, the loss in fp32 at least."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
        logits = F.linear(*leaves).to(torch.promote_types(dtype, torch.float32))
        loss = F.cross_entropy(logits, self.labels, reduction="sum", **self.options)
        return loss.detach(), list(torch.autograd.grad(loss * self.dloss, leaves))


def run(
    p: Problem, module: ModuleType = cross_entropy
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """loss_sum, correct, count, lse, gradients."""
    inputs = (*p.inputs, p.labels)
    loss, correct, count, lse = module.linear_cross_entropy_fwd(*inputs, **p.options)
    gradients = module.linear_cross_entropy_bwd(p.dloss, *inputs, lse, **p.options)
    return loss, correct, count, lse, list(gradients)


def check(p: Problem, module: ModuleType = cross_entropy) -> None:
    given = [x.clone() for x in (*p.inputs, p.labels, p.dloss)]
    loss, correct, count, lse, gradients = run(p, module)
    assert all(torch.equal(a, b) for a, b in zip((*p.inputs, p.labels, p.dloss), given)), "inputs overwritten"
    right, right_gradients = p.reference(torch.float64)
    plain, plain_gradients = p.reference(p.hidden.dtype)
    counted = p.labels != p.ignore_index
    logits = p.logits()
    assert (correct.dtype, count.dtype) == (torch.int64, torch.int64)
    assert count.item() == counted.sum().item()
    # rows are rounded in one way or the other: neither side of so few is the better one
    rounding = torch.finfo(p.hidden.dtype).eps * logits.abs().max()
    budget = 2 * (plain - right).abs() + rounding * count.sqrt() + 2**-23 * lse.abs().sum()
    assert loss.dtype == torch.float32 and (loss - right).abs() <= budget, f"loss is {loss - right:.2e} away"
    torch.testing.assert_close(lse.double(), logits.logsumexp(1), rtol=1e-6, atol=2 * rounding.item())
    best = logits.topk(min(2, logits.shape[1]), dim=1).values
    if (best[:, 0] - best[:, -1] > 4 * rounding).all() or logits.shape[1] == 1:
        assert correct.item() == ((logits.argmax(1) == p.labels) & counted).sum().item()
    for name, leaf, ours, theirs, exact in zip(
        NAMES, p.inputs, gradients, plain_gradients, right_gradients, strict=True
    ):
        assert ours.dtype == leaf.dtype and ours.is_contiguous(), name
        if name == "dbias":  # sums what the products have rounded
            assert_accurate(ours, theirs.to(leaf.dtype), exact)
        else:
            kind = min(p.hidden.dtype, leaf.dtype, key=lambda dtype: dtype.itemsize)
            assert_accurate(ours.to(kind), theirs.to(kind), exact)


@contextlib.contextmanager
def small_chunks(module: ModuleType = cross_entropy, share: int = 8):
    """An eighth of the logits is the limit for small problems, too: chunks of 64 columns."""
    before = module.FLOOR_BYTES, module.LOGITS_SHARE
    module.FLOOR_BYTES, module.LOGITS_SHARE = 0, share  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.FLOOR_BYTES, module.LOGITS_SHARE = before  # type: ignore[attr-defined]


def check_chunks(module: ModuleType = cross_entropy, label_smoothing: float = 0.0) -> None:
    with small_chunks(module):
        check(Problem((5, 150, 8), label_smoothing=label_smoothing), module)


def check_many_rows(module: ModuleType = cross_entropy, dtype: torch.dtype = torch.float32) -> None:
    """More rows than a program of the gradient has, and more than one of its tiles."""
    p = Problem((70, 20, 4), dtype)
    lse = p.logits().logsumexp(1).float()
    ours = module.linear_cross_entropy_bwd(p.dloss, *p.inputs, p.labels, lse)
    for gradient, plain, exact in zip(ours, p.reference(dtype)[1], p.reference(torch.float64)[1]):
        assert_accurate(gradient, plain, exact)


def check_ignored_label_that_is_a_word(module: ModuleType = cross_entropy) -> None:
    check(Problem((6, 33, 8), ignore_index=0), module)


def check_known_values(module: ModuleType = cross_entropy) -> None:
    """softmax of (0, ln 2, ln 5) is (1, 2, 5) / 8: worked by hand."""
    log = torch.tensor([1.0, 2.0, 5.0]).log().to(DEVICE)
    hidden, weight = torch.zeros(3, 2, device=DEVICE), torch.ones(3, 2, device=DEVICE)
    labels = torch.tensor([2, 0, IGNORED], device=DEVICE)
    loss, correct, count, lse = module.linear_cross_entropy_fwd(hidden, weight, log, labels)
    assert loss.item() == pytest.approx(-torch.tensor(5 / 64).log().item(), abs=1e-6)
    assert (correct.item(), count.item()) == (1, 2)
    torch.testing.assert_close(lse.exp(), torch.full((3,), 8.0, device=DEVICE))
    dloss = torch.tensor(2.0, device=DEVICE)
    dhidden, _, dbias = module.linear_cross_entropy_bwd(dloss, hidden, weight, log, labels, lse)
    torch.testing.assert_close(dbias, torch.tensor([-1.5, 1.0, 0.5], device=DEVICE))
    torch.testing.assert_close(dhidden, torch.zeros(3, 2, device=DEVICE))


def check_large_logits(module: ModuleType = cross_entropy) -> None:
    """exp(200) is beyond fp32; the maximum comes last, in another block than the label."""
    p = Problem((3, 2100, 8), offset=150.0)
    p.bias[-1] = 200.0
    with small_chunks(module, share=1):
        check(p, module)


def check_ties(module: ModuleType = cross_entropy) -> None:
    """The first of equal logits is the prediction, as torch.argmax has it on a CPU: in one block, in two."""
    for V, first, second in ((40, 3, 30), (2500, 7, 2400), (200, 5, 199), (200, 150, 199)):
        hidden, weight = torch.zeros(3, 4, device=DEVICE), torch.zeros(V, 4, device=DEVICE)
        bias = torch.zeros(V, device=DEVICE)
        bias[[first, second]] = 1.0
        labels = torch.tensor([first, second, first], device=DEVICE)
        with small_chunks(module) if V == 200 else contextlib.nullcontext():
            _, correct, _, _ = module.linear_cross_entropy_fwd(hidden, weight, bias, labels)
        assert correct.item() == 2
    # right, but asked by nobody
    _, correct, _, _ = module.linear_cross_entropy_fwd(hidden, weight, bias, labels, ignore_index=first)
    assert correct.item() == 0


def check_ignored_rows_hold_anything(module: ModuleType = cross_entropy) -> None:
    """Logits of inf and -inf, whose lse is NaN, have no part where they are ignored."""
    p = Problem((6, 90, 8))
    p.labels[2] = p.ignore_index
    right = run(p)
    p.hidden[2] = 3e38
    loss, correct, count, _, (dhidden, dweight, dbias) = run(p, module)
    assert torch.equal(loss, right[0]) and torch.equal(correct, right[1]) and torch.equal(count, right[2])
    assert torch.equal(dbias, right[4][2]) and torch.equal(dhidden, right[4][0])
    assert torch.equal(dweight, right[4][1])


def check_closed_words(module: ModuleType = cross_entropy) -> None:
    """A bias of -inf: nothing but another word has probability, even where whole chunks are closed."""
    p = Problem((5, 200, 8))
    p.bias[:130] = float("-inf")
    p.labels = torch.tensor([150, 199, IGNORED, 131, 180], device=DEVICE)
    with small_chunks(module):
        loss, _, _, _, (dhidden, dweight, dbias) = run(p, module)
    right, right_gradients = p.reference(torch.float64)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=0)
    for ours, theirs in zip((dhidden, dweight, dbias), right_gradients):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert not dweight[:130].any() and not dbias[:130].any()


def check_label_beyond_the_vocabulary(module: ModuleType = cross_entropy, label: int = 64) -> None:
    """A GPU cannot raise an error without being waited for: the loss and what the row touches are NaN."""
    p = Problem((3, 40, 8))
    p.labels = torch.tensor([4, label, 7], device=DEVICE)
    loss, _, count, _, (dhidden, dweight, dbias) = run(p, module)
    assert loss.isnan() and dweight.isnan().all() and dbias.isnan().all() and count.item() == 3
    assert dhidden[1].isnan().all() and not dhidden[[0, 2]].isnan().any()


def check_far_rows(module: ModuleType = cross_entropy) -> None:
    """Rows of logits so far apart that the third begins at element 2^31, which 32 bits do not reach."""
    # 4 GiB of address space, of which a CPU commits the pages of three short rows
    stride, N = 2**30, 40
    near = torch.randn(3, N).to(DEVICE, torch.float16)
    memory = torch.empty(2 * stride + N, dtype=torch.float16, device=DEVICE)
    far = memory.as_strided((3, N), (stride, 1)).copy_(near)
    bias, labels = torch.randn(N, device=DEVICE), torch.tensor([1, 39, 5], device=DEVICE)
    lse, dloss = torch.full((3,), 5.0, device=DEVICE), torch.ones(1, device=DEVICE)
    results = []
    for logits in (near, far):
        state = torch.zeros(4, 3, device=DEVICE)
        best = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        module._logit_statistics_kernel[(3,)](
            logits, bias, labels, state, best, logits.stride(0), 3, N, 0, SMOOTHED=True, BLOCK_N=64
        )
        partial = torch.empty(1, N, device=DEVICE)
        module._dlogits_kernel[(1, 1)](
            logits, bias, labels, lse, dloss, partial, logits.stride(0), 3, N, 0, IGNORED, 0.9, 0.1 / N,
            BLOCK_M=2, BLOCK_N=64, TILES_M=2,
        )  # fmt: skip
        results.append([state, best, logits, partial])
    assert all(torch.equal(a, b) for a, b in zip(*results))


# ---- memory -----------------------------------------------------------------------------------------------


class NoKernel:
    """In the place of a kernel, for tensors without values."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_logit_statistics_kernel", "_sum_losses_kernel", "_dlogits_kernel"):
        monkeypatch.setattr(cross_entropy, name, NoKernel())


# BERT-Large at 8,192 and 32,768 tokens, BERT-Base, multilingual, MiniLM; few rows, where the floor holds
@pytest.mark.parametrize(
    ("P", "V", "H"),
    [(1_229, 30_522, 1024), (4_915, 30_522, 1024), (1_229, 28_996, 768), (1_000, 119_547, 768),
     (2_000, 30_522, 384), (76, 30_522, 1024), (8, 1000, 64)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
    ids=["bf16", "autocast", "fp32"],
)
@pytest.mark.usefixtures("without_values")
def test_temporaries_are_an_eighth_of_the_logits(
    P: int, V: int, H: int, dtype: torch.dtype, other: torch.dtype
) -> None:
    limit = max(P * V * dtype.itemsize // 8, 8 * 2**20)
    with torch.device("meta"):
        hidden, weight, bias = (
            torch.empty(P, H, dtype=dtype),
            *(torch.empty(shape, dtype=other) for shape in ((V, H), (V,))),
        )
        labels, dloss = torch.empty(P, dtype=torch.int64), torch.empty(())
    with PeakBytes() as forward:
        *_, lse = linear_cross_entropy_fwd(hidden, weight, bias, labels)
    assert limit / 3 < forward.bytes <= limit or V == 1000
    with PeakBytes() as backward:
        gradients = linear_cross_entropy_bwd(dloss, hidden, weight, bias, labels, lse)
    temporaries = backward.bytes - sum(x.nbytes for x in gradients if x is not None)
    assert limit / 3 < temporaries <= limit or V == 1000
    # not only the floor: of the logits in the dtype of the products
    assert P < 1000 or max(forward.bytes, temporaries) <= P * V * dtype.itemsize / 8


def test_chunks_cover_the_vocabulary_evenly() -> None:
    for rows in (1, 8, 76, 1229, 32_768):
        for vocab in (1, 63, 64, 65, 1000, 30_522, 119_547):
            for cast in (0, 2048):
                column = 2 * rows + 4 * (rows // 64 + 1) + cast
                chunk = vocabulary_chunk(rows, vocab, 2, column, 1000)
                assert chunk % 64 == 0 and chunk - 64 < vocab
                count = -(-vocab // chunk)
                # equal but for the rounding to 64
                assert chunk * count - vocab < 64 * count
                budget = max(rows * vocab // 4, cross_entropy.FLOOR_BYTES)
                assert chunk * column + 1000 <= max(budget, 64 * column + 1000)
    # what else is held leaves nothing: a third is the chunk's all the same
    assert vocabulary_chunk(10_000, 8192, 2, 20_000, 10**9) == 320


# ---- values -----------------------------------------------------------------------------------------------


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_matches_reference(
        self, size: tuple[int, int, int], dtype: torch.dtype, label_smoothing: float
    ) -> None:
        with small_chunks(share=2 if size[1] > 1000 else 8):
            check(Problem(size, dtype, label_smoothing=label_smoothing))

    @pytest.mark.usefixtures("nan_filled")
    def test_one_chunk(self) -> None:
        p = Problem((9, 200, 24))
        whole = run(p)
        check(p)
        with small_chunks():
            parts = run(p)
        for a, b in zip([*whole[:4], *whole[4]], [*parts[:4], *parts[4]]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    @pytest.mark.skipif(INTERPRETED, reason="large products are for a GPU")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("other", [None, torch.float32], ids=["", "fp32-parameters"])
    def test_a_real_size(self, dtype: torch.dtype, other: torch.dtype | None) -> None:
        p = Problem((300, 30_522, 256), dtype, other=other, label_smoothing=0.1)
        check(p)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
    def test_fp32_parameters_beside_half_hidden(self, dtype: torch.dtype, label_smoothing: float) -> None:
        """What autocast gives: products in hidden's dtype, gradients of the parameters in fp32."""
        with small_chunks():
            check(Problem((9, 150, 24), dtype, other=torch.float32, label_smoothing=label_smoothing))

    def test_half_parameters_beside_fp32_hidden(self) -> None:
        with small_chunks():
            check(Problem((9, 150, 24), other=torch.float16))

    @pytest.mark.parametrize("needs", [(n & 1 > 0, n & 2 > 0, n & 4 > 0) for n in range(8)], ids=str)
    def test_only_what_is_needed(
        self, needs: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        p = Problem((5, 150, 8), torch.float16)
        *_, lse, expected = run(p)
        products = []
        mm = torch.mm
        monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: products.append(1) or mm(*args, **kwargs))
        gradients = linear_cross_entropy_bwd(p.dloss, *p.inputs, p.labels, lse, needs=needs)
        for ours, theirs, is_needed in zip(gradients, expected, needs):
            assert (ours is not None) == is_needed
            assert ours is None or torch.equal(ours, theirs)
        assert len(products) == 1 + needs[0] + needs[1]

    def test_known_values(self) -> None:
        check_known_values()

    @pytest.mark.usefixtures("nan_filled")
    def test_an_ignore_index_that_is_a_word(self) -> None:
        check_ignored_label_that_is_a_word()

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_more_rows_than_a_program_has(self, dtype: torch.dtype) -> None:
        check_many_rows(dtype=dtype)

    def test_large_logits(self) -> None:
        check_large_logits()

    def test_the_first_of_equal_logits(self) -> None:
        check_ties()

    def test_ignored_rows_hold_anything(self) -> None:
        check_ignored_rows_hold_anything()

    def test_closed_words(self) -> None:
        check_closed_words()

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("label_smoothing", [0.0, 1.0])
    def test_all_rows_ignored(self, label_smoothing: float) -> None:
        p = Problem((5, 40, 8), torch.float16, label_smoothing=label_smoothing)
        p.labels.fill_(IGNORED)
        loss, correct, count, _, gradients = run(p)
        assert (loss.item(), correct.item(), count.item()) == (0.0, 0, 0)
        assert not any(gradient.any() for gradient in gradients)

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("other", DTYPES[:2], ids=str)
    def test_no_rows(self, other: torch.dtype) -> None:
        p = Problem((0, 40, 8), torch.float16, other=other)
        loss, correct, count, lse, (dhidden, dweight, dbias) = run(p)
        assert (loss.item(), correct.item(), count.item(), lse.numel()) == (0.0, 0, 0, 0)
        assert loss.dtype == torch.float32 and dhidden.shape == (0, 8)
        for given, gradient in ((p.weight, dweight), (p.bias, dbias)):
            assert torch.equal(gradient, torch.zeros_like(given))

    @pytest.mark.parametrize("label", [40, 64, 2**40, -1, -(2**40)])
    def test_a_label_beyond_the_vocabulary_is_nan_and_reads_nothing(self, label: int) -> None:
        check_label_beyond_the_vocabulary(label=label)

    def test_row_offsets_beyond_32_bits(self) -> None:
        check_far_rows()

    def test_any_strides(self) -> None:
        p = Problem((6, 70, 10))
        packed = run(p)
        p.hidden = torch.full((6, 30), 1e4, device=DEVICE)[:, 3:13].copy_(p.hidden)
        p.weight = torch.empty(10, 70, device=DEVICE).copy_(p.weight.T).T
        strided = run(p)
        for a, b in zip([*strided[:4], *strided[4]], [*packed[:4], *packed[4]]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.is_contiguous()

    def test_is_deterministic(self) -> None:
        p = Problem((20, 150, 8), torch.float16, label_smoothing=0.1)
        with small_chunks():
            first, again = run(p), run(p)
        assert all(torch.equal(a, b) for a, b in zip([*first[:4], *first[4]], [*again[:4], *again[4]]))

    def test_launches_on_the_tensors_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        guarded = []
        guard = cross_entropy.device_guard
        monkeypatch.setattr(cross_entropy, "device_guard", lambda x: guarded.append(x) or guard(x))
        p = Problem((3, 40, 8))
        run(p)
        assert len(guarded) == 2 and all(x is p.hidden for x in guarded)

    def test_bad_input_is_one_clear_error(self) -> None:
        p = Problem((4, 6, 3))
        h, w, b, y = *p.inputs, p.labels
        lse = torch.zeros(4, device=DEVICE)
        forward, backward = linear_cross_entropy_fwd, linear_cross_entropy_bwd
        for message, call in [
            (
                r"hidden must be \[P, H\], but has shape \(2, 2, 3\)",
                lambda: forward(h.view(2, 2, 3), w, b, y),
            ),
            (r"weight must be \[V, 3\] .* is \[6, 2\]", lambda: forward(h, w[:, :2], b, y)),
            (r"weight must be \[V, 3\] with V from 1 .* \[0, 3\]", lambda: forward(h, w[:0], b[:0], y)),
            (r"bias must be \[6\] and contiguous, but is \[5\]", lambda: forward(h, w, b[:5], y)),
            (r"bias must be .* strides \[2\]", lambda: forward(h, w, b.repeat(2)[::2], y)),
            ("hidden must be float32, float16 or bfloat16", lambda: forward(h.double(), w, b, y)),
            ("bias must be float32, float16 or bfloat16", lambda: forward(h, w, b.long(), y)),
            (r"labels must be \[4\] torch.int64 .* are \[3\]", lambda: forward(h, w, b, y[:3])),
            (r"labels must be .* are \[4\] torch.int32", lambda: forward(h, w, b, y.int())),
            ("label_smoothing 1.5 is not between 0 and 1", lambda: forward(h, w, b, y, -100, 1.5)),
            ("label_smoothing nan is not between", lambda: forward(h, w, b, y, -100, float("nan"))),
            ("dloss must be a scalar", lambda: backward(lse, h, w, b, y, lse)),
            ("lse the forward's.* torch.float16", lambda: backward(p.dloss, h, w, b, y, lse.half())),
        ]:
            with pytest.raises(ValueError, match=message):
                call()
