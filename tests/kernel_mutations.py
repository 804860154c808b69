"""Kernel modules with one fault written into them, to show that the tests of the kernel see it.

A mutation replaces a piece of the module's source. The patched copy is a file of its own, because Triton
reads a kernel's source from its file; it is imported under another name, so the real module stays as it is.
The check runs in a fork: a kernel that goes through a wild pointer kills the fork only, or makes it spin
until its time is up, and both count as seen. For the process that runs the interpreter: no GPU context may be
open when it forks.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

PASSED, FAILED, BROKEN = 0, 1, 2
LIMIT_S = 300


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of `module` in which `new` stands for `old`, which must occur exactly once."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    assert source.count(old) == 1, (
        f"{module.__name__} has {old!r} {source.count(old)} times, not once: the mutation is out of date"
    )
    name = module.__name__.replace(".", "_") + "_mutated"
    file = folder / f"{name}.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def outcome(check: Callable[[], object]) -> str:
    """What `check` does in a fork: "passes", "fails" an assertion, or "crashes" (a signal).

    RuntimeError if it stops with another exception: then the mutation is no kernel any more.
    """
    # what this imports when it first runs takes two seconds: here once, not in every fork
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(_run(check))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == BROKEN:
        raise RuntimeError("the mutated kernel does not run: the traceback is in the captured output")
    return "crashes" if code < 0 else "passes" if code == PASSED else "fails"


def _run(check: Callable[[], object]) -> int:
    faulthandler.disable()  # a crash is an answer here, not a message
    signal.alarm(LIMIT_S)
    try:
        check()
    except AssertionError:
        return FAILED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return BROKEN
    return PASSED
