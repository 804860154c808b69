"""A pytest plugin: one process runs every n-th test and writes down what becomes of each, one JSON a line.

Written before a test begins, too, so that a crash of the process leaves the name of what it did not finish.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="i/n: every n-th test from the i-th on")
    parser.addoption("--log", type=Path, required=True, help="the file of outcomes")


class _Log:
    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, **entry: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            # the last line names the place; the assertion's own words are marked
            said = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
            self.write(test=report.nodeid, **{"is": {"outcome": "failed", "reason": said[0] if said else ""}})
        elif report.skipped:
            reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
            self.write(test=report.nodeid, **{"is": {"outcome": "skipped", "reason": reason}})
        elif report.when == "call":
            self.write(test=report.nodeid, **{"is": {"outcome": "passed"}})


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Log(config.getoption("--log")), "gpu-check-log")


@pytest.hookimpl(trylast=True)  # after -k has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part])
    items[:] = items[part::parts]
    for item in items:
        config.pluginmanager.get_plugin("gpu-check-log").write(test=item.nodeid)
