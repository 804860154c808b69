"""The attention kernels against fp64: outputs, lse and the gradients of q, k and v; dropout; the schedule."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

import triton
import triton.language as tl
from fastbert_kernels import attention, attention_bwd
from fastbert_kernels.attention import attention_schedule, tile_rows
from fastbert_kernels.launch import (
    ARCHITECTURES,
    AttentionConfig,
    attention_dkdv_configs,
    attention_dq_configs,
    attention_fwd_configs,
)
from fastbert_kernels.philox import dropout_keep, dropout_threshold

from fastbert.ops import philox
from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_accurate,
    in_the_parent_only,
    run_interpreted,
)

# (16, 32) blocks keep the interpreter quick and make every sequence end inside a block somewhere
SMALL = AttentionConfig(16, 32, num_warps=4, num_stages=2)
# keys in the rows of a program, so the row block comes second
SMALL_DKDV = AttentionConfig(16, 32, num_warps=4, num_stages=2)

# one token; BLOCK-1, BLOCK, BLOCK+1 of both blocks; unequal, with empty ones first, between and last
LENGTHS = {
    "one-token": [1],
    "ends-of-blocks": [15, 16, 17],
    "ends-of-key-blocks": [31, 32, 33],
    "mixed-with-empty": [0, 5, 0, 0, 64, 3, 1, 0],
}
# the smallest, powers of two, and widths that are none: the scale comes from the true width
HEAD_DIMS = [8, 10, 16, 20, 26, 32, 64, 80, 96, 128]
SEED = -6_510_615_555_426_900_571  # as torch draws them: all 64 bits


class Problem:
    """A batch, and what torch makes of it in fp64 and in its own dtype.

    `unowned` rows follow the last sequence. The padding of a row with `key_mask` is any key that it drops.
    """

    def __init__(
        self,
        seqlens: list[int],
        head_dim: int = 26,
        dtype: torch.dtype = torch.float32,
        *,
        num_heads: int = 2,
        unowned: int = 3,
        key_mask: bool = False,
        dropout_p: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).to(DEVICE, torch.int32)
        self.total_tokens, self.max_seqlen = sum(seqlens) + unowned, max(seqlens)
        shape = (self.total_tokens, 3, num_heads, head_dim)
        self.qkv = (scale * torch.randn(shape)).to(DEVICE, dtype)
        self.dout = torch.randn(self.total_tokens, num_heads, head_dim).to(DEVICE, dtype)
        self.key_mask = (torch.rand(self.total_tokens) < 0.6).to(DEVICE) if key_mask else None
        if self.key_mask is not None and len(seqlens) > 1:
            self.key_mask[: seqlens[0]] = False  # a sequence without any key
        self.dropout_p = dropout_p
        self.seed = torch.tensor([SEED], device=DEVICE)
        self.schedule = attention_schedule(self.cu_seqlens, self.total_tokens, self.max_seqlen)

    @property
    def form(self) -> dict[str, object]:
        return {"key_mask": self.key_mask, "dropout_p": self.dropout_p, "seed": self.seed}

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """out [T, H, D], lse [H, T] and dqkv [T, 3, H, D]: each sequence alone, in plain torch."""
        # an unowned row has no part: neither its values nor its gradients may matter
        qkv = self.qkv.detach().to(dtype).requires_grad_()
        outs, lses = [], []
        bounds = self.cu_seqlens.tolist()
        for begin, end in itertools.pairwise(bounds):
            q, k, v = qkv[begin:end].permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
            keep = torch.ones(end - begin, dtype=torch.bool, device=DEVICE)
            if self.key_mask is not None:
                keep = self.key_mask[begin:end]
            scores = scores.masked_fill(~keep, -1e4)
            probabilities = scores.softmax(-1).masked_fill(~keep, 0.0)
            lse = scores.masked_fill(~keep, float("-inf")).double().logsumexp(-1)
            lses.append(lse if keep.any() else torch.zeros_like(lse))
            if self.dropout_p:
                kept = philox.dropout_keep(
                    self.seed,
                    torch.tensor([begin], device=DEVICE),
                    q.shape[0],
                    end - begin,
                    end - begin,
                    self.dropout_p,
                )[0]
                probabilities = probabilities * kept / (1 - self.dropout_p)
            outs.append((probabilities @ v).transpose(0, 1))
        unowned = self.total_tokens - bounds[-1]
        out = torch.cat([*outs, torch.zeros_like(qkv[:unowned, 0])])
        lse = torch.cat(
            [*lses, torch.zeros(qkv.shape[2], unowned, dtype=torch.float64, device=DEVICE)], dim=1
        )
        (dqkv,) = torch.autograd.grad(out, qkv, self.dout.to(dtype))
        return out.detach(), lse.detach(), dqkv


def run(
    p: Problem,
    *,
    config: AttentionConfig | None = SMALL,
    dkdv_config: AttentionConfig | None = SMALL_DKDV,
    forward: ModuleType = attention,
    backward: ModuleType = attention_bwd,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = p.qkv.unbind(1)
    out, lse = forward.attention_fwd(q, k, v, p.schedule, p.max_seqlen, config=config, **p.form)
    dqkv = backward.attention_bwd(
        p.dout,
        q,
        k,
        v,
        out,
        lse,
        p.schedule,
        p.max_seqlen,
        dq_config=config,
        dkdv_config=dkdv_config,
        **p.form,
    )
    return out, lse, dqkv


def check(p: Problem, **how: object) -> None:
    """Forward and every gradient: at most twice as far from fp64 as plain torch in that dtype."""
    out, lse, dqkv = run(p, **how)  # type: ignore[arg-type]
    exact_out, exact_lse, exact_dqkv = p.reference(torch.float64)
    plain_out, _, plain_dqkv = p.reference(p.qkv.dtype)
    assert out.is_contiguous() and dqkv.is_contiguous() and lse.dtype == torch.float32
    assert_accurate(out, plain_out, exact_out)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    for part in range(3):
        assert_accurate(dqkv[:, part], plain_dqkv[:, part], exact_dqkv[:, part], largest=exact_dqkv)
    owned = int(p.cu_seqlens[-1])
    for result in (out[owned:], dqkv[owned:]):
        assert torch.equal(result, torch.zeros_like(result))


def far_below_zero() -> Problem:
    """Scores of -400: a place without a key, whose score is 0, would have a probability of exp(400)."""
    p = Problem([37, 5], 16)
    p.qkv[:, :2] = 10 + p.qkv[:, :2] / 100
    p.qkv[:, 1] *= -1
    return p


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


@triton.jit
def _export_keep_kernel(
    seed_ptr, keep_ptr, row, col, major, minor, threshold,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    keep = dropout_keep(tl.load(seed_ptr), row, col, major, minor, threshold, ROWS, COLS, TRANSPOSED)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    if TRANSPOSED:
        tl.store(keep_ptr + rows[None, :] * COLS + cols[:, None], keep.to(tl.int8))
    else:
        tl.store(keep_ptr + rows[:, None] * COLS + cols[None, :], keep.to(tl.int8))


def exported_keep(
    seed: Tensor,
    row: int,
    col: int,
    shape: tuple[int, int],
    *,
    major: int = 7,
    minor: int = 3,
    p: float = 0.1,
    transposed: bool = False,
) -> Tensor:
    keep = torch.full(shape, 9, dtype=torch.int8, device=DEVICE)
    _export_keep_kernel[(1,)](
        seed, keep, row, col, major, minor, dropout_threshold(p)[0], *shape, TRANSPOSED=transposed
    )
    return keep.bool()


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_lengths_match_reference(self, lengths: str, dtype: torch.dtype) -> None:
        check(Problem(LENGTHS[lengths], dtype=dtype))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_widths_match_reference(self, head_dim: int, dtype: torch.dtype) -> None:
        check(Problem([37, 5], head_dim, dtype))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dropout_p", [0.1, 0.5])
    def test_dropout_matches_reference(self, dropout_p: float, dtype: torch.dtype) -> None:
        # the backward pass makes the mask of the forward pass again, in tiles of another shape
        check(Problem([37, 64, 5], dtype=dtype, dropout_p=dropout_p))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dropout_p", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_key_mask_matches_reference(self, dtype: torch.dtype, dropout_p: float) -> None:
        # holes at random, a key block without any key, a sequence without any: zero, not NaN
        p = Problem([4, 40, 17, 1], dtype=dtype, key_mask=True, dropout_p=dropout_p, unowned=0)
        assert p.key_mask is not None
        p.key_mask[4 : 4 + 32] = False
        check(p)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_default_configurations_match_reference(self, dtype: torch.dtype, head_dim: int) -> None:
        # sequences of up to 64 tokens have tiles of 64 rows; longer ones of 128, and several of them
        for lengths in ([64, 20], [129, 20]):
            check(Problem(lengths, head_dim, dtype, num_heads=1), config=None, dkdv_config=None)

    def test_a_long_sequence(self) -> None:
        p = Problem([8192 + 5], 16, num_heads=1, unowned=0)
        # few programs for the interpreter, which knows no registers
        big = AttentionConfig(128, 2048, num_warps=4, num_stages=1) if INTERPRETED else None
        q, k, v = p.qkv.unbind(1)
        out, _ = attention.attention_fwd(q, k, v, p.schedule, p.max_seqlen, config=big)
        heads = [x.transpose(0, 1).double() for x in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)

    def test_known_values(self) -> None:
        # scores (0, ln 3): probabilities 1/4 and 3/4; the second sequence is one token, which sees itself
        root = 2.0**0.5
        qkv = torch.zeros(3, 3, 1, 2, device=DEVICE)
        qkv[:2, 0, 0, 0] = root
        qkv[1, 1, 0, 0] = torch.tensor(3.0).log()
        qkv[:, 2, 0] = torch.tensor([[4.0, 0.0], [0.0, 8.0], [5.0, 6.0]])
        cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
        q, k, v = qkv.unbind(1)
        out, lse = attention.attention_fwd(q, k, v, attention_schedule(cu_seqlens, 3, 2), 2)
        expected = torch.tensor([[[1.0, 6.0]], [[1.0, 6.0]], [[5.0, 6.0]]], device=DEVICE)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(lse[0, :2], torch.full((2,), 4.0, device=DEVICE).log(), rtol=0, atol=1e-6)

    def test_zero_length_sequences_and_unowned_rows(self) -> None:
        # case: cu_seqlens [0, 0, 3, 3, 5] in 8 rows, of which the last three hold NaN
        p = Problem([0, 3, 0, 2], unowned=3)
        p.qkv[5:] = float("nan")
        p.dout[5:] = float("nan")
        out, _, dqkv = run(p)
        for rows in (slice(0, 3), slice(3, 5)):
            single = Problem([rows.stop - rows.start], unowned=0)
            single.qkv, single.dout = p.qkv[rows].clone(), p.dout[rows].clone()
            for result, right in zip((out, dqkv), run(single)[::2]):
                assert torch.equal(result[rows], right)
        assert out[5:].count_nonzero() == 0 and dqkv[5:].count_nonzero() == 0

    def test_scores_that_overflow_half_precision(self) -> None:
        # scores of several hundred, with masked keys: nothing is added to them, so nothing overflows
        for dtype in (torch.float16, torch.bfloat16):
            p = Problem([40, 33], 64, dtype, key_mask=True, scale=8.0, unowned=0)
            check(p)

    def test_scores_far_below_zero(self) -> None:
        check(far_below_zero())

    def test_one_sequence_does_not_see_another(self) -> None:
        p = Problem([5, 37, 2, 64], dropout_p=0.0)
        before = run(p)
        p.qkv[5:42] += 1.0
        after = run(p)
        others = torch.ones(p.total_tokens, dtype=torch.bool, device=DEVICE)
        others[5:42] = False
        for index in (0, 2):
            assert torch.equal(before[index][others], after[index][others])
            assert not torch.equal(before[index][5:42], after[index][5:42])

    def test_attention_is_deterministic(self) -> None:
        p = Problem([37, 20, 5], dtype=torch.float16, dropout_p=0.1)
        assert all(torch.equal(a, b) for a, b in zip(run(p), run(p)))

    def test_results_do_not_depend_on_the_blocks(self) -> None:
        # the dropout mask belongs to the place, not to the tile
        p = Problem([70, 33], dropout_p=0.2)
        wide = AttentionConfig(64, 64, num_warps=4, num_stages=2)
        for ours, theirs in zip(run(p), run(p, config=wide, dkdv_config=wide)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)

    def test_strided_views(self) -> None:
        # q, k and v from tensors of three different strides, heads not adjacent; and a strided dout
        p = Problem([20, 9], 16)
        right = run(p)
        T, _, H, D = p.qkv.shape
        views = []
        for part, (rows, heads) in enumerate([(3 * H * D + 16, D), (2 * H * D, 2 * D), (D, T * D)]):
            memory = torch.full((T * max(rows, 1) + H * heads,), 1e4, device=DEVICE)
            views.append(memory.as_strided((T, H, D), (rows, heads, 1)).copy_(p.qkv[:, part]))
        out, lse = attention.attention_fwd(*views, p.schedule, p.max_seqlen, config=SMALL)
        assert torch.equal(out, right[0])
        dout = torch.full((T, 2, H, D), 1e4, device=DEVICE)[:, 1].copy_(p.dout)
        dqkv = attention_bwd.attention_bwd(
            dout, *views, out, lse, p.schedule, p.max_seqlen, dq_config=SMALL, dkdv_config=SMALL_DKDV
        )
        assert torch.equal(dqkv, right[2])

    def test_inputs_are_left_alone(self) -> None:
        p = Problem([20, 9], key_mask=True, dropout_p=0.1)
        tensors = [p.qkv, p.dout, p.key_mask, p.seed, p.schedule]
        before = [t.clone() for t in tensors]  # type: ignore[union-attr]
        run(p)
        assert all(torch.equal(t, b) for t, b in zip(tensors, before))  # type: ignore[arg-type]

    @pytest.mark.parametrize("shape", [(0, 2, 8), (5, 0, 8), (5, 2, 0)], ids=str)
    def test_empty(self, shape: tuple[int, int, int]) -> None:
        T, H, D = shape
        qkv = torch.zeros(T, 3, H, D, device=DEVICE)
        cu_seqlens = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
        schedule = attention_schedule(cu_seqlens, T, T)
        out, lse = attention.attention_fwd(*qkv.unbind(1), schedule, T)
        assert out.shape == shape and lse.shape == (H, T)
        assert attention_bwd.attention_bwd(out, *qkv.unbind(1), out, lse, schedule, T).shape == qkv.shape

    def test_row_offsets_beyond_32_bits(self) -> None:
        check_far_rows(attention, attention_bwd)

    def test_bad_input_is_one_clear_error(self) -> None:
        p = Problem([4], 8, unowned=0)
        q, k, v = p.qkv.unbind(1)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, **form: object) -> None:
            attention.attention_fwd(q, k, v, p.schedule, p.max_seqlen, **form)  # type: ignore[arg-type]

        wide = torch.zeros(4, 2, 130, device=DEVICE)
        far = torch.empty(1, device="meta").expand(4, 2, 8).as_strided((4, 2, 8), (2**24, 8, 1))
        for message, call in [
            (r"q must be \[T, heads, head_dim\], but has shape \(4, 16\)", lambda: forward(q.flatten(1))),
            ("q must be float32, float16 or bfloat16", lambda: forward(q.double())),
            ("head_dim 130 is above 128", lambda: forward(wide, wide, wide)),
            (r"k must be like q, .* but is \(3, 2, 8\)", lambda: forward(k=k[:3])),
            ("v must be like q, .* torch.float16", lambda: forward(v=v.half())),
            ("v must have adjacent columns, .* stride 2", lambda: forward(v=wide[..., 0:16:2])),
            ("k must be like q, .* on meta", lambda: forward(k=far)),
            (r"key_mask must be \[4\] bool", lambda: forward(key_mask=torch.ones(4, device=DEVICE))),
            (r"key_mask must be \[4\] bool", lambda: forward(key_mask=p.schedule[:, 0] > 9)),
            ("dropout_p 1.5 is not a probability", lambda: forward(dropout_p=1.5, seed=p.seed)),
            ("dropout needs a seed, an int64 tensor of one element .* None", lambda: forward(dropout_p=0.1)),
            ("dropout needs a seed, .* torch.int32", lambda: forward(dropout_p=0.1, seed=p.seed.int())),
        ]:
            with pytest.raises(ValueError, match=message):
                call()

    # ---- dropout ------------------------------------------------------------------------------------------

    def test_mask_is_a_function_of_the_place(self) -> None:
        seed = torch.tensor([SEED], device=DEVICE)
        whole = exported_keep(seed, 0, 0, (64, 128))
        assert torch.equal(exported_keep(seed, 0, 0, (64, 128), transposed=True), whole)
        assert torch.equal(exported_keep(seed, 32, 64, (16, 32)), whole[32:48, 64:96])
        assert torch.equal(exported_keep(seed, 32, 64, (32, 16), transposed=True), whole[32:, 64:80])
        major = torch.tensor([7], device=DEVICE)
        eager = philox.dropout_keep(seed, major, 4, 64, 128, 0.1)[0, 3]
        assert torch.equal(eager, whole)

    def test_masks_are_independent(self) -> None:
        seed = torch.tensor([SEED], device=DEVICE)
        mask = exported_keep(seed, 0, 0, (128, 1024)).float()
        others = {
            "another head": exported_keep(seed, 0, 0, (128, 1024), minor=4),
            "another sequence": exported_keep(seed, 0, 0, (128, 1024), major=8),
            "the next seed": exported_keep(seed + 1, 0, 0, (128, 1024)),
            "a seed with another upper half": exported_keep(seed + 2**40, 0, 0, (128, 1024)),
            "the rows below": exported_keep(seed, 128, 0, (128, 1024)),
        }
        n = mask.numel()
        # 4 standard deviations: of the share that is dropped, and of the share of equal places (0.82)
        assert abs(1 - mask.mean().item() - 0.1) < 4 * (0.1 * 0.9 / n) ** 0.5
        for name, other in others.items():
            equal = (mask == other).float().mean().item()
            assert abs(equal - 0.82) < 4 * (0.82 * 0.18 / n) ** 0.5, (
                f"{name}: {equal:.4f} of the places equal"
            )
        # neighbours, and elements of one Philox call (8 rows or columns apart), know nothing of another
        for rows, cols in ((0, 1), (1, 0), (0, 2), (0, 8), (8, 0), (8, 9), (0, 16), (16, 0)):
            x, y = mask[: 128 - rows, : 1024 - cols], mask[rows:, cols:]
            equal = (x == y).float().mean().item()
            assert abs(equal - 0.82) < 4 * (0.82 * 0.18 / x.numel()) ** 0.5, (
                f"({rows}, {cols}) apart: {equal:.4f}"
            )

    def test_everything_can_be_dropped(self) -> None:
        out, _, dqkv = run(Problem([20, 9], dropout_p=1.0))
        assert out.count_nonzero() == 0 and dqkv.count_nonzero() == 0

    def test_gradient_by_finite_differences_with_dropout(self) -> None:
        p = Problem([19, 6], 8, dropout_p=0.3, num_heads=1, unowned=0)
        _, _, dqkv = run(p)
        direction = torch.randn_like(p.qkv)
        qkv, h = p.qkv, 1e-2
        values = []
        for step in (h, -h):
            p.qkv = qkv + step * direction
            values.append((run(p)[0].double() * p.dout).sum())
        slope = (values[0] - values[1]) / (2 * h)
        torch.testing.assert_close((dqkv * direction).double().sum(), slope, rtol=2e-3, atol=2e-3)


def check_far_rows(forward: ModuleType, backward: ModuleType) -> None:
    """Rows so far apart that the last sequence begins beyond element 2^31, which 32 bits do not reach."""
    # the interpreter wraps 32-bit products as the GPU does. 5 GiB of address space, of which a CPU commits
    # the pages of 150 short rows
    stride = 2**24 - 16
    p = Problem([140, 10], 16, torch.float16, num_heads=1, unowned=0)
    memory = torch.empty(stride * p.total_tokens, dtype=torch.float16, device=DEVICE)
    near = run(p)
    size, strides = p.qkv.shape, (stride, *p.qkv.stride()[1:])
    p.qkv = memory.as_strided(size, strides).copy_(p.qkv)
    p.dout = memory[64:].as_strided(p.dout.shape, (stride, 16, 1)).copy_(p.dout)
    for ours, right in zip(run(p, forward=forward, backward=backward), near):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)


class TestSchedule:
    """Needs no kernels: tensor arithmetic."""

    @pytest.mark.parametrize("max_seqlen", [64, 300])
    @pytest.mark.parametrize("seqlens", [[300, 0, 5, 128, 129, 0], [0, 0], [64], [1] * 7, []], ids=str)
    @pytest.mark.parametrize("unowned", [0, 1, 200])
    def test_every_row_has_one_tile(self, seqlens: list[int], unowned: int, max_seqlen: int) -> None:
        cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int()
        owned, rows = int(cu_seqlens[-1]), tile_rows(max_seqlen)
        total = owned + unowned
        seen = torch.zeros(total, dtype=torch.long)
        for first, end, keys_start, keys_end in attention_schedule(cu_seqlens, total, max_seqlen).tolist():
            tile = range(first, min(first + rows, end))
            seen[first : tile.stop if tile else first] += 1
            for row in tile:
                sequence = int(torch.searchsorted(cu_seqlens, row, right=True)) - 1
                keys = cu_seqlens[sequence : sequence + 2].tolist() if row < owned else [0, 0]
                assert [keys_start, keys_end] == keys
                assert end == (keys[1] if row < owned else total)
                assert row >= owned or (first - keys_start) % rows == 0
        assert seen.eq(1).all()

    def test_longest_first_and_no_tile_without_rows_but_a_few(self) -> None:
        seqlens = [10, 500, 130, 0, 300]
        cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int()
        schedule = attention_schedule(cu_seqlens, 940, 512)
        lengths = (schedule[:, 3] - schedule[:, 2]).tolist()
        assert lengths[:10] == [500] * 4 + [300] * 3 + [130] * 2 + [10]
        # a grid of max_seqlen for each sequence would have 20 tiles
        assert len(lengths) == 940 // 128 + len(seqlens) + 1

    def test_number_of_tiles_depends_on_shapes_only(self) -> None:
        shapes = {
            attention_schedule(torch.tensor([0, a, 600]).int(), 600, 512).shape for a in (0, 1, 128, 300, 599)
        }
        assert len(shapes) == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("block_d", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("key_mask", [False, True])
def test_rules_give_blocks_that_divide_a_tile(
    arch: str, dtype: str, block_d: int, rows: int, key_mask: bool
) -> None:
    kind = (arch, dtype, block_d, rows, key_mask)
    for rule, block in (
        (attention_fwd_configs, "block_m"),
        (attention_dq_configs, "block_m"),
        (attention_dkdv_configs, "block_n"),
    ):
        configs = rule(*kind)
        assert configs and len(set(configs)) == len(configs)
        for config in configs:
            assert rows % getattr(config, block) == 0
            # Philox serves 16 x 16 elements, and matrix instructions need 16 of everything
            assert config.block_m % 16 == 0 and config.block_n % 16 == 0
