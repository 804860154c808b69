"""Draws the pictures of the README from the rows in `results/`, and writes its tables from them.

    python -m benchmarks.plot             # docs/*.png, and the tables in README.md, README.ko.md and NOTES.md
    python -m benchmarks.plot --check     # nothing is written; status 1 if a table is not that of the rows

Of each row the last one counts. A table stands between `<!-- rows NAME -->` and `<!-- end of rows -->`; a
test runs the check. What has no rows, a GPU for one, has no picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, Row, all_rows, latest
from benchmarks.score_table import score_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# the machine that the pages are about
HOST_KIND = "cpu-x86_64-2cores"
PAGES = ("README.md", "README.ko.md", "benchmarks/NOTES.md")
MARKED = re.compile(r"(<!-- rows (\S+) -->\n)(.*?)(<!-- end of rows -->)", re.DOTALL)

# rows whose sides are compared: name -> what the work is, in English and Korean
SPEED = {
    "test_training_step[wikipedia-512]": (
        "training step, mini, Wikipedia's length mix at 512",
        "학습 한 스텝, mini, 위키백과 길이 분포(512)",
    ),
    "test_training_step[python-docs-128]": (
        "training step, mini, built-in corpus at 128",
        "학습 한 스텝, mini, 내장 말뭉치(128)",
    ),
    "test_encode_at_wikipedia_512": (
        "encoding, mini, Wikipedia's length mix at 512",
        "인코딩, mini, 위키백과 길이 분포(512)",
    ),
    "test_minilm_mixed_lengths": (
        "encoding, MiniLM's size, mixed lengths to 256",
        "인코딩, MiniLM 크기, 길이가 섞인 배치(256까지)",
    ),
    "test_minilm_full_length": (
        "encoding, MiniLM's size, no padding at all",
        "인코딩, MiniLM 크기, 패딩이 전혀 없는 배치",
    ),
    "test_sst2_steps[random]": (
        "fine-tuning step, MiniLM's size, SST-2's lengths",
        "파인튜닝 한 스텝, MiniLM 크기, SST-2의 길이",
    ),
    "test_sst2_steps[by-length]": (
        "the same, in batches grouped by length",
        "같은 스텝, 길이별로 묶은 배치",
    ),
    "test_sst2_steps[random-against-by-length]": (
        "the same, random batches against transformers' grouped by length",
        "같은 스텝, 무작위 배치 대 길이별로 묶은 transformers",
    ),
    "test_minilm_texts_to_vectors": (
        "texts to vectors, MiniLM, tokenizing included",
        "텍스트에서 벡터까지, MiniLM, 토큰화 포함",
    ),
}
UNITS = {"tokens": ("tokens", "토큰"), "texts": ("texts", "텍스트"), "examples": ("examples", "예제")}
SIDES = {
    "reference": ("textbook BERT", "교과서적 BERT"),
    "transformers_dynamic": ("transformers, padded to the longest", "transformers, 가장 긴 것까지 패딩"),
    "transformers_128": ("transformers, padded to 128", "transformers, 128까지 패딩"),
}
AXES = {
    "tokens": ("tokens of a batch", "배치의 토큰 수"),
    "length": ("length of a sequence, 4,096 tokens in all", "시퀀스 길이(모두 4,096토큰)"),
    "layers": ("layers", "층 수"),
    "width": ("hidden size", "은닉 크기"),
}
# from here on what does not grow with the batch (one pass over the vocabulary's table, calls) is small
FIT_FROM = {"tokens": 1024, "length": 64, "layers": 1, "width": 128}


# ---- tables -----------------------------------------------------------------------------------------------


def speed_table(rows: dict[str, Row], language: int) -> str:
    head = (
        ("a second", "fastbert", "others", "faster by"),
        ("1초에", "fastbert", "다른 것", "배수"),
    )[language]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|"]
    for name, labels in SPEED.items():
        if name not in rows:
            continue
        rates, factors = rates_of(rows[name]), rows[name]["times_faster_than"]
        unit = UNITS[unit_of(rows[name])][language]
        ours = [
            f"**{rate:,}** {unit}" if side == "fastbert" else f"{side_name(side, language)} {rate:,}"
            for side, rate in rates.items()
            if is_ours(side)
        ]
        others = {side: rate for side, rate in rates.items() if not is_ours(side)}
        theirs = "; ".join(f"{side_name(side, language)} {rate:,}" for side, rate in others.items())
        faster = "; ".join(f"{factors[side]:{'.1f' if factors[side] > 1.05 else '.2f'}}×" for side in others)
        lines.append(f"| {labels[language]} | {'; '.join(ours)} | {theirs} | {faster} |")
    return "\n".join(lines) + "\n"


def side_name(side: str, language: int) -> str:
    return SIDES[side][language] if side in SIDES else side


def is_ours(side: str) -> bool:
    return side.startswith(("fastbert", "accelerate()"))


def unit_of(row: Row) -> str:
    return next(unit for unit in UNITS if f"{unit}_per_s" in row)


def rates_of(row: Row) -> dict[str, int]:
    rates: dict[str, int] = row[f"{unit_of(row)}_per_s"]
    return rates


def other_table(rows: dict[str, Row], language: int) -> str:
    """What is not a race: packing, the loader, the optimizer."""

    def of(name: str, figure: str) -> Any:
        return rows[name][figure]

    fills = [
        of(f"test_build_window[{workload}]", "fill") for workload in ("wikipedia-512", "python-docs-128")
    ]
    rates = [
        of(f"test_one_worker_process[{workload}]", "tokens_per_s") / 1e6
        for workload in ("python-docs-128", "wikipedia-512")
    ]
    step = of("test_step[mini-8192-15]", "ms")
    packed = of("test_pack_histogram", "fill")
    seconds, peak = of("embed_corpus", "seconds"), of("embed_corpus", "peak_rss_gb")
    embed, theirs = "fastbert.embed", "sentence-transformers"
    lines = (
        (
            f"| packing: slots that hold a token | LPFHP on Wikipedia-512 {packed:.2%}; the loader's batches "
            f"{fills[0]:.1%} there, {fills[1]:.1%} on the built-in corpus |",
            f"| one worker process makes, real tokens a second | {rates[0]:.1f} M (built-in corpus), "
            f"{rates[1]:.1f} M (Wikipedia mix) |",
            f"| the embed command, 100,000 short texts, MiniLM | {seconds[embed]:.0f} s and at most "
            f"{peak[embed]:.2f} GB (SentenceTransformer.encode: {seconds[theirs]:.0f} s, "
            f"{peak[theirs]:.2f} GB) |",
            f"| LAMB step, 5.5 M parameters | {step['fastbert Lamb']:.1f} ms (torch's fused AdamW in turns "
            f"with it: {step['torch AdamW fused']:.1f} ms) |",
        ),
        (
            f"| 패킹: 토큰이 든 자리의 비율 | Wikipedia-512에 대한 LPFHP {packed:.2%}, 로더의 배치는 "
            f"{fills[0]:.1%}, 내장 말뭉치에서 {fills[1]:.1%} |",
            f"| 워커 프로세스 하나가 만드는 실제 토큰/초 | {100 * rates[0]:.0f}만(내장 말뭉치), "
            f"{100 * rates[1]:.0f}만(Wikipedia 분포) |",
            f"| embed 명령, 짧은 텍스트 10만 개, MiniLM | {seconds[embed]:.0f}초, 메모리 최대 "
            f"{peak[embed]:.2f} GB(SentenceTransformer.encode: {seconds[theirs]:.0f}초, "
            f"{peak[theirs]:.2f} GB) |",
            f"| LAMB 스텝, 파라미터 550만 | {step['fastbert Lamb']:.1f} ms(번갈아 잰 torch의 fused AdamW: "
            f"{step['torch AdamW fused']:.1f} ms) |",
        ),
    )[language]
    head = ("other rows", "그 밖의 행")[language]
    return f"| {head} | |\n|---|---|\n" + "\n".join(lines) + "\n"


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of the least-squares line through log(value) over log(size)."""
    x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def scaling_points(rows: dict[str, Row], axis: str, figure: str) -> list[tuple[float, float]]:
    chosen = [row for name, row in rows.items() if name.startswith(f"test_scaling[{axis}-")]
    return sorted((row["value"], row[figure]) for row in chosen)


