"""What moved between two runs of the benchmarks.

    python -m benchmarks.compare A B

A and B are files of rows, or commits that have rows in `results/` (their first letters do). Rows of one name
and one machine are compared by their medians. A row moved if the two differ by more than their noise: the
widths of the middle halves of both samples together, and never less than 5 %. The exit status is 1 if a row
became slower, 2 if there was nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from benchmarks.rows import Row, latest, run_named

LEAST_NOISE = 0.05


@dataclass(frozen=True)
class Change:
    name: str
    before_s: float
    after_s: float
    noise: float  # share of the time that is none

    @property
    def change(self) -> float:
        """Share of the time: 0.1 is 10 % slower."""
        return self.after_s / self.before_s - 1

    @property
    def verdict(self) -> str:
        if abs(self.change) <= self.noise:
            return "same"
        return "slower" if self.change > 0 else "faster"


def noise(row: Row) -> float:
    """Half of the spread of a sample as a share of its median; older rows have its ends only."""
    width = row["iqr_s"] if "iqr_s" in row else row["max_s"] - row["min_s"]
    return width / 2 / row["median_s"]


def changes(before: list[Row], after: list[Row]) -> tuple[list[Change], list[str]]:
    """(what can be compared, what cannot and why)."""
    old, new = latest(before), latest(after)
    compared, left_out = [], []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            left_out.append(f"{name}: only in {'B' if name in new else 'A'}")
        elif "median_s" not in old[name] or "median_s" not in new[name]:
            left_out.append(f"{name}: a row without a median")
        elif old[name]["machine"] != new[name]["machine"]:
            left_out.append(f"{name}: measured on {old[name]['machine']} and on {new[name]['machine']}")
        else:
            rows = (old[name], new[name])
            limit = max(LEAST_NOISE, sum(map(noise, rows)))
            compared.append(Change(name, rows[0]["median_s"], rows[1]["median_s"], limit))
    return compared, left_out


def table(compared: list[Change]) -> str:
    width = max(len(change.name) for change in compared)
    lines = [f"{'row':{width}}  {'A, ms':>10}  {'B, ms':>10}  {'change':>8}  {'noise':>6}"]
    for c in sorted(compared, key=lambda change: -change.change):
        lines.append(
            f"{c.name:{width}}  {1e3 * c.before_s:10.2f}  {1e3 * c.after_s:10.2f}  {c.change:+8.1%}  "
            f"{c.noise:6.1%}  {'' if c.verdict == 'same' else c.verdict}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.split("\n")[0])
    parser.add_argument("before", metavar="A", help="a file of rows, or a commit")
    parser.add_argument("after", metavar="B")
    options = parser.parse_args(arguments)
    try:
        compared, left_out = changes(run_named(options.before), run_named(options.after))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for reason in left_out:
        print(f"not compared: {reason}")
    if not compared:
        print("no row of one name and one machine is in both", file=sys.stderr)
        return 2
    print(table(compared))
    return 1 if any(change.verdict == "slower" for change in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
