"""`python -m fastbert.pretrain --packed`: text -> a BERT that transformers loads.

Build everything, check everything, then train: nothing is trained before the last check has passed.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shutil
import sys
import time
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from fastbert.batch import PackedBatch
from fastbert.compiled import compile_losses
from fastbert.config import BertConfig
from fastbert.data.cache import build_store
from fastbert.data.corpus import Corpus, open_corpus
from fastbert.data.device_masking import DeviceMasking
from fastbert.data.loader import (
    LoaderSettings,
    PackedLoader,
    Vocabulary,
    WindowBuilder,
    evaluation_batches,
)
from fastbert.data.order import training_documents
from fastbert.data.prepared import PreparedText
from fastbert.data.store import DocumentStore
from fastbert.data.tokenizer import (
    TOKENIZER_CHARS,
    load_tokenizer,
    ordinary_ids,
    save_tokenizer,
    special_ids,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from fastbert.errors import UserError
from fastbert.modeling import BertForPreTraining
from fastbert.optim import AdamW, Lamb, learning_rate, parameter_groups
from fastbert.train import checkpoint as ckpt
from fastbert.train import optimizer_state
from fastbert.train.distributed import SPEECH_S, OtherRankFailed, Ranks, shard
from fastbert.train.loop import RunData, run_training
from fastbert.train.settings import MAX_POSITIONS, Settings, check, parse_arguments, resolve, to_toml
from fastbert.train.trainer import Trainer

EVALUATION_TOKENS = 32768  # held-out tokens an evaluation reads at most
MANY_UNKNOWN = 0.05  # share of [UNK] from which the tokenizer does not fit the text
MIN_DOCUMENTS = 2  # a random next sentence comes from a different document


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, 128 + signal)."""
    ranks = Ranks()
    try:
        ranks = Ranks.from_environment()
        console = Console(quiet=not ranks.is_main)
        if not ranks.is_main:
            warnings.simplefilter("ignore")  # rank 0 says the same
        with ExitStack() as silence:
            if not ranks.is_main:  # of an unknown option, and of --help
                silence.enter_context(redirect_stdout(io.StringIO()))
                silence.enter_context(redirect_stderr(io.StringIO()))
            settings = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        status = pretrain(settings, console, ranks)
        ranks.leave()
        return status
    except KeyboardInterrupt:  # while the corpus was read; the training loop handles signals itself
        return 130
    except SystemExit:  # of the parser
        if not ranks.is_main:
            time.sleep(SPEECH_S)
        raise
    except OtherRankFailed:
        message = ""
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = (
            "the disk is full: free some space and type the same command again, which continues from the "
            "last checkpoint"
        )
    except RuntimeError as error:
        reason = ranks.explain(error)
        if reason is None:
            raise
        message = reason
    if not message or not ranks.is_first_to_fail():
        time.sleep(SPEECH_S)
        return 2
    stderr = Console(stderr=True)
    stderr.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def pretrain(settings: Settings, console: Console, ranks: Ranks) -> int:
    """Train as `settings` say; returns the exit status. Raises UserError before any training."""
    device = _device(settings, ranks)
    settings = resolve(settings, device.type, ranks.world_size)
    check(settings)
    if settings.optimization.precision == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
    if settings.optimization.precision == "bf16" and not ranks.alone and not settings.run.shard:
        raise UserError(
            f"--precision bf16 would add up the gradients of {ranks.world_size} ranks in bf16, which loses "
            "small ones; use bf16-autocast, or --shard, which adds them up in fp32"
        )
    if settings.run.shard and settings.run.compile:
        raise UserError(
            "--shard puts layers together in hooks that --compile does not know: leave out one of the two"
        )
    if settings.run.shard and ranks.alone:
        raise UserError(
            "--shard splits the weights among several ranks, and this run has one: start it with torchrun, "
            "or leave out --shard"
        )
    if settings.run.print_config:
        print(to_toml(settings), end="")
        return 0

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    ranks.join(device, settings.run.rank_timeout)
    corpus = _corpus(settings)
    run_dir = settings.run.output = _run_dir(settings, corpus)
    with ExitStack() as held:
        found: Path | None = None
        with ranks.main_first("folder"):
            if ranks.is_main:
                ckpt.make_run_dir(run_dir)
                held.enter_context(ckpt.exclusive(run_dir))
                ckpt.remove_leftovers(run_dir)
                found = _resume_path(settings, run_dir, say)
            elif not run_dir.is_dir():
                raise UserError(
                    f"the run folder {run_dir} of rank 0 does not exist on the host of rank {ranks.rank}: "
                    "choose an --output on a file system that all hosts share"
                )
        found = ranks.from_main(found)
        say(f"corpus: {corpus.description}")
        with ranks.main_first("corpus"):
            source = None if found is None else _resume_source(found)
            cache_dir = run_dir.parent / "cache"
            tokenizer = _tokenizer(settings, corpus, cache_dir, source.path if source else None, say)
            store = _store(corpus, tokenizer, cache_dir, console)

        model = _model(settings, tokenizer, device, ranks)
        if settings.run.compile:
            compile_losses(model)
        _check_resumable(source, model.config)
        data = _data(settings, tokenizer, store, device, ranks, say)
        if ranks.is_main:
            ckpt.require_space(run_dir, _checkpoint_bytes(model) * (settings.run.keep_last + 1))
        trainer = _trainer(settings, model, data.masking, ranks)
        _restore(source, trainer, data.loader, settings, data.key, say)
        assert settings.optimization.steps is not None
        if ranks.is_main and trainer.step < settings.optimization.steps:
            # a finished run keeps the options it was trained with
            (run_dir / "config.toml").write_text(to_toml(settings), encoding="utf-8")
        return run_training(settings, trainer, data, tokenizer, console, run_dir)


