"""The options of `python -m fastbert.pretrain`: their groups, defaults, checks and files."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fastbert.data.instances import MIN_SEQ_LEN
from fastbert.errors import UserError

Size = Literal["tiny", "mini", "small", "medium", "base", "large"]
Format = Literal["auto", "sentences", "prose", "wikiextractor", "wikitext", "jsonl", "parquet"]
MAX_POSITIONS = 512  # rows of the position table, also in a phase of shorter sequences


def _shown(default: str, metavar: str) -> Any:
    """How `--help` shows an option whose default depends on the device or on other options."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {default})", metavar=metavar)


@dataclass
class Data:
    corpus: Annotated[
        tuple[str, ...], _shown("the documentation inside every Python", "PATH [PATH ...]")
    ] = ()
    """Files, globs, folders or addresses (s3://…) of text."""
    data: Annotated[str | None, _shown("none", "DIR|URL")] = None
    """Data set of python -m fastbert.prepare to read instead of a corpus."""
    on_bad_shard: Literal["error", "skip"] = "error"
    """What a damaged or missing shard of --data does: end the run, or be left out with a warning."""
    format: Format = "auto"
    """How documents are laid out in the files."""
    text_column: Annotated[str | None, _shown("text, content, document or body", "STR")] = None
    """Column of JSONL and parquet files that holds the text."""
    tokenizer: Annotated[Path | None, _shown("trained on the corpus", "PATH")] = None
    """Hugging Face folder, tokenizer.json or vocab.txt to use."""
    vocab_size: int = 30522
    """Pieces of a trained tokenizer at most; a small corpus supports fewer."""
    cased: bool = False
    """Keep upper and lower case apart in a trained tokenizer."""
    seq_len: int = 128
    """Longest sequence in tokens, special tokens included."""
    nsp: bool = True
    """Make sentence pairs for next-sentence prediction."""
    mask_prob: float = 0.15
    """Share of the tokens to predict."""
    max_predictions: Annotated[int | None, _shown("as many as --mask-prob says", "INT")] = None
    """Most tokens to predict in one sequence."""
    whole_word: bool = False
    """Mask whole words instead of single pieces."""
    mask_on: Literal["loader", "device"] = "loader"
    """Where tokens are masked: in the loader's processes, or on the device that trains."""
    packed: bool = True
    """Lay sequences end to end; --no-packed pads the same sequences into rows."""
    tokens_per_batch: Annotated[int, _shown("1024 on a CPU, 32768 on a GPU", "INT")] = 0
    """Token budget of a micro-batch."""
    workers: Annotated[int | None, _shown("1 on a CPU, 4 on a GPU", "INT")] = None
    """Processes that build batches ahead."""


@dataclass
class Model:
    size: Annotated[
        Size | None, _shown("mini on a CPU, base on a GPU", "{tiny,mini,small,medium,base,large}")
    ] = None
    """One of Google's published sizes."""
    dropout: Annotated[float | None, _shown("0.1 for base and large, 0 for the smaller ones", "FLOAT")] = None
    """Dropout of hidden states and attention while training."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass to save memory."""


