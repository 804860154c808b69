"""Comparing two runs of the benchmarks, on invented rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import compare, plot, profile_step, tables
from benchmarks.rows import latest, run_named


def row(name: str, median_s: float, spread_s: float = 0.0, **others: object) -> dict[str, object]:
    return {
        "name": name,
        "median_s": median_s,
        "iqr_s": spread_s,
        "machine": "one machine",
        "host_kind": "cpu",
        "commit": "abcdef123456",
        **others,
    }


def files(tmp_path: Path, before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    paths = []
    for name, rows in (("a", before), ("b", after)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        paths.append(str(path))
    return paths


@pytest.mark.parametrize(
    ("after_s", "spread_s", "verdict", "status"),
    [
        (1.04, 0.0, "same", 0),  # within the least noise
        (1.06, 0.0, "slower", 1),
        (0.94, 0.0, "faster", 0),
        (1.06, 0.1, "same", 0),  # half of the spread of both: 5 % and 4.7 %
        (1.20, 0.1, "slower", 1),
    ],
)
def test_a_row_moves_if_it_differs_by_more_than_the_noise(after_s, spread_s, verdict, status, tmp_path):
    before, after = row("step", 1.0, spread_s), row("step", after_s, spread_s)
    (change,), left_out = compare.changes([before], [after])
    assert change.verdict == verdict and not left_out
    assert change.change == pytest.approx(after_s - 1)
    assert compare.main(files(tmp_path, [before], [after])) == status


def test_older_rows_have_the_ends_of_their_sample():
    old = {"median_s": 2.0, "min_s": 1.9, "max_s": 2.3}
    assert compare.noise(old) == pytest.approx(0.1)


def test_what_cannot_be_compared_is_named(tmp_path, capsys):
    before = [row("both", 1.0), row("gone", 1.0), row("moved", 1.0), row("untimed", 1.0)]
    after = [row("both", 1.0), row("new", 1.0), row("moved", 1.0, machine="another")]
    after.append({k: v for k, v in row("untimed", 1.0).items() if k != "median_s"})
    assert compare.main(files(tmp_path, before, after)) == 0
    printed = capsys.readouterr().out
    for reason in (
        "gone: only in A",
        "new: only in B",
        "moved: measured on one machine and on another",
        "untimed: a row without a median",
    ):
        assert f"not compared: {reason}" in printed
    assert compare.main(files(tmp_path, [row("a", 1.0)], [row("b", 1.0)])) == 2
    assert "no row of one name and one machine is in both" in capsys.readouterr().err


def test_a_run_is_a_file_or_a_commit(tmp_path, capsys):
    (tmp_path / "cpu.jsonl").write_text(
        "".join(json.dumps(row("step", s, commit=c)) + "\n" for s, c in ((1.0, "aaaa11"), (2.0, "bbbb22")))
    )
    assert [r["median_s"] for r in run_named("bbbb", tmp_path)] == [2.0]
    assert [r["median_s"] for r in run_named(str(tmp_path / "cpu.jsonl"))] == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"cccc is neither a file of rows nor a commit .* of aaaa11, bbbb22"):
        run_named("cccc", tmp_path)
    assert compare.main(["no such file", "nor this"]) == 2
    assert "no such file is neither a file of rows nor a commit" in capsys.readouterr().err


def test_the_last_row_of_a_name_counts():
    rows = [row("step", 1.0), row("step", 2.0), row("step", 3.0, host_kind="gpu")]
    assert latest(rows)["step"]["median_s"] == 3.0
    assert latest(rows, "cpu")["step"]["median_s"] == 2.0


# ---- pictures and tables ----------------------------------------------------------------------------------


def test_the_tables_of_the_pages_are_those_of_the_rows(capsys):
    assert plot.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_is_made_where_it_is_marked():
    rates = {"fastbert": 300, "reference": 100}
    race = {"test_encode_at_wikipedia_512": {"tokens_per_s": rates, "times_faster_than": {"reference": 3.0}}}
    page = "before\n<!-- rows speed -->\nold\n<!-- end of rows -->\nafter\n"
    made = tables.with_tables(page, race, language=0)
    assert made.startswith("before\n<!-- rows speed -->\n\n|") and made.endswith(
        "<!-- end of rows -->\nafter\n"
    )
    assert "| **300** tokens | textbook BERT 100 | 3.0× |" in made and "old" not in made
    assert tables.with_tables(made, race, language=0) == made
    assert "교과서적 BERT 100" in tables.with_tables(page, race, language=1)
    with pytest.raises(ValueError, match="there is no table 'sped': speed, other"):
        tables.with_tables("<!-- rows sped -->\n<!-- end of rows -->", race, language=0)


def test_exponents_are_slopes_of_logarithms():
    assert tables.exponent([(n, 3.0 * n**2) for n in (1, 2, 4, 8)]) == pytest.approx(2.0)
    rows = {
        f"test_scaling[length-{n}]": {"value": n, "median_s": 5.0 / n, "saved_bytes": 7 * n}
        for n in (512, 64, 128)
    }
    assert tables.scaling_points(rows, "length", "saved_bytes") == [(64, 448), (128, 896), (512, 3584)]
    assert "| 64 – 512 | -1.00 | 1.00 |" in tables.scaling_table(rows, 0)


def test_pictures_are_drawn(tmp_path):
    rates = {"fastbert": 300, "reference": 100, "transformers": 150}
    race = {"test_encode_at_wikipedia_512": {"tokens_per_s": rates}}
    plot.draw_speed(race, tmp_path / "speed.png")
    rows = {
        f"test_scaling[{axis}-{n}]": {"value": n, "median_s": float(n), "saved_bytes": n}
        for axis in tables.AXES
        for n in (2048, 4096)
    }
    plot.draw_scaling(rows, tmp_path / "scaling.png")
    for name in ("speed.png", "scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (
            tmp_path / name
        ).stat().st_size > 5000


def rows_of_new_pictures():
    """Rows for every panel; a row of an older form among each kind."""
    rows = {
        f"test_token_budget[{n}]": {"tokens_per_batch": n, "tokens_per_s": {"fastbert": 2.0 * n}}
        for n in (2048, 1024)
    }
    for padding in (0.8, 0.2):
        rates = {"fastbert": 300.0, "reference": 100.0, "transformers": 150.0}
        rows[f"test_length_mix[{padding}]"] = {"padding": padding, "tokens_per_s": rates}
    for n in (64, 128):
        rows[f"test_scaling[length-{n}]"] = {
            "value": n,
            "saved_bytes": 10**8,
            "reference_saved_bytes": n * 10**6,
        }
    rows["test_scaling[length-32]"] = {"value": 32, "saved_bytes": 10**8}
    fill = {"packed, LPFHP": 1.0, "sorted": 0.9, "padded to the longest": 0.5, "padded to 512": 0.3}
    rows["test_packing_fill[a]"] = {"fill": fill, "mean_length": 30.0, "mix": "a, b"}
    for direction in ("forward", "forward-backward"):
        rows[f"test_op[qkv-{direction}]"] = {
            "ms": {"fastbert": 10.0, "torch": 12.5}, "floor_ms": 8.0, "bound": "product",
            "share_of_roof": {"fastbert": 0.8, "torch": 0.64}, "times_faster_than": {"torch": 1.25},
        }  # fmt: skip
    rows["test_op[pad-forward]"] = {"ms": {"fastbert": 1.0}}
    return rows


def test_pictures_have_rows_or_are_left_out(tmp_path):
    rows = rows_of_new_pictures()
    assert tables.points(rows, "test_token_budget[", "tokens_per_batch", "tokens_per_s") == {
        "fastbert": [(1024, 2048.0), (2048, 4096.0)]
    }
    assert tables.scaling_points(rows, "length", "reference_saved_bytes") == [
        (64, 64 * 10**6),
        (128, 128 * 10**6),
    ]
    for name, draw in (("lengths", plot.draw_lengths), ("roofline", plot.draw_roofline)):
        draw(rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert tables.picture_lines(rows, 0).count("](docs/") == 2
    without = {
        name: row for name, row in rows.items() if "length_mix" not in name and "-backward" not in name
    }
    assert tables.picture_lines(without, 0) == "" and tables.ops_table(without, 0) == "\n"
    assert not tables.has_lengths({}) and tables.races({}) == {}


def test_operations_stand_beside_their_floor():
    assert "| QKV 곱 | 10.0 | 8.0 | 80% | torch: 1.25× |" in tables.ops_table(rows_of_new_pictures(), 1)


def test_targets_say_what_is_missing():
    rows = {
        "test_minilm_mixed_lengths": {
            "times_faster_than": {"transformers, padded": 4.1, "transformers, sorted in 16": 1.2}
        },
        "test_encode_equal_lengths[512]": {"mfu": {"fastbert": 0.6, "reference": 0.5}},
    }
    lines = tables.targets_table(rows, 0).splitlines()[2:]
    assert lines == [
        "| `test_minilm_mixed_lengths` | transformers, padded | 4.00 | 4.10 | met |",
        "| `test_minilm_mixed_lengths` | transformers, sorted in 16 | 1.50 | 1.20 | missed by 20.0% |",
        "| `test_encode_equal_lengths[512]` | the machine's own product | 80% | 60% | missed by 25.0% |",
    ]
    assert "25.0% 모자람" in tables.targets_table(rows, 1)


def test_of_many_sides_a_row_shows_the_usual_and_the_fastest():
    sides = ("fastbert", "reference", "transformers", "a", "b", "c", "d")
    row = {"tokens_per_s": {side: 10.0 + number for number, side in enumerate(sides)}}
    assert list(tables.shown_rates(row)) == ["fastbert", "reference", "transformers", "c", "d"]
    assert tables.shown_rates(row)["d"] == 16
    few = {"tokens_per_s": {"fastbert": 3.4, "x": 2.6}}
    assert tables.shown_rates(few) == {"fastbert": 3, "x": 3}


def test_a_profile_knows_kinds_of_work_and_the_optimizers_own():
    def event(name, time, parent=None):
        return SimpleNamespace(name=name, self_cpu_time_total=time, cpu_parent=parent, kernels=[])

    step = event("Optimizer.step#Lamb.step", 10.0)
    events = [
        event("aten::addmm", 60.0),
        event("aten::gelu", 20.0),
        step,
        event("aten::mul_", 8.0, event("aten::mul", 0.0, step)),
        event("aten::mul_", 2.0),
    ]
    kinds = profile_step.shares(profile_step.times_of(events, on_gpu=False))
    assert {kind: names["share"] for kind, names in kinds.items()} == {
        "matrix products": 0.6,
        "activation": 0.2,
        "optimizer": 0.18,
        "other": 0.02,
    }
    assert kinds["optimizer"]["aten::mul_"] == 0.08
    names = {
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "_attention_fwd_kernel": "attention",
        "aten::embedding_dense_backward": "embeddings",
        "aten::native_layer_norm": "dropout, residual, LayerNorm",
        "aten::_log_softmax": "loss",
        "aten::cat": "copies and gathers",
    }
    assert {name: profile_step.kind_of(name) for name in names} == names
    assert set(names.values()) | {kind for kind, _ in profile_step.KINDS} | {"optimizer", "other"} == set(
        tables.KINDS
    )
