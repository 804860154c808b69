"""Runs the tests of the operations on the card: pytest in several processes, which compile in parallel."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.setting import Operation

ROOT = Path(__file__).parents[2]
# tests that start the interpreter in a process of its own: they say nothing about the card
NOT_ON_A_CARD = "not under_the_interpreter"
NO_TESTS = 5  # an exit status of pytest
NO_TIME = "had no time"
PYTEST_ITSELF = "pytest, part"
# of a dry run: the tests that run at tiny sizes in the interpreter
DRY_FILES = ("tests/test_gpu_cases.py",)


@dataclass
class Outcome:
    outcome: str = "did not finish"  # or "passed", "failed", "skipped"; NO_TIME if its process was ended
    reason: str = ""


def in_a_dry_run(operation: Operation) -> Operation:
    """With the tests that are quick in the interpreter."""
    tests = tuple(test for test in operation.tests if test.split("::")[0] in DRY_FILES)
    return dataclasses.replace(operation, tests=tests)


def run_tests(
    operations: tuple[Operation, ...], processes: int, timeout_s: float, report: Path
) -> dict[str, Outcome]:
    """Test -> what became of it: "did not finish" if its process crashed, NO_TIME if it was too slow.

    `report` gets the tracebacks, if there are any.
    """
    files = sorted({prefix.split("::")[0] for operation in operations for prefix in operation.tests})
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        # torch asks for it where results must be deterministic
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    outcomes: dict[str, Outcome] = {}
    failures: list[str] = []
    end = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for part in range(processes):
            log, output = Path(folder) / f"{part}.jsonl", (Path(folder) / f"{part}.txt").open("w+")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-p", "benchmarks.gpu.pytest_part", f"--part={part}/{processes}", f"--log={log}"]
            command += ["-k", NOT_ON_A_CARD, *files]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            running.append((process, log, output))
        for part, (process, log, output) in enumerate(running):
            too_slow = False
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                too_slow = True
                process.kill()
                process.wait()
            found = _read(log)
            if too_slow:
                found = {t: o if o != Outcome() else Outcome(NO_TIME) for t, o in found.items()}
            output.seek(0)
            said = output.read()
            output.close()
            if not found and process.returncode != NO_TESTS:  # pytest could not begin: its own words say why
                last = (said.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                found = {f"{PYTEST_ITSELF} {part}": Outcome("failed", last)}
            if process.returncode not in (0, NO_TESTS) and not too_slow:
                failures.append(said)
            outcomes |= found
    report.unlink(missing_ok=True)
    if failures:
        report.write_text("\n".join(failures), encoding="utf-8")
    return outcomes


def _read(log: Path) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            outcomes[entry["test"]] = Outcome(**entry["is"]) if "is" in entry else Outcome()
    return outcomes


def verdict(operation: Operation, outcomes: dict[str, Outcome]) -> list[str]:
    """Why the operation may not be timed: a test that failed, or none that passed. Empty: it may.

    Tests that had no time do not stop it: each of its rows compares results again.
    """
    if not operation.tests:
        return []
    mine = {test: o for test, o in outcomes.items() if test.startswith((*operation.tests, PYTEST_ITSELF))}
    problems = [
        f"{test} {o.outcome}" + (f": {o.reason}" if o.reason else "")
        for test, o in mine.items()
        if o.outcome not in ("passed", "skipped", NO_TIME)
    ]
    if not any(o.outcome == "passed" for o in mine.values()):
        problems.append("none of its tests passed")
    return problems