def scaling_table(rows: dict[str, Row], language: int) -> str:
    head = (
        ("grows with", "from, to", "time, exponent", "saved bytes, exponent"),
        ("커지는 것", "범위", "시간 지수", "저장 바이트 지수"),
    )[language]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|"]
    for axis, labels in AXES.items():
        figures = {
            figure: [p for p in scaling_points(rows, axis, figure) if p[0] >= FIT_FROM[axis]]
            for figure in ("median_s", "saved_bytes")
        }
        sizes = [size for size, _ in figures["median_s"]]
        if len(sizes) < 2:
            continue
        fitted = " | ".join(f"{exponent(points):.2f}" for points in figures.values())
        lines.append(f"| {labels[language]} | {sizes[0]:,} – {sizes[-1]:,} | {fitted} |")
    return "\n".join(lines) + "\n"


KINDS = {
    "matrix products": "행렬 곱",
    "attention": "어텐션",
    "optimizer": "옵티마이저",
    "loss": "손실",
    "activation": "활성화 함수",
    "dropout, residual, LayerNorm": "드롭아웃, 잔차, LayerNorm",
    "embeddings": "임베딩",
    "copies and gathers": "복사와 모으기",
    "other": "나머지",
}


def profile_table(rows: dict[str, Row], language: int) -> str:
    """Where the time of a training step goes, from the profile of this kind of machine."""
    lines = [
        ("| a training step, mini, spends | |", "| 학습 한 스텝(mini)이 쓰는 시간 | |")[language],
        "|---|---|",
    ]
    file = RESULTS / f"profile-{HOST_KIND}.json"
    kinds = json.loads(file.read_text(encoding="utf-8"))["kinds"] if file.exists() else {}
    for kind, names in kinds.items():
        lines.append(f"| {(kind, KINDS[kind])[language]} | {names['share']:.0%} |")
    return "\n".join(lines) + "\n"