@dataclass
class ResumeSource:
    path: Path
    config: BertConfig
    rng: list[dict[str, Any]]  # of each rank
    state: dict[str, Any]


def _device(settings: Settings, ranks: Ranks) -> torch.device:
    name = settings.run.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not ranks.alone and name.startswith("cuda"):  # a GPU for each rank of this machine
        if ranks.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{ranks.local_world_size} ranks are started on this machine, and torch sees "
                f"{torch.cuda.device_count()} GPUs: lower --nproc-per-node, or give --device cpu"
            )
        name = f"cuda:{ranks.local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try cpu"
        ) from error
    return device


def _corpus(settings: Settings) -> Corpus | PreparedText:
    d = settings.data
    if d.data is not None:
        return PreparedText(d.data, d.on_bad_shard)
    return open_corpus(d.corpus or None, format=d.format, text_column=d.text_column)


def _run_dir(settings: Settings, corpus: Corpus | PreparedText) -> Path:
    run = settings.run
    if run.resume in ("auto", "never"):
        return run.output or Path("runs") / f"{settings.model.size}-{corpus.name}"
    given = Path(run.resume)
    if not given.is_dir():
        raise UserError(f"--resume {given} is neither auto, never nor a folder; give a run or checkpoint")
    return run.output or (given.resolve().parent if ckpt.is_checkpoint(given) else given)


def _resume_path(settings: Settings, run_dir: Path, say: Any) -> Path | None:
    """Where to continue from: the run folder's newest intact checkpoint, or what --resume names."""
    resume, found = settings.run.resume, ckpt.list_checkpoints(run_dir)
    if resume == "never" and found:
        raise UserError(
            f"the run folder {run_dir} holds {found[0].name}; choose another --output, or leave out "
            "--resume never to continue it"
        )
    if resume in ("auto", "never"):
        if not found:
            return None
        path = ckpt.newest_intact(run_dir, say)
        if path is None:
            raise UserError(f"no checkpoint of {run_dir} is intact; choose another --output to start anew")
    elif ckpt.is_checkpoint(Path(resume)):
        path = Path(resume).resolve()
        try:
            ckpt.verify_checkpoint(path)
        except ckpt.DamagedCheckpoint as damage:
            raise UserError(f"--resume {resume} is damaged ({damage}); give another checkpoint") from damage
        if path.parent == run_dir.resolve() and path.name != found[0].name:
            raise UserError(
                f"--resume {resume} is not the newest checkpoint of {run_dir}, {found[0].name} is; choose "
                "another --output to go on from the older one"
            )
    else:
        intact = ckpt.newest_intact(Path(resume), say)
        if intact is None:
            raise UserError(f"--resume {resume} holds no intact checkpoint; give another folder")
        path = intact
    if path.parent.resolve() == run_dir.resolve():
        for damaged in found[: [p.name for p in found].index(path.name)]:
            # out of the way: it would count as one of the newest to keep
            damaged.rename(damaged.with_name(f"damaged-{damaged.name}"))
    return path


