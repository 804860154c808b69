"""`python -m fastbert.finetune TASK --model DIR --train FILE --output DIR`: a BERT learns a task.

TASK is one of those that `python -m fastbert.finetune --help` lists; each has options of its own.
"""

from __future__ import annotations

import errno
import shlex
import sys
from dataclasses import field, make_dataclass
from typing import Any

import tyro
from rich.console import Console

from fastbert.errors import UserError
from fastbert.tasks.registry import TASKS, task_class
from fastbert.tasks.settings import Files, Training, training_defaults
from fastbert.tasks.sweep import Sweep, run_sweep

_USAGE = f"""usage: python -m fastbert.finetune TASK --model DIR_OR_HUB_ID --train FILE --output DIR [options]

tasks: {", ".join(TASKS)}

python -m fastbert.finetune TASK --help lists a task's options."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, 128 + signal)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while files were read; the training loop handles signals itself
        return 130
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = "the disk is full: free some space and type the same command again, which continues the run"
    stderr = Console(stderr=True)
    stderr.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def _run(arguments: list[str]) -> int:
    name = arguments[0]
    parsed = _parse(name, arguments[1:])
    command = shlex.join(["python", "-m", "fastbert.finetune", *arguments])
    result = run_sweep(name, parsed.task, parsed.files, parsed.training, parsed.sweep, Console(), command)
    for score, value in result.scores.items():
        print(f"{score} {value:.6f}")
    return result.status


def _parse(name: str, arguments: list[str]) -> Any:
    """The task's options, `Files`, `Training` and `Sweep`; an unknown option exits with status 2."""
    options = task_class(name).options_class
    fields: list[Any] = [
        ("files", Files),
        ("task", options, field(default_factory=options)),
        ("training", Training, field(default_factory=lambda: training_defaults(task_class(name)))),
        ("sweep", Sweep, field(default_factory=Sweep)),
    ]
    return tyro.cli(
        make_dataclass("Arguments", fields),
        args=arguments,
        prog=f"python -m fastbert.finetune {name}",
        description=f"Fine-tune a BERT for the task {name}, and score it.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


if __name__ == "__main__":
    sys.exit(main())
