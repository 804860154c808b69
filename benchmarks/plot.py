"""Draws the pictures of the README from the rows in `results/`, and writes its tables from them.

    python -m benchmarks.plot             # docs/*.png, and the tables in README.md, README.ko.md and NOTES.md
    python -m benchmarks.plot --check     # nothing is written; status 1 if a table is not that of the rows

Of each row the last one counts. A table stands between `<!-- rows NAME -->` and `<!-- end of rows -->`; a
test runs the check. What has no rows has no picture, and no link to one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, all_rows, latest
from benchmarks.tables import (
    AXES,
    FIT_FROM,
    HOST_KIND,
    SPEED,
    exponent,
    has_lengths,
    is_ours,
    op_rows,
    points,
    races,
    scaling_points,
    shown_rates,
    side_name,
    unit_of,
    with_tables,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("README.md", "README.ko.md", "benchmarks/NOTES.md")

# ---- pictures ---------------------------------------------------------------------------------------------

OURS, OURS_TOO = "#1b6ca8", "#7fb2d6"
OTHERS = ("#c9c9c9", "#a8a8a8", "#878787", "#666666", "#4d4d4d")


def draw_speed(rows: dict[str, Row], file: Path) -> None:
    shown = races(rows)
    sides = sum(len(shown_rates(row)) + 0.8 for row in shown.values())
    figure = _figure(7.5, 0.24 * sides + 0.6)
    axes = figure.subplots()
    labels, at, widest = [], 0.0, 1.0
    for name, row in shown.items():
        label, rates = SPEED[name][0], shown_rates(row)
        middle = at + (len(rates) - 1) / 2
        for number, (side, rate) in enumerate(rates.items()):
            share = rate / rates["fastbert"]
            widest = max(widest, share)
            colour = OTHERS[min(number - 1, len(OTHERS) - 1)]
            if is_ours(side):
                colour = OURS_TOO if number else OURS
            axes.barh(at, share, color=colour, height=0.9)
            axes.text(
                share + 0.01,
                at,
                f"{side_name(side, 0)}  {rate:,} {unit_of(row)}/s",
                va="center",
                fontsize=8,
            )
            at += 1
        labels.append((middle, label.replace(", ", "\n", 1)))
        at += 0.8
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, widest + 2.2)  # room for the words behind the bars
    axes.margins(y=0.01)
    axes.set_xlabel("real tokens, texts or examples a second, fastbert = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def draw_scaling(rows: dict[str, Row], file: Path) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = _figure(9, 3)
    for axes, (axis, (label, _)) in zip(figure.subplots(1, len(AXES)), AXES.items()):
        for name, colour, scale, unit in (
            ("median_s", "#1b6ca8", 1e3, "ms"),
            ("saved_bytes", "#b5651d", 1e-6, "MB saved"),
        ):
            points = scaling_points(rows, axis, name)
            fitted = exponent([p for p in points if p[0] >= FIT_FROM[axis]])
            axes.loglog(
                [size for size, _ in points],
                [scale * value for _, value in points],
                "o-",
                color=colour,
                markersize=3,
                label=f"{unit}: ~ n^{fitted:.2f}",
            )
        axes.set_xlabel(label.replace(", ", ",\n"), fontsize=8)
        for side, marks in ((axes.xaxis, [size for size, _ in points]), (axes.yaxis, [30, 100, 300])):
            side.set_major_locator(FixedLocator(marks[:: 2 if len(marks) > 4 else 1]))
            side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            side.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=120)


def draw_lengths(rows: dict[str, Row], file: Path) -> None:
    """Tokens a second by budget and by padding, memory by length, fill by length mix."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = _figure(9, 6.4)
    budget, padding, memory, fill = figure.subplots(2, 2).flat
    thousands = FuncFormatter(lambda value, _: f"{value:,.0f}")

    for side, line in points(rows, "test_token_budget[", "tokens_per_batch", "tokens_per_s").items():
        budget.semilogx(*zip(*line), "o-", color=OURS, markersize=4, label=side, base=2)
    budget.set_title("training step: real tokens a second", fontsize=9)
    budget.set_xlabel("tokens of a batch", fontsize=8)

    lines = points(rows, "test_length_mix[", "padding", "tokens_per_s")
    for (side, line), colour in zip(lines.items(), (OURS, "#c9c9c9", "#666666")):
        padding.plot(*zip(*line), "o-", color=colour, markersize=4, label=side_name(side, 0))
    padding.set_title("encoding: real tokens a second", fontsize=9)
    padding.set_xlabel("padding of a batch whose longest row has 512", fontsize=8)
    padding.xaxis.set_major_formatter(PercentFormatter(1.0))

    for figure_name, colour, label in (
        ("reference_saved_bytes", "#878787", "textbook BERT"),
        ("saved_bytes", OURS, "fastbert"),
    ):
        line = scaling_points(rows, "length", figure_name)
        memory.loglog([x for x, _ in line], [y / 1e6 for _, y in line], "o-", color=colour, label=label)
    memory.set_title("saved for the backward pass of 4,096 tokens, MB", fontsize=9)
    memory.set_xlabel("length of a sequence", fontsize=8)
    memory.set_xticks([x for x, _ in line], [f"{x:,}" for x, _ in line])
    memory.minorticks_off()
    memory.set_yticks([100, 300, 1000, 3000])

    chosen = [row for name, row in rows.items() if name.startswith("test_packing_fill[")]
    for at, row in enumerate(sorted(chosen, key=lambda row: row["mean_length"])):
        for number, (way, share) in enumerate(row["fill"].items()):
            colour = OURS if way.startswith("packed") else OTHERS[number - 1]
            label = way if at == 0 else None
            fill.bar(at + 0.2 * number - 0.3, share, 0.18, color=colour, label=label)
    names = [
        f"{row['mix'].split(',')[0].split(' at')[0]}\nmean {row['mean_length']:.0f}"
        for row in sorted(chosen, key=lambda row: row["mean_length"])
    ]
    fill.set_xticks(range(len(names)), names)
    fill.set_title("slots that hold a token, lengths up to 512", fontsize=9)
    fill.yaxis.set_major_formatter(PercentFormatter(1.0))
    fill.set_ylim(0, 1.45)
    fill.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    for axes in (budget, padding, memory, fill):
        if axes is not fill:
            axes.yaxis.set_major_formatter(thousands)
        if axes in (budget, padding):
            axes.set_ylim(bottom=0)
        if axes is budget:
            axes.xaxis.set_major_formatter(thousands)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7, frameon=False, ncols=2 if axes is fill else 1)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def draw_roofline(rows: dict[str, Row], file: Path) -> None:
    """The share of the machine's own copy or product rate, whichever bounds an operation."""
    directions = {"forward": OURS_TOO, "forward-backward": OURS}
    figure = _figure(7.5, 0.42 * len(op_rows(rows, "forward-backward")) + 1.1)
    axes = figure.subplots()
    labels: list[str] = []
    for number, (direction, colour) in enumerate(directions.items()):
        for at, (op, row) in enumerate(op_rows(rows, direction).items()):
            height = at + 0.4 * number - 0.2
            shares = row["share_of_roof"]
            others = [share for side, share in shares.items() if not is_ours(side)]
            label = direction.replace("-", " and ") if at == 0 else None
            axes.barh(height, shares["fastbert"], 0.38, color=colour, label=label)
            if others:
                label = "best other side" if at == number == 0 else None
                axes.plot(max(others), height, "|", color="black", markersize=11, label=label)
            if number:
                labels.append(f"{op}\n({row['bound']}, {row['floor_ms']:.1f} ms)")
    axes.axvline(1.0, color="#878787", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the machine's own rate: of a large copy, or of a large product", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def draw_soak(row: Row, file: Path) -> None:
    """Memory of each rank with its loader processes, and real tokens a second, over a long run."""
    figure = _figure(9, 2.8)
    memory, speed = figure.subplots(1, 2)
    for number, found in enumerate(row["curves"]["memory"]):
        minutes = [sample["seconds"] / 60 for sample in found]
        for key, style, label in (("anon_mb", "-", "its own"), ("file_mb", ":", "mapped files")):
            values = [sample[key] for sample in found]
            colour = (OURS, OURS_TOO)[number % 2]
            memory.plot(minutes, values, style, color=colour, label=f"rank {number}: {label}")
    memory.set_title(f"memory of a rank on {row['text_gb']:g} GB of text, MB", fontsize=9)
    rates = row["curves"]["tokens_per_s"]
    speed.plot([row["minutes"] * (i + 1) / len(rates) for i in range(len(rates))], rates, color=OURS)
    speed.set_title(f"real tokens a second of {row['ranks']} ranks, {row['saves']} checkpoints", fontsize=9)
    for axes in (memory, speed):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    memory.legend(fontsize=7, frameon=False, ncols=2)
    figure.savefig(file, dpi=120)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# ---- command ----------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say which page is out of date")
    options = parser.parse_args(arguments)
    rows = latest(all_rows(), HOST_KIND)
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        made = with_tables(text, rows, language=int(name.endswith(".ko.md")))
        if made != text:
            stale.append(name)
            if not options.check:
                page.write_text(made, encoding="utf-8")
    if options.check:
        for name in stale:
            print(f"{name}: its tables are not those of the rows: python -m benchmarks.plot")
        return 1 if stale else 0
    DOCS.mkdir(exist_ok=True)
    if races(rows):
        draw_speed(rows, DOCS / "speed.png")
    if scaling_points(rows, "tokens", "median_s"):
        draw_scaling(rows, DOCS / "scaling.png")
    if has_lengths(rows):
        draw_lengths(rows, DOCS / "lengths.png")
    if op_rows(rows, "forward-backward"):
        draw_roofline(rows, DOCS / "roofline.png")
    for row in [row for name, row in rows.items() if name.startswith("soak[")][-1:]:
        draw_soak(row, DOCS / "soak.png")
    print(f"wrote {', '.join(stale) or 'no table, all are those of the rows'}, and the pictures in docs/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
