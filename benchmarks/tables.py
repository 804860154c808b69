"""The tables of the READMEs and of NOTES.md, made from rows; and the labels that pictures share with them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from benchmarks import targets
from benchmarks.rows import RESULTS, Row
from benchmarks.score_table import score_table

# the machine that the pages are about
HOST_KIND = "cpu-x86_64-2cores"
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
    "test_training_step[equal-128]": (
        "the same, every sequence of 128 tokens",
        "같은 스텝, 모두 128토큰",
    ),
    "test_training_step[equal-512]": (
        "the same, every sequence of 512 tokens",
        "같은 스텝, 모두 512토큰",
    ),
    "test_run_with_its_loader": (
        "the command's default run, its loader included",
        "기본 실행, 로더 포함",
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
    "plain transformers loop": ("plain transformers loop", "단순한 transformers 루프"),
    "transformers sdpa, sorted": ("transformers, sorted by length", "transformers, 길이순"),
    "transformers sdpa compiled": ("transformers, compiled", "transformers, 컴파일"),
    "transformers sdpa compiled, sorted": (
        "transformers, compiled, sorted",
        "transformers, 컴파일, 길이순",
    ),
    "transformers eager, sorted": ("transformers eager, sorted", "transformers eager, 길이순"),
    "transformers eager compiled": ("transformers eager, compiled", "transformers eager, 컴파일"),
    "transformers eager compiled, sorted": (
        "transformers eager, compiled, sorted",
        "transformers eager, 컴파일, 길이순",
    ),
    "transformers_dynamic": ("transformers, padded to the longest", "transformers, 가장 긴 것까지 패딩"),
    "transformers_128": ("transformers, padded to 128", "transformers, 128까지 패딩"),
}
MOST_OTHERS = 4  # sides that a row shows beside ours
AXES = {
    "tokens": ("tokens of a batch", "배치의 토큰 수"),
    "length": ("length of a sequence, 4,096 tokens in all", "시퀀스 길이(모두 4,096토큰)"),
    "layers": ("layers", "층 수"),
    "width": ("hidden size", "은닉 크기"),
}
# from here on what does not grow with the batch (one pass over the vocabulary's table, calls) is small
FIT_FROM = {"tokens": 1024, "length": 64, "layers": 1, "width": 128}


# ---- tables -----------------------------------------------------------------------------------------------


def races(rows: dict[str, Row]) -> dict[str, Row]:
    """Of the rows in SPEED those that have several sides."""
    return {name: rows[name] for name in SPEED if "times_faster_than" in rows.get(name, {})}


def speed_table(rows: dict[str, Row], language: int) -> str:
    head = (
        ("a second", "fastbert", "others", "faster by"),
        ("1초에", "fastbert", "다른 것", "배수"),
    )[language]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|"]
    for name, row in races(rows).items():
        rates, factors = shown_rates(row), row["times_faster_than"]
        unit = UNITS[unit_of(row)][language]
        ours = [
            f"**{rate:,}** {unit}" if side == "fastbert" else f"{side_name(side, language)} {rate:,}"
            for side, rate in rates.items()
            if is_ours(side)
        ]
        others = {side: rate for side, rate in rates.items() if not is_ours(side)}
        theirs = "; ".join(f"{side_name(side, language)} {rate:,}" for side, rate in others.items())
        faster = "; ".join(f"{factors[side]:{'.1f' if factors[side] > 1.05 else '.2f'}}×" for side in others)
        lines.append(f"| {SPEED[name][language]} | {'; '.join(ours)} | {theirs} | {faster} |")
    return "\n".join(lines) + "\n"


def side_name(side: str, language: int) -> str:
    return SIDES[side][language] if side in SIDES else side


def is_ours(side: str) -> bool:
    return side.startswith(("fastbert", "accelerate()"))


def unit_of(row: Row) -> str:
    return next(unit for unit in UNITS if f"{unit}_per_s" in row)


def shown_rates(row: Row) -> dict[str, int]:
    """Side -> rate. Of many others: those that every row has, and the fastest two."""
    rates = {side: round(rate) for side, rate in row[f"{unit_of(row)}_per_s"].items()}
    others = sorted((side for side in rates if not is_ours(side)), key=lambda side: -rates[side])
    if len(others) > MOST_OTHERS:
        kept = {"reference", "transformers", *others[: MOST_OTHERS - 2]}
        rates = {side: rate for side, rate in rates.items() if is_ours(side) or side in kept}
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
    soaks = [soak_line(row, language) for name, row in rows.items() if name.startswith("soak[")]
    return f"| {head} | |\n|---|---|\n" + "\n".join([*lines, *soaks]) + "\n"


def soak_line(row: Row, language: int) -> str:
    """A long run of several ranks."""
    minutes, saves, gigabytes = row["minutes"], row["saves"], row["text_gb"]
    memory, slower, rank_gb = row["memory_growth"], row["slowdown"], row["rank_mb"] / 1000
    return (
        f"| {minutes:.0f} minutes of {row['ranks']} ranks on {gigabytes:g} GB of text, {saves} checkpoints | "
        f"after the warm-up memory {memory:+.1%}, open files {row['file_growth']:+.0f}, tokens a second "
        f"{-slower:+.1%}; a rank takes {rank_gb:.2f} GB with its loader |",
        f"| 랭크 {row['ranks']}개, 텍스트 {gigabytes:g} GB, {minutes:.0f}분, 체크포인트 {saves}개 | "
        f"준비 구간 뒤 메모리 {memory:+.1%}, 열린 파일 {row['file_growth']:+.0f}, 토큰/초 {-slower:+.1%}. "
        f"로더를 포함한 랭크의 메모리 {rank_gb:.2f} GB |",
    )[language]


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of the least-squares line through log(value) over log(size)."""
    x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def scaling_points(rows: dict[str, Row], axis: str, figure: str) -> list[tuple[float, float]]:
    chosen = [row for name, row in rows.items() if name.startswith(f"test_scaling[{axis}-") and figure in row]
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


