"""`python -m fastbert.predict MODEL FILE`: what a fine-tuned model makes of every example of a file.

FILE is streamed, whatever its size. MODEL knows its task and its columns; the task's options override them.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import tyro

from fastbert.errors import UserError
from fastbert.tasks.prediction import Computing, Predictor, RowWriter, read_record

_BROKEN_PIPE = 141  # as a shell reports a death by SIGPIPE
_USAGE = """usage: python -m fastbert.predict MODEL FILE [--output FILE] [options]

python -m fastbert.predict MODEL --help lists the options of the model's task."""


@dataclass
class Where:
    file: tyro.conf.Positional[Path]
    """File of examples; labels in it are not read."""
    output: str = "-"
    """.jsonl, .tsv or .csv; "-" writes JSONL to standard output."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, 130 = interrupted, 141 = broken pipe)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        _run(arguments[0], arguments[1:])
    except BrokenPipeError:
        # nobody reads any more; Python must not flush into it on its way out, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (UserError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(model: str, arguments: list[str]) -> None:
    record = read_record(model, _say)
    parsed: Any = tyro.cli(
        make_dataclass(
            "Arguments",
            [
                ("where", Where),
                ("task", type(record.options), field(default_factory=lambda: record.options)),
                ("computing", Computing, field(default_factory=Computing)),
            ],
        ),
        args=arguments,
        prog=f"python -m fastbert.predict {model}",
        description=f"Predict with a model of the task {record.task}.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    record.options = parsed.task
    started = time.perf_counter()
    predictor = Predictor.load(record, parsed.computing, _say)
    writer = RowWriter(parsed.where.output)
    try:
        for row in predictor.rows(parsed.where.file):
            writer.write(row)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    seconds = time.perf_counter() - started
    _say(f"{writer.num_rows:,} rows in {seconds:.1f} s, {writer.num_rows / seconds:,.1f} a second")


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
