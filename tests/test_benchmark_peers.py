"""Peers of the benchmarks that are not installed here: stand-ins with the published signatures; and tasks.

The stand-ins take what the libraries take, compute what they compute, and raise for anything else.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import memory, model_cases, peers
from benchmarks.model_cases import Run, encoding_task, training_task
from benchmarks.op_cases import OPS, Inputs, Op, Shape, task_of
from benchmarks.reference import ReferenceBert
from benchmarks.task import Roof, Task, figures, is_the_basis, near
from benchmarks.workloads import MemoryStore, mixed_lengths, packed_batch, typical_batch, wikipedia_512
from fastbert.batch import IGNORE_INDEX
from fastbert.config import BertConfig

CPU = torch.device("cpu")
ROOF = Roof(tflops=0.1, gb_per_s=10.0)
TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """install("a.b", name=value): a module of that name, and its parents."""

    def put(name: str, **contents: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[name]).update(contents)

    return put


# ---- one operation ----------------------------------------------------------------------------------------


def install_flash_attn(install: Any, wrong: float = 0.0) -> None:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32 and dropout_p == 0.0
        out = []
        for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
            rows = (x[a:b].transpose(0, 1) for x in (q, k, v))
            out.append(F.scaled_dot_product_attention(*rows).transpose(0, 1))
        return torch.cat(out) + wrong

    def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
        slots = hidden_states.new_zeros(batch * seqlen, hidden_states.shape[-1])
        return slots.index_copy(0, indices, hidden_states).view(batch, seqlen, -1)

    install("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    install(
        "flash_attn.bert_padding", index_first_axis=lambda input, indices: input[indices], pad_input=pad_input
    )


class _Norm(nn.Module):
    """Liger's and apex's have the same parameters and forward."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full((hidden_size,), 9.0)) for _ in range(2))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)