def targets_table(rows: dict[str, Row], language: int) -> str:
    """What is wanted of a CPU beside what was reached; only of rows that are there."""
    head = (("row", "against", "wanted", "reached", ""), ("행", "비교 대상", "목표", "결과", ""))[language]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|"]

    def line(name: str, against: str, wanted: float, reached: float, form: str) -> str:
        said = (("met", "missed by {:.1%}"), ("달성", "{:.1%} 모자람"))[language]
        verdict = said[0] if reached >= wanted else said[1].format(1 - reached / wanted)
        return f"| `{name}` | {against} | {wanted:{form}} | {reached:{form}} | {verdict} |"

    for name, sides in targets.CPU_FACTORS.items():
        factors = rows.get(name, {}).get("times_faster_than", {})
        for side, wanted in sides.items():
            if side in factors:
                lines.append(line(name, side_name(side, language), wanted, factors[side], ".2f"))
    product = ("the machine's own product", "기계 자체의 행렬 곱")[language]
    for name in ("test_encode_equal_lengths[128]", "test_encode_equal_lengths[512]"):
        if "mfu" in rows.get(name, {}):
            reached = rows[name]["mfu"]["fastbert"]
            lines.append(line(name, product, targets.CPU_PRODUCT_SHARE, reached, ".0%"))
    return "\n".join(lines) + "\n"


def machine_line(rows: dict[str, Row], language: int) -> str:
    """Where the rows of the speed table come from."""
    row = next(rows[name] for name in SPEED if name in rows)
    versions = ", ".join(f"{package} {row[package]}" for package in ("torch", "transformers"))
    said = ("Measured on", "측정한 곳:")[language]
    return f"{said} {row['machine']}; Python {row['python']}, {versions}; {row['date']}.\n"


OPS = {
    "embeddings": "임베딩",
    "qkv": "QKV 곱",
    "attention": "어텐션",
    "dropout_add_norm": "잔차 + LayerNorm",
    "dropout_add_norm, dropout 0.1": "드롭아웃 + 잔차 + LayerNorm",
    "linear_act": "피드포워드 곱 + GELU",
    "linear_cross_entropy": "어휘에 대한 손실",
    "unpad": "패딩 빼기",
    "pad": "패딩 넣기",
}


def op_rows(rows: dict[str, Row], direction: str) -> dict[str, Row]:
    """Operation -> its row, "forward" or "forward-backward"."""
    found = {op: rows.get(f"test_op[{op}-{direction}]", {}) for op in OPS}
    return {op: row for op, row in found.items() if "share_of_roof" in row}


def ops_table(rows: dict[str, Row], language: int) -> str:
    """Forward and backward of every operation: time, share of its floor, and against the best peer."""
    head = (
        ("forward and backward", "ms", "floor, ms", "share of the floor", "best other side"),
        ("순전파와 역전파", "ms", "하한, ms", "하한의 비율", "가장 빠른 다른 것"),
    )[language]
    there = op_rows(rows, "forward-backward")
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|"] if there else []
    for op, row in there.items():
        factors = row.get("times_faster_than", {})
        best = min(factors, key=factors.__getitem__, default="")
        against = f"{best}: {factors[best]:.2f}×" if best else "–"
        lines.append(
            f"| {(op, OPS[op])[language]} | {row['ms']['fastbert']:,.1f} | {row['floor_ms']:,.1f} | "
            f"{row['share_of_roof']['fastbert']:.0%} | {against} |"
        )
    return "\n".join(lines) + "\n"


PICTURES = {
    "lengths": ("what lengths and batches cost", "길이와 배치에 따른 비용"),
    "roofline": ("every operation against what the machine can do", "기계의 한계에 견준 각 연산"),
}


def picture_lines(rows: dict[str, Row], language: int) -> str:
    """Links to the pictures whose rows exist."""
    there = {"lengths": has_lengths(rows), "roofline": bool(op_rows(rows, "forward-backward"))}
    return "".join(
        f"![{labels[language]}](docs/{name}.png)\n" for name, labels in PICTURES.items() if there[name]
    )


def has_lengths(rows: dict[str, Row]) -> bool:
    """Whether every panel of the picture of lengths has rows."""
    return all(
        (
            points(rows, "test_token_budget[", "tokens_per_batch", "tokens_per_s"),
            points(rows, "test_length_mix[", "padding", "tokens_per_s"),
            any("reference_saved_bytes" in row for row in rows.values()),
            any(name.startswith("test_packing_fill[") for name in rows),
        )
    )


def points(rows: dict[str, Row], prefix: str, x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """Side -> (x, y of that side) of the rows whose names begin so, in the order of x."""
    lines: dict[str, list[tuple[float, float]]] = {}
    chosen = [row for name, row in rows.items() if name.startswith(prefix) and isinstance(row.get(y), dict)]
    for row in sorted(chosen, key=lambda row: row[x]):
        for side, value in row[y].items():
            lines.setdefault(side, []).append((row[x], value))
    return lines


TABLES: dict[str, Callable[[dict[str, Row], int], str]] = {
    "speed": speed_table,
    "other": other_table,
    "scaling": scaling_table,
    "profile": profile_table,
    "machine": machine_line,
    "scores": score_table,
    "ops": ops_table,
    "targets": targets_table,
    "pictures": picture_lines,
}


def with_tables(text: str, rows: dict[str, Row], language: int) -> str:
    """The page with each marked table made anew. ValueError for a mark of an unknown name."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}: {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](rows, language)}\n{match[4]}"

    return MARKED.sub(made, text)
