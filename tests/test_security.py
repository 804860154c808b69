"""What is loaded runs no code, names stay in their folders, and every dependency's licence is known."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastbert.paths import stays_inside

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path for name in ("fastbert", "kernels", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


@pytest.mark.parametrize(
    "name", ["a", "a/b.arrow", "a-b/c_d.json", "..a/b", "a..", "1_Pooling", "a/./b", "문서/가.arrow"]
)
def test_names_inside(name: str) -> None:
    assert stays_inside(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "/a",
        "//host/a",
        "C:a",
        "C:\\a",
        "file:///a",
        "x::file:///a",
        "%2e%2e/a",
        "\\a",
        "a\\..\\..\\b",
        "a\0b",
    ],
)
def test_names_outside(name: str) -> None:
    assert not stays_inside(name)


def calls(path: Path) -> list[ast.Call]:
    return [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    """torch.load only with weights_only=True; no pickle.load, eval, exec, or code of a repository."""
    found = []
    for path in SOURCES:
        for call in calls(path):
            name = ast.unparse(call.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            unsafe_load = name == "torch.load" and options.get("weights_only") != "True"
            runs_code = name in ("eval", "exec", "pickle.load", "pickle.loads", "torch.hub.load", "yaml.load")
            if unsafe_load or runs_code or options.get("trust_remote_code", "False") != "False":
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
            if name == "np.load" and options.get("allow_pickle", "False") != "False":
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert found == []
    assert sum(ast.unparse(call.func) == "torch.load" for path in SOURCES for call in calls(path)) >= 2


def test_every_dependency_has_its_licence_in_the_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in required} - {"fastbert-triton"}
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|$", page, re.MULTILINE))
    assert names == listed.keys() - {"package"}
    assert not [name for name, licence in listed.items() if re.search(r"\b(A?GPL|proprietary)\b", licence)]


@pytest.mark.parametrize(
    ("dependencies", "status", "says"),
    [
        (None, 0, "nothing was audited"),
        ([{"name": "a", "version": "1", "skip_reason": "not found"}], 0, "none of 1 packages was audited"),
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 of 1 packages audited"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": []}]}],
            0,
            "a 1: CVE-1, no version mends it",
        ),
        (
            [
                {"name": "a", "version": "1", "vulns": [{"id": "CVE-2", "fix_versions": ["1.1", "2"]}]},
                {"name": "b", "version": "3", "vulns": []},
            ],
            1,
            "a 1: CVE-2, mended in 1.1, 2: raise it in constraints.txt",
        ),
    ],
)
def test_an_audit_fails_on_what_can_be_mended_only(dependencies: list | None, status: int, says: str) -> None:
    report = "" if dependencies is None else json.dumps({"dependencies": dependencies, "fixes": []})
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit.py"], input=report, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert says in done.stdout
