"""The watcher of long runs: what it makes of its samples, and what it reads of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.tables import soak_line

FLAT = [{"seconds": 5.0 * i, "anon_mb": 500.0, "file_mb": 100.0, "open_files": 40.0} for i in range(40)]


def test_growth_is_of_the_last_quarter_over_the_second() -> None:
    values = [9.0] * 10 + [2.0] * 10 + [7.0] * 10 + [3.0] * 10  # the warm-up and the middle do not count
    assert soak.growth(values) == 0.5


def test_a_flat_run_breaks_no_limit_and_a_growing_one_is_named() -> None:
    rates = [1000.0] * 40
    row = soak.summary([FLAT, FLAT], rates, model_mb=50.0)
    assert (row["memory_growth"], row["file_growth"], row["slowdown"]) == (0.0, 0.0, 0.0)
    assert (row["rank_mb"], row["anon_mb"], row["tokens_per_s"]) == (550.0, 500.0, 1000.0)
    assert soak.broken(row) == []
    growing = [s | {"anon_mb": 500.0 + i, "open_files": 40.0 + i // 10} for i, s in enumerate(FLAT)]
    row = soak.summary([FLAT, growing], rates[:30] + [800.0] * 10, model_mb=50.0)
    assert row["memory_growth"] == pytest.approx((34.5 - 14.5) / 514.5, abs=1e-4)  # of the worse rank
    assert soak.broken(row) == [
        f"memory_growth is {row['memory_growth']}, above 0.03",
        "file_growth is 2.0, above 0",
        "slowdown is 0.2, above 0.1",
    ]


def test_text_has_the_size_and_documents(tmp_path: Path) -> None:
    size = soak.write_corpus(tmp_path / "text", 0.01)
    files = sorted((tmp_path / "text").iterdir())
    assert size == sum(file.stat().st_size for file in files) and 0.01e9 <= size < 0.02e9
    documents = files[0].read_text(encoding="utf-8").split("\n\n")
    assert len(documents) > 50
    assert any("\uac00" <= letter <= "\ud7a3" for letter in documents[0])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")
def test_a_process_and_its_children_are_read_together() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # the child is there
    pids = soak.family(process.pid)
    assert len(pids) == 2 and pids[0] == process.pid
    one, both = soak.reading(pids[:1]), soak.reading(pids)
    assert 0 < one["anon_mb"] < both["anon_mb"] and 3 <= one["open_files"] < both["open_files"]
    mine = len(os.listdir("/proc/self/fd")) - 1  # less the one that lists them
    assert abs(soak.reading([os.getpid()])["open_files"] - mine) <= 1
    process.communicate("\n")
    assert soak.reading(pids)["anon_mb"] == 0  # they ended


def test_the_line_of_a_table_says_what_grew() -> None:
    row = {"minutes": 19.9, "saves": 152, "text_gb": 1.0, "ranks": 2, "memory_growth": 0.0123}
    row |= {"slowdown": 0.042, "file_growth": 0.0, "rank_mb": 1190.5}
    assert soak_line(row, 0) == (
        "| 20 minutes of 2 ranks on 1 GB of text, 152 checkpoints | after the warm-up memory +1.2%, open "
        "files +0, tokens a second -4.2%; a rank takes 1.19 GB with its loader |"
    )
    assert "메모리 +1.2%, 열린 파일 +0, 토큰/초 -4.2%" in soak_line(row, 1)