def _resume_source(path: Path) -> ResumeSource:
    return ResumeSource(path, BertConfig.from_pretrained(path), *ckpt.load_state(path))


def _tokenizer(
    settings: Settings, corpus: Corpus | PreparedText, cache_dir: Path, resumed: Path | None, say: Any
) -> Tokenizer:
    given = settings.data.tokenizer
    if isinstance(corpus, PreparedText):
        return corpus.tokenizer(cache_dir, given, resumed)
    if resumed is not None:
        tokenizer = load_tokenizer(resumed)
        if given is not None and tokenizer_fingerprint(load_tokenizer(given)) != tokenizer_fingerprint(
            tokenizer
        ):
            raise UserError(
                f"--tokenizer {given} is not the tokenizer of {resumed}; leave it out, or choose another "
                "--output"
            )
        return tokenizer
    if given is not None:
        tokenizer = load_tokenizer(given, cased=settings.data.cased or None)
        special_ids(tokenizer)
        say(f"tokenizer: {given}, {tokenizer.get_vocab_size():,} pieces")
        return tokenizer
    case = "cased" if settings.data.cased else "uncased"
    folder = cache_dir / f"tokenizer-{corpus.fingerprint()[:16]}-{settings.data.vocab_size}-{case}"
    if not (folder / "tokenizer.json").is_file():
        started = time.perf_counter()
        tokenizer = train_tokenizer(
            corpus.sentences(TOKENIZER_CHARS),
            vocab_size=settings.data.vocab_size,
            cased=settings.data.cased,
        )
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            save_tokenizer(tokenizer, partial, model_max_length=MAX_POSITIONS)
            partial.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # else another run of the same corpus was quicker
                raise UserError(f"the tokenizer cannot be written to {folder} ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        took = f", trained in {time.perf_counter() - started:.0f} s"
    else:
        took = ", trained before"
    tokenizer = load_tokenizer(folder)
    say(f"tokenizer: WordPiece, {case}, {tokenizer.get_vocab_size():,} pieces{took}")
    return tokenizer


def _store(
    corpus: Corpus | PreparedText, tokenizer: Tokenizer, cache_dir: Path, console: Console
) -> DocumentStore:
    if isinstance(corpus, PreparedText):
        store = corpus.store(cache_dir)
    else:
        with console.status("tokenizing") as status:
            store = build_store(
                corpus,
                tokenizer,
                cache_dir,
                on_progress=lambda documents, tokens: status.update(
                    f"tokenizing: {documents:,} documents, {tokens:,} tokens"
                ),
            )
    console.print(
        f"documents: {len(store):,}, tokens: {store.num_tokens:,}, unknown: {100 * store.unk_share:.2f} %, "
        f"unigram entropy: {store.unigram_entropy:.2f} nats",
        highlight=False,
        soft_wrap=True,
    )
    if store.unk_share > MANY_UNKNOWN:
        console.print(
            f"warning: {100 * store.unk_share:.0f} % of the tokens are [UNK]: this tokenizer was made for "
            "other text; train one on this corpus by leaving out --tokenizer and choosing a new --output",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    return store


def _model(
    settings: Settings, tokenizer: Tokenizer, device: torch.device, ranks: Ranks
) -> BertForPreTraining:
    assert settings.model.size is not None and settings.model.dropout is not None
    config = BertConfig.named(
        settings.model.size,
        vocab_size=vocabulary_size(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=special_ids(tokenizer).pad,
        hidden_dropout_prob=settings.model.dropout,
        attention_probs_dropout_prob=settings.model.dropout,
    )
    torch.manual_seed(settings.run.seed)
    model = BertForPreTraining(config).to(device)
    if not ranks.is_main:  # the same weights, other dropout
        torch.manual_seed(_seed_of(ranks, settings.run.seed))
    if settings.model.activation_checkpointing:
        model.gradient_checkpointing_enable()
    if settings.run.shard:
        is_bf16 = settings.optimization.precision == "bf16"
        shard(model, ranks, torch.bfloat16 if is_bf16 else None)
    return model


def _seed_of(ranks: Ranks, *seeds: int) -> int:
    """A seed of this rank's own."""
    return int(np.random.SeedSequence([*seeds, ranks.rank]).generate_state(1, np.uint64)[0] >> 1)


def _check_resumable(source: ResumeSource | None, config: BertConfig) -> None:
    if source is None:
        return
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ):
        old, new = getattr(source.config, name), getattr(config, name)
        if old != new:
            raise UserError(
                f"{source.path} was trained with {name} {old}, but {new} is asked for; choose another "
                "--output, or the same --size and --tokenizer"
            )


def _data(
    settings: Settings,
    tokenizer: Tokenizer,
    store: DocumentStore,
    device: torch.device,
    ranks: Ranks,
    say: Any,
) -> RunData:
    d = settings.data
    assert d.workers is not None
    if d.nsp and len(store) < MIN_DOCUMENTS:
        raise UserError(
            f"the corpus has {len(store)} document, and next-sentence prediction takes its random "
            "sentences from a different one; give more documents or train with --no-nsp"
        )
    ids = special_ids(tokenizer)
    vocabulary = Vocabulary(
        cls=ids.cls, sep=ids.sep, mask=ids.mask, unk=ids.unk, ordinary=ordinary_ids(tokenizer)
    )
    loader_settings = LoaderSettings(
        seq_len=d.seq_len,
        tokens_per_batch=d.tokens_per_batch,
        seed=settings.run.seed,
        mask_prob=d.mask_prob,
        max_predictions=d.max_predictions,
        whole_word=d.whole_word,
        nsp=d.nsp,
    )
    training, held_out = training_documents(store, settings.run.seed)
    if d.nsp and len(held_out) < MIN_DOCUMENTS:
        held_out = held_out[:0]
    on_device = d.mask_on == "device"
    builder = WindowBuilder(store, training, vocabulary, loader_settings, masks=not on_device)
    masking = None
    if on_device:
        masking = DeviceMasking.of(loader_settings, vocabulary, builder.shapes.num_predictions, device)
    loader = PackedLoader(builder, workers=d.workers, rank=ranks.rank, world_size=ranks.world_size)
    batches: list[PackedBatch] = []
    if len(held_out) and settings.run.eval_every:
        evaluation = dataclasses.replace(loader_settings, seed=0)
        batches = evaluation_batches(
            WindowBuilder(store, held_out, vocabulary, evaluation),
            max_batches=max(1, EVALUATION_TOKENS // d.tokens_per_batch),
        )
    elif settings.run.eval_every:
        say(f"no evaluation: {len(store)} documents are too few to hold some out")
    # the number of workers is no part of it, for it changes nothing, nor is who masks, for it changes no text
    key = {"store": store.key, **dataclasses.asdict(loader_settings)}
    example = _example(store, tokenizer, ids.mask)
    return RunData(loader, batches, store, key, example, masking)


def _example(store: DocumentStore, tokenizer: Tokenizer, mask_id: int) -> str:
    """A sentence of the corpus with one word masked."""
    if store.name == "python-docs":
        return "The [MASK] statement is used to define a function."
    for index in range(min(50, len(store))):
        input_ids, word_start, lengths = store.document(index)
        ends = np.cumsum(lengths)
        for begin, end in zip(ends - lengths, ends):
            if 8 <= end - begin <= 24:
                whole = np.flatnonzero(word_start[begin:end][:-1] & word_start[begin + 1 : end])
                if len(whole):
                    ids = input_ids[begin:end].tolist()
                    ids[whole[len(whole) // 2]] = mask_id
                    return tokenizer.decode(ids, skip_special_tokens=False)
    return "[MASK]"


def _trainer(
    settings: Settings, model: BertForPreTraining, masking: DeviceMasking | None, ranks: Ranks
) -> Trainer:
    o = settings.optimization
    assert o.lr is not None and o.steps is not None and o.schedule is not None and o.precision is not None
    kind = Lamb if o.optimizer == "lamb" else AdamW
    optimizer = kind(
        parameter_groups(model, o.weight_decay),
        lr=o.lr,
        weight_decay=o.weight_decay,
        bias_correction=o.bias_correction,
    )
    peak, total, schedule, warmup = o.lr, o.steps, o.schedule, o.warmup

    def rate(updates: int) -> float:
        return learning_rate(schedule, updates, peak=peak, total=total, warmup=warmup)

    cuda_graph = settings.run.cuda_graph and model.device.type == "cuda"
    return Trainer(model, optimizer, rate, o.precision, masking, cuda_graph, ranks)


def _checkpoint_bytes(model: BertForPreTraining) -> int:
    return 3 * sum(p.numel() * 4 for p in model.parameters())  # weights and two moments


def _restore(
    source: ResumeSource | None,
    trainer: Trainer,
    loader: PackedLoader,
    settings: Settings,
    key: dict[str, Any],
    say: Any,
) -> None:
    """Weights, moments, schedule, position in the data and random state of the checkpoint."""
    if source is None:
        return
    weights = BertForPreTraining.from_pretrained(source.path, dtype=torch.float32)
    if source.state["optimizer"] != settings.optimization.optimizer:
        raise UserError(
            f"{source.path} was trained with --optimizer {source.state['optimizer']}, but "
            f"{settings.optimization.optimizer} is asked for; choose another --output"
        )
    folder = source.path / ckpt.STATE_DIR / ckpt.OPTIMIZER
    optimizer_state.load(folder, trainer.model, trainer.optimizer, trainer.ranks)
    trainer.load_weights(weights.state_dict())
    if settings.optimization.phase is not None and source.state["phase"] != settings.optimization.phase:
        if settings.run.output is not None and source.path.parent.resolve() == settings.run.output.resolve():
            raise UserError(
                f"{source.path} is of phase {source.state['phase']}, and phase {settings.optimization.phase} "
                f"is asked for: choose another --output and start it with --resume {source.path.parent}"
            )
        # the next phase takes weights and moments; its step count and schedule start anew
        for state in trainer.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
        say(f"phase {settings.optimization.phase}: weights and moments from {source.path}")
        return
    trainer.load_state_dict(source.state["trainer"])
    ranks = trainer.ranks
    if ranks.rank < len(source.rng):
        ckpt.restore_rng(source.rng[ranks.rank], trainer.device)
    else:
        torch.manual_seed(_seed_of(ranks, settings.run.seed, trainer.step))
    say(f"resumed from {source.path} at step {trainer.step}")
    batches = settings.optimization.accumulate * ranks.world_size
    if batches != source.state["batches_per_step"]:
        say(
            f"a step now has {batches} micro-batches ({ranks.world_size} ranks with --accumulate "
            f"{settings.optimization.accumulate}), it had {source.state['batches_per_step']}"
        )
    if source.state["data"] == key:
        loader.load_state_dict(source.state["loader"])
    else:
        changed = [
            "corpus" if name == "store" else name
            for name in key
            if source.state["data"].get(name) != key[name]
        ]
        say(f"the data changed ({', '.join(changed)}): it is read from its beginning")


if __name__ == "__main__":
    sys.exit(main())