@dataclass
class Optimization:
    steps: Annotated[int | None, _shown("1600 on a CPU, 20000 on a GPU", "INT")] = None
    """Optimizer steps of the whole run."""
    accumulate: int = 1
    """Micro-batches a step, of each rank."""
    optimizer: Literal["lamb", "adamw"] = "lamb"
    """Lamb, or Adam with decoupled decay."""
    lr: Annotated[float | None, _shown("by optimizer, size and batch", "FLOAT")] = None
    """Peak learning rate."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    schedule: Annotated[
        Literal["linear", "poly", "google", "nvidia", "constant"] | None,
        _shown("poly for lamb, linear for adamw", "{linear,poly,google,nvidia,constant}"),
    ] = None
    """How the learning rate falls after the warm-up."""
    weight_decay: float = 0.01
    """Decay of all weights but biases and LayerNorm."""
    bias_correction: bool = True
    """Correct the moments for their zero start (Google's Adam did not)."""
    precision: Annotated[
        Literal["fp32", "bf16", "bf16-autocast", "fp16"] | None,
        _shown(
            "fp32 on a CPU, bf16 on a GPU, bf16-autocast on several without --shard",
            "{fp32,bf16,bf16-autocast,fp16}",
        ),
    ] = None
    """bf16: bf16 weights, rounded from fp32 ones that the optimizer keeps. bf16-autocast, fp16: fp32 weights,
    matrix products in half precision (fp16 with loss scaling). Moments and saved weights are fp32 always."""
    phase: Annotated[Literal[1, 2] | None, _shown("none", "{1,2}")] = None
    """BERT's two-phase recipe with LAMB's published numbers, batch included (65,536 sequences a step):
    1 = 128 tokens, 2 = 512 tokens from phase 1. They replace the defaults of --seq-len, --max-predictions,
    --lr, --warmup, --steps and --accumulate; --accumulate 1 makes a trial small."""


@dataclass
class Run:
    output: Annotated[Path | None, _shown("runs/SIZE-CORPUS", "PATH")] = None
    """Run folder; one that holds a checkpoint is resumed."""
    resume: Annotated[str, _shown("auto", "{auto,never}|PATH")] = "auto"
    """auto, never, or a run or checkpoint folder to continue from."""
    device: Annotated[str | None, _shown("cuda where there is one, else cpu", "STR")] = None
    """Where to train."""
    cuda_graph: bool = True
    """Replay each step as one captured CUDA graph on a GPU; where that cannot be, the reason is said."""
    compile: bool = False
    """Run the model through torch.compile, which takes a while to begin with."""
    seed: int = 12345
    """Of weights, data order, masks and dropout."""
    log_every: int = 10
    """Steps between metric rows."""
    eval_every: Annotated[int | None, _shown("a tenth of the steps", "INT")] = None
    """Steps between evaluations on held-out documents; 0 = never."""
    save_every: Annotated[int | None, _shown("a fifth of the steps, 1000 at most", "INT")] = None
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_every: int = 0
    """Keep those of every so many steps as well; 0 = no others."""
    shard: bool = False
    """Split weights, gradients and optimizer state among the ranks (FSDP2), for models too large for each."""
    rank_timeout: int = 600
    """Seconds that a rank may keep the others waiting before it is named and the run ends."""
    config: Annotated[Path | None, _shown("none", "FILE")] = None
    """TOML file to take options from, such as the config.toml of a run; the command line wins."""
    print_config: bool = False
    """Print the configuration as TOML and stop."""


@dataclass
class Settings:
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimization: Optimization = field(default_factory=Optimization)
    run: Run = field(default_factory=Run)


_NOT_IN_A_FILE = ("config", "print_config", "resume")

# LAMB's published two-phase recipe (NVIDIA DeepLearningExamples; You et al., arXiv 1904.00962): 65,536
# sequences of 128 tokens a step, then 32,768 of 512.
_PHASES = {
    1: {
        "seq_len": 128,
        "max_predictions": 20,
        "lr": 6e-3,
        "warmup": 0.2843,
        "steps": 7038,
        "sequences": 65536,
    },
    2: {
        "seq_len": 512,
        "max_predictions": 80,
        "lr": 4e-3,
        "warmup": 0.128,
        "steps": 1563,
        "sequences": 32768,
    },
}


def parse_arguments(arguments: list[str]) -> Settings:
    """Command line over `--config FILE` over defaults; an unknown option exits with status 2."""
    base, rest = _split_config(arguments)
    given = _given_names(rest)
    if base is not None:
        given |= base[1]
    settings = tyro.cli(
        Settings,
        args=rest,
        default=base[0] if base else Settings(),
        prog="python -m fastbert.pretrain",
        description=(
            "Pre-train a BERT (masked LM and next-sentence prediction) on text. Without arguments it trains "
            "a small one on the documentation that every Python carries."
        ),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    if settings.optimization.phase is not None:
        _apply_phase(settings, given)
    return settings


def resolve(settings: Settings, device_type: str, world_size: int = 1) -> Settings:
    """A copy with every default that depends on the device, the ranks or other options filled in."""
    s = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data),
        model=dataclasses.replace(settings.model),
        optimization=dataclasses.replace(settings.optimization),
        run=dataclasses.replace(settings.run),
    )
    gpu = device_type != "cpu"
    s.model.size = s.model.size or ("base" if gpu else "mini")
    if s.model.dropout is None:
        # the small sizes underfit; dropout only slows them down
        s.model.dropout = 0.1 if s.model.size in ("base", "large") else 0.0
    if not s.data.tokens_per_batch:
        s.data.tokens_per_batch = max(32768 if gpu else 1024, s.data.seq_len)
    if s.data.workers is None:
        s.data.workers = 4 if gpu else 1
    o = s.optimization
    o.steps = (20000 if gpu else 1600) if o.steps is None else o.steps
    o.schedule = o.schedule or ("poly" if o.optimizer == "lamb" else "linear")
    if o.precision is None:
        # several ranks add up gradients in the dtype of the weights, unless these are sharded
        one_sum = world_size == 1 or s.run.shard
        o.precision = "fp32" if not gpu else "bf16" if one_sum else "bf16-autocast"
    if o.phase is not None and o.accumulate == 0:
        sequences = _PHASES[o.phase]["sequences"]
        o.accumulate = math.ceil(sequences * s.data.seq_len / (s.data.tokens_per_batch * world_size))
    if o.lr is None:
        o.lr = default_lr(o.optimizer, s.model.size, s.data.tokens_per_batch * o.accumulate * world_size)
    if s.run.eval_every is None:
        s.run.eval_every = max(1, o.steps // 10)
    if s.run.save_every is None:
        s.run.save_every = max(1, min(1000, o.steps // 5))
    return s


def default_lr(optimizer: str, size: str, tokens_per_step: int) -> float:
    """Peak learning rate: the published ones for base and large, scaled with the square root of the batch."""
    if size in ("base", "large"):
        sequences = tokens_per_step / 128
        # LAMB: 5e-3 at 32,768 sequences (arXiv 1904.00962); Adam: 1e-4 at 256 (BERT, appendix A.2)
        peak = (
            5e-3 * math.sqrt(sequences / 32768) if optimizer == "lamb" else 1e-4 * math.sqrt(sequences / 256)
        )
        return float(f"{peak:.2g}")
    return 5e-3 if optimizer == "lamb" else 1e-3


def check(s: Settings) -> None:
    """Raise UserError for values that cannot work, before anything is read or written."""
    o = s.optimization
    assert o.steps is not None and o.lr is not None and s.run.save_every is not None
    assert s.run.eval_every is not None and s.data.workers is not None and s.model.dropout is not None
    if s.data.seq_len < MIN_SEQ_LEN:
        raise UserError(f"--seq-len {s.data.seq_len} is below {MIN_SEQ_LEN}; give at least {MIN_SEQ_LEN}")
    if s.data.seq_len > MAX_POSITIONS:
        raise UserError(
            f"--seq-len {s.data.seq_len} is above the {MAX_POSITIONS} positions of the model; "
            f"give at most {MAX_POSITIONS}"
        )
    if s.data.tokens_per_batch < s.data.seq_len:
        raise UserError(
            f"--tokens-per-batch {s.data.tokens_per_batch} is below --seq-len {s.data.seq_len}: "
            "no whole sequence fits; raise the first or lower the second"
        )
    if s.data.data is not None and s.data.corpus:
        raise UserError(f"--data {s.data.data} and --corpus are both given; leave out one of the two")
    for name in ("format", "text_column", "vocab_size", "cased"):
        if s.data.data is not None and getattr(s.data, name) != getattr(Data(), name):
            raise UserError(
                f"--{name.replace('_', '-')} is about text, and --data {s.data.data} is tokenized already: "
                "leave it out, or give it to python -m fastbert.prepare"
            )
    if s.data.mask_on == "device" and s.data.whole_word:
        raise UserError(
            "--mask-on device masks single pieces, not the words of --whole-word: leave out one of the two"
        )
    in_range = [
        ("--mask-prob", s.data.mask_prob, 0 < s.data.mask_prob < 1, "between 0 and 1"),
        ("--dropout", s.model.dropout, 0 <= s.model.dropout < 1, "at least 0 and below 1"),
        ("--warmup", o.warmup, 0 <= o.warmup < 1, "at least 0 and below 1"),
        ("--lr", o.lr, 0 < o.lr < math.inf, "above 0"),
        ("--weight-decay", o.weight_decay, 0 <= o.weight_decay < math.inf, "at least 0"),
        ("--steps", o.steps, o.steps >= 1, "at least 1"),
        ("--accumulate", o.accumulate, o.accumulate >= 1, "at least 1"),
        ("--vocab-size", s.data.vocab_size, s.data.vocab_size >= 100, "at least 100"),
        ("--workers", s.data.workers, 0 <= s.data.workers <= 256, "from 0 to 256"),
        ("--log-every", s.run.log_every, s.run.log_every >= 1, "at least 1"),
        ("--eval-every", s.run.eval_every, s.run.eval_every >= 0, "at least 0"),
        ("--save-every", s.run.save_every, s.run.save_every >= 1, "at least 1"),
        ("--keep-every", s.run.keep_every, s.run.keep_every >= 0, "at least 0"),
        ("--keep-last", s.run.keep_last, s.run.keep_last >= 1, "at least 1"),
        ("--rank-timeout", s.run.rank_timeout, s.run.rank_timeout >= 1, "at least 1"),
        ("--seed", s.run.seed, 0 <= s.run.seed < 2**63, "from 0 to 2**63 - 1"),
    ]
    if s.data.max_predictions is not None:
        in_range.append(
            ("--max-predictions", s.data.max_predictions, s.data.max_predictions >= 1, "at least 1")
        )
    for name, value, fine, limit in in_range:
        if not fine:
            raise UserError(f"{name} {value} is out of range; give a value {limit}")


def to_toml(s: Settings) -> str:
    """TOML that `--config` reads back to the same settings."""
    import tomli_w

    tables: dict[str, dict[str, Any]] = {}
    for group in dataclasses.fields(s):
        values = dataclasses.asdict(getattr(s, group.name))
        for name in _NOT_IN_A_FILE:
            values.pop(name, None)
        tables[group.name] = {
            name: str(value)
            if isinstance(value, Path)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in values.items()
            if value is not None
        }
    return tomli_w.dumps(tables)


def _split_config(arguments: list[str]) -> tuple[tuple[Settings, set[str]] | None, list[str]]:
    """Take `--config FILE` out of the arguments and read the file."""
    rest, path = [], None
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--config":
            if at + 1 == len(arguments):
                raise UserError("--config needs the path of a TOML file")
            path, at = arguments[at + 1], at + 2
        elif argument.startswith("--config="):
            path, at = argument.split("=", 1)[1], at + 1
        else:
            rest.append(argument)
            at += 1
    return (None, rest) if path is None else (_read_toml(Path(path)), rest)


def _read_toml(path: Path) -> tuple[Settings, set[str]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not TOML ({error}); see --print-config for the form") from error
    settings, given = Settings(), set()
    groups = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    for table, values in tables.items():
        if table not in groups or not isinstance(values, dict):
            raise UserError(f"--config {path}: [{table}] is not one of [{'], ['.join(groups)}]")
        defaults = {f.name: f for f in dataclasses.fields(groups[table])}
        for name, value in values.items():
            if name not in defaults or name in _NOT_IN_A_FILE:
                raise UserError(f"--config {path}: {table}.{name} is not an option; see --print-config")
            setattr(groups[table], name, _from_toml(path, table, name, value))
            given.add(name)
    return settings, given


def _from_toml(path: Path, table: str, name: str, value: Any) -> Any:
    """A TOML value in the type of its option: the command line's parser checks it."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        words = [option if value else f"--no-{option[2:]}"]
    else:
        words = [option, *(str(v) for v in (value if isinstance(value, list) else [value]))]
    group = {"data": Data, "model": Model, "optimization": Optimization, "run": Run}[table]
    try:
        with _quiet():
            parsed: Any = tyro.cli(group, args=words, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as error:
        raise UserError(f"--config {path}: {table}.{name} = {value!r} is not a value of {option}") from error
    return getattr(parsed, name)


def _quiet() -> Any:
    import contextlib
    import io

    stack = contextlib.ExitStack()
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    return stack


def _given_names(arguments: list[str]) -> set[str]:
    names = {a[2:].split("=", 1)[0].replace("-", "_") for a in arguments if a.startswith("--")}
    return names | {name[3:] for name in names if name.startswith("no_")}


def _apply_phase(s: Settings, given: set[str]) -> None:
    """The recipe's numbers where nothing else was asked for."""
    assert s.optimization.phase is not None
    recipe = _PHASES[s.optimization.phase]
    names = ["seq_len", "max_predictions"]
    if s.optimization.optimizer == "lamb":
        names += ["lr", "warmup", "steps"]
    for name in names:
        if name not in given:
            setattr(s.data if hasattr(s.data, name) else s.optimization, name, recipe[name])
    if "accumulate" not in given:
        s.optimization.accumulate = 0  # worked out from the token budget in `resolve`