def install_liger(install: Any) -> None:
    def liger_cross_entropy(
        input: Tensor, target: Tensor, weight: None = None, size_average: None = None,
        ignore_index: int = -100, reduce: None = None, reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        return F.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)

    def liger_fused_linear_cross_entropy(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        return F.cross_entropy(F.linear(input, weight, bias), target, reduction=reduction)

    install("liger_kernel.transformers", LigerLayerNorm=_Norm)
    install(
        "liger_kernel.transformers.functional",
        liger_cross_entropy=liger_cross_entropy,
        liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy,
    )


class _FusedLAMB(torch.optim.Optimizer):
    """apex's signature; a first step of LAMB."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True,
        set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        self.max_grad_norm = max_grad_norm
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        assert self.max_grad_norm == 1.0


def install_apex(install: Any) -> None:
    class FusedLayerNorm(_Norm):
        def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
            super().__init__(normalized_shape, eps)

    install("apex.optimizers", FusedLAMB=_FusedLAMB)
    install("apex.normalization", FusedLayerNorm=FusedLayerNorm)


def op_of(name: str, tokens: int = 24) -> Op:
    torch.manual_seed(0)
    return OPS[name](Inputs(Shape(tokens, 16, 2, vocab=61, longest=16), CPU, torch.float32))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_every_side_of_an_operation_computes_the_same(name: str, backward: bool, install: Any) -> None:
    install_flash_attn(install)
    install_liger(install)
    install_apex(install)
    task = task_of(op_of(name), backward, ROOF)
    # torch's own has no kernel for a CPU
    assert set(task.refused) <= {"torch varlen_attn"}, task.refused
    expected = {
        "attention": {"flash-attn", "torch sdpa, padded"},
        "dropout_add_norm": {"torch", "apex FusedLayerNorm", "Liger LayerNorm"},
        "linear_cross_entropy": {"Liger cross-entropy", "Liger linear cross-entropy"},
        "pad": {"flash-attn bert_padding"},
        "unpad": {"flash-attn bert_padding"},
    }
    assert expected.get(name, set()) | {"fastbert"} <= set(task.sides)
    for call in task.sides.values():
        assert len(call()) == (1 + len(op_of(name).leaves) if backward else 1)
    assert task.bytes > 0 and (task.flop > 0) == (name.split(",")[0] in _PRODUCTS)


_PRODUCTS = ("qkv", "attention", "linear_act", "linear_cross_entropy")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name in _PRODUCTS if name != "attention"])
def test_flops_are_those_that_torch_counts(name: str, backward: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    op = op_of(name)
    task = task_of(op, backward, ROOF)
    with FlopCounterMode(display=False) as counter:
        task.sides[op.basis]()
    assert counter.get_total_flops() == task.flop


def test_work_that_is_counted_by_hand() -> None:
    inputs = Inputs(Shape(24, 16, 2, vocab=61, longest=16), CPU, torch.float32)
    squares = sum(n * n for n in inputs.lengths)
    # q k^T and p v: two products of L x L x 8 a head; backward makes the scores again: five products more
    assert OPS["attention"](inputs).flop == (2 * 2 * squares * 8 * 2, 7 * 2 * squares * 8 * 2)
    # a row is 64 bytes: x, the residual and y; then x, the residual, dy and two gradients
    assert OPS["dropout_add_norm"](inputs).bytes == (3 * 24 * 64, 8 * 24 * 64)
    assert OPS["unpad"](inputs).bytes[0] == 2 * 24 * 64


def test_a_peer_that_is_missing_broken_or_wrong_is_left_out_with_its_reason(install: Any) -> None:
    task = task_of(op_of("attention"), False, ROOF)
    assert task.refused["flash-attn"] == "does not run: ModuleNotFoundError: No module named 'flash_attn'"
    install_flash_attn(install, wrong=0.1)
    assert task_of(op_of("attention"), False, ROOF).refused["flash-attn"].startswith("wrong result: output 0")
    install("flash_attn", flash_attn_varlen_func=lambda q, k, v: q)
    refused = task_of(op_of("attention"), False, ROOF).refused["flash-attn"]
    assert refused.startswith("does not run: TypeError") and "unexpected keyword" in refused
    assert "fastbert" in task.sides and not task.failures()


def test_pypis_apex_is_not_nvidias(install: Any) -> None:
    install("apex.optimizers")
    with pytest.raises(peers.MissingPeer, match=r"no apex.optimizers.FusedLAMB: it is not NVIDIA's"):
        peers.fused_lamb([{"params": [nn.Parameter(torch.zeros(2))]}])
    install_apex(install)
    peers.fused_lamb([{"params": [nn.Parameter(torch.zeros(2))]}], lr=1e-4).step()


# ---- whole models -----------------------------------------------------------------------------------------


class _FlashBert(nn.Module):
    """flash-attn's BertForPreTraining: unpadded, labels of 0 take no part, keys of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        assert config.use_flash_attn and config.position_embedding_type == "absolute"
        self.reference = ReferenceBert(config)

    def forward(
        self, input_ids: Tensor, position_ids: None = None, token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
    ) -> Any:  # fmt: skip
        assert labels is not None and not (labels == IGNORE_INDEX).any()
        loss = self.reference(
            input_ids,
            token_type_ids,
            attention_mask,
            labels.masked_fill(labels == 0, -100),
            next_sentence_label,
        )
        return type("Output", (), {"loss": loss})


class _FlashEncoder(nn.Module):
    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__()
        assert not (add_pooling_layer or config.last_layer_subset)
        self.reference = ReferenceBert(config).bert
        del self.reference.pooler

    def forward(
        self, input_ids: Tensor, position_ids: None = None, token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, masked_tokens_mask: None = None,
    ) -> Any:  # fmt: skip
        hidden = self.reference(input_ids, token_type_ids, attention_mask)
        return type("Output", (), {"last_hidden_state": hidden})


def install_flash_bert(install: Any) -> None:
    def remap_state_dict(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        assert all(name.startswith(("bert.", "cls.")) for name in state_dict)
        with_heads = any(name.startswith("cls.") for name in state_dict)
        return {
            f"reference.{name}" if with_heads else f"bert.reference.{name.removeprefix('bert.')}": value
            for name, value in state_dict.items()
        }

    install(
        "flash_attn.models.bert",
        BertForPreTraining=_FlashBert,
        BertModel=_FlashEncoder,
        remap_state_dict=remap_state_dict,
    )


FORMS = [
    f"transformers{attention}{way}"
    for attention, way in (("", ""), (" sdpa", ", sorted"), (" eager", ""), (" eager", ", sorted"))
]


@pytest.mark.parametrize("make", [training_task, encoding_task])
def test_whole_models_are_compared_in_every_form(
    make: Any, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # steps that change the loss at once: what is compared is the loss before any
    monkeypatch.setattr(model_cases, "LR", 0.05)
    transformers = pytest.importorskip("transformers")
    # it looks for flash-attn when it imports a model: before there is a stand-in
    assert transformers.BertForPreTraining and transformers.BertModel
    install_flash_bert(install)
    torch.manual_seed(0)
    run = Run(BertConfig(**TINY), CPU, ROOF, peers.Compiler(left_s=0.0), sorted_rows=2)
    batch = packed_batch([20, 9, 5, 2], 61)
    task = make(batch, run)
    assert list(task.sides) == ["fastbert", "reference", *FORMS, "flash-attn BERT"]
    for compiled in ("sdpa compiled", "sdpa compiled, sorted", "eager compiled", "eager compiled, sorted"):
        assert task.refused[f"transformers {compiled}"].endswith("no time is left for torch.compile")
    for call in task.sides.values():
        call()
    assert task.notes["tokens"] == 36 and task.notes["padded_slots"] == 80


def test_a_model_that_trains_on_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def spoiled(kind: str, config: Any, state: dict[str, Tensor], attention: str, **options: Any) -> Any:
        changed = {name: 1.5 * value for name, value in state.items()}
        return original(kind, config, changed, attention, **options)

    original = peers.transformers_model
    monkeypatch.setattr(peers, "transformers_model", spoiled)
    run = Run(BertConfig(**TINY), CPU, ROOF, peers.Compiler(left_s=0.0), sorted_rows=2, forms="plain")
    for make in (training_task, encoding_task):
        torch.manual_seed(0)
        task = make(packed_batch([20, 9, 5, 2], 61), run)
        assert task.refused["transformers"].startswith("wrong result") and "reference" in task.sides


def test_sorting_by_length_keeps_every_row() -> None:
    arguments = {
        "input_ids": torch.arange(1, 13).view(4, 3),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool(),
        "next_sentence_label": torch.tensor([3, 1, 2, 1]),
    }
    short, long = peers.length_sorted(arguments, 2)
    assert short["input_ids"].tolist() == [[4], [10]] and short["next_sentence_label"].tolist() == [1, 1]
    assert long["input_ids"].tolist() == [[7, 8, 9], [1, 2, 3]]
    assert long["attention_mask"].tolist() == [[True, True, False], [True, True, True]]


def test_compiling_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    compiler = peers.Compiler(left_s=1e-9)
    assert compiler("first", lambda x: x, lambda compiled: compiled(1))(3) == 3
    with pytest.raises(RuntimeError, match="no time is left"):
        compiler("second", lambda x: x, lambda compiled: compiled(1))
    assert list(compiler.seconds) == ["first"]


# ---- tasks ------------------------------------------------------------------------------------------------


def test_shares_are_of_the_machines_own_rates() -> None:
    roof = Roof(tflops=2.0, gb_per_s=100.0)
    # 4 GFLOP take 2 ms, 0.1 GB take 1 ms
    task = Task(4e-3, "tflop", flop=4e9, bytes=1e8, roof=roof)
    row = figures(task, {"fastbert": [4.0] * 5, "peer": [8.0] * 5}, "fastbert")
    assert (row["floor_ms"], row["bound"]) == (2.0, "product")
    assert row["share_of_roof"] == {"fastbert": 0.5, "peer": 0.25} and row["times_faster_than"] == {
        "peer": 2.0
    }
    assert row["tflops"]["fastbert"] == 1.0
    model = Task(100.0, "token", flop=4e9, roof=roof, is_model=True)
    row = figures(model, {"fastbert": [8.0] * 5}, "fastbert")
    assert row["mfu"] == {"fastbert": 0.25} and row["tokens_per_s"] == {"fastbert": 12_500.0}
    assert roof.bound(0.0, 1.0) == "copy" and roof.floor_ms(0.0, 1e8) == 1.0


def test_results_are_near_or_not() -> None:
    right = torch.tensor([3.0, 4.0])
    check = near((right, 2.0), 0.01)
    assert check((right + 0.01, 2.0)) == ""
    assert check((right + 0.1, 2.0)).startswith("wrong result: output 0 is 0.0283 away, 0.01 allowed")
    assert check((right, float("nan"))).startswith("wrong result: output 1 is nan away")
    assert check((right[:1], 2.0)) == "wrong result: output 0 is [1], not [2]"
    assert check(right) == "wrong result: 1 outputs, not 2"
    assert near(torch.zeros(2), 0.1)(torch.full((2,), 0.2)) != ""


def test_what_is_timed_was_checked_in_the_same_process() -> None:
    pytest.importorskip("pytest_benchmark")
    from benchmarks.conftest import compared

    task = compared({"fastbert": lambda: 2.0, "peer": lambda: 2.001}, 10.0, "tokens")
    assert list(task.sides) == ["fastbert", "peer"] and task.unit == "token"
    with pytest.raises(AssertionError, match=r"peer: wrong result: output 0 is 0\.05 away"):
        compared({"fastbert": lambda: 2.0, "peer": lambda: 2.1}, 10.0, "tokens")
    with pytest.raises(AssertionError, match="peer returns nothing to compare"):
        compared({"fastbert": lambda: 2.0, "peer": lambda: None}, 10.0, "tokens")


def test_a_side_that_may_not_be_compared_as_it_is_timed_is_compared_otherwise() -> None:
    task = Task(1.0, "call")
    task.admit("fastbert", lambda: lambda: 5.0, near(1.0, 0.1), lambda: lambda: 1.0)
    assert task.sides["fastbert"]() == 5.0
    task.admit("peer", lambda: lambda: 1.0, near(1.0, 0.1), lambda: lambda: 5.0)
    assert "peer" in task.refused
    task.admit("basis", lambda: lambda: None, is_the_basis)
    assert list(task.sides) == ["fastbert", "basis"]


def test_bytes_are_counted() -> None:
    a, b = torch.ones(1000), torch.ones(1000)
    row = memory.of_calls({"sum": lambda: (a + b) * 2, "view": lambda: a.view(10, 100)}, CPU)
    # two inputs and a result of 4,000 bytes; then one and one: both results are alive at once
    assert row["moved_mib"]["sum"] == round(5 * 4000 / 2**20, 1) and row["peak_of"] == "tensors alive at once"
    with memory.Traffic() as traffic:
        _ = (a + b) * 2
    assert traffic.moved == 5 * 4000 and traffic.bytes == 8000
    with memory.Traffic() as traffic:
        a.view(10, 100)
    assert traffic.moved == 0


def test_sizes_fit_the_device() -> None:
    assert Shape.fitting(CPU).tokens < Shape.fitting(torch.device("cuda")).tokens
    assert sum(mixed_lengths(100, 16)) == 100
    batch = packed_batch([3, 7], 61, masked=0.2)
    assert batch.cu_seqlens.tolist() == [0, 7, 10] and batch.max_seqlen == 7
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert len(batch.masked_positions) == len(batch.masked_labels) == 2


def test_the_workload_has_wikipedias_lengths() -> None:
    batch = typical_batch(wikipedia_512(tokens_per_batch=2048))
    lengths = batch.cu_seqlens[: batch.num_sequences() + 1].diff()
    assert batch.num_slots == 2048 and 0.9 < batch.num_tokens / 2048 <= 1
    assert batch.max_seqlen == 512 and lengths.max() > 2 * lengths.min()


def test_a_store_in_memory_holds_what_the_tokenizer_says() -> None:
    from fastbert.data.tokenizer import train_tokenizer

    texts = [["a cat sat", "", "on it"], ["a dog"]]
    tokenizer = train_tokenizer((s for text in texts for s in text), vocab_size=200)
    store = MemoryStore([*texts, [""]], tokenizer)
    assert len(store) == 2 and store.document_lengths.tolist() == [
        len(store.document(0)[0]), len(store.document(1)[0]),
    ]  # fmt: skip
    ids, starts, lengths = store.document(0)
    assert tokenizer.decode(ids[: lengths[0]].tolist()) == "a cat sat" and lengths.sum() == len(ids) == len(
        starts
    )
    assert 0 < store.unigram_entropy < 5