def machine_line(rows: dict[str, Row], language: int) -> str:
    """Where the rows of the speed table come from."""
    row = next(rows[name] for name in SPEED if name in rows)
    versions = ", ".join(f"{package} {row[package]}" for package in ("torch", "transformers"))
    said = ("Measured on", "측정한 곳:")[language]
    return f"{said} {row['machine']}; Python {row['python']}, {versions}; {row['date']}.\n"


TABLES: dict[str, Callable[[dict[str, Row], int], str]] = {
    "speed": speed_table,
    "other": other_table,
    "scaling": scaling_table,
    "profile": profile_table,
    "machine": machine_line,
    "scores": score_table,
}


def with_tables(text: str, rows: dict[str, Row], language: int) -> str:
    """The page with each marked table made anew. ValueError for a mark of an unknown name."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}: {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](rows, language)}\n{match[4]}"

    return MARKED.sub(made, text)


# ---- pictures ---------------------------------------------------------------------------------------------

OURS, OURS_TOO = "#1b6ca8", "#7fb2d6"
OTHERS = ("#c9c9c9", "#a8a8a8", "#878787", "#666666", "#4d4d4d")


def draw_speed(rows: dict[str, Row], file: Path) -> None:
    figure = _figure(7.5, 1.1 * sum(name in rows for name in SPEED) + 0.6)
    axes = figure.subplots()
    labels, at, widest = [], 0.0, 1.0
    for name, (label, _) in SPEED.items():
        if name not in rows:
            continue
        rates = rates_of(rows[name])
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
                f"{side_name(side, 0)}  {rate:,} {unit_of(rows[name])}/s",
                va="center",
                fontsize=8,
            )
            at += 1
        labels.append((middle, label.replace(", ", "\n", 1)))
        at += 0.8
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, widest + 1.2)
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
    draw_speed(rows, DOCS / "speed.png")
    if scaling_points(rows, "tokens", "median_s"):
        draw_scaling(rows, DOCS / "scaling.png")
    print(f"wrote {', '.join(stale) or 'no table, all are those of the rows'}, and the pictures in docs/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
