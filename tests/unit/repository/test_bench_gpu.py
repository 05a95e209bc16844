"""What the benchmark on GPUs makes of what it measured; its processes are tested in integration."""

import json
from typing import Any

import pytest
from bench_gpu import main
from gpu_bench.entry import idle_share
from gpu_bench.processes import figures_of
from gpu_bench.rows import DEFAULTS, FSDP, ROWS, Row, config_of
from gpu_page import page
from measured import FOLDER

from finetune_operator.planner.plan import make_plan
from finetune_operator.planner.train_config import Locations, derive_train_config
from support.api.builders import job

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def row(name: str) -> Row:
    return next(one for one in ROWS if one.name == name)


def card(name: str, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    made = {key: [{**one, "made_with": "commit a"} for one in ones] for key, ones in rows.items()}
    about = {"name": name, "memory_gib": 80.0, "cpu": "x", "cores": 1, "python": "3.12"}
    return {**about, "flash_3_and_4": ["flash_attn_interface"], "notes": [], "rows": made}


def cells(*cards: dict[str, Any]) -> list[dict[str, list[str]]]:
    """Return the tables of a page, one a card: cells by the row's name."""
    text = page({"is_tiny": False, "cards": {one["name"]: one for one in cards}})
    tables = []
    for part in text.split("\n## ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("| `")]
        split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        tables.append({one[0].strip("`"): one[1:] for one in split})
    return tables


def test_mfu_is_four_flops_a_parameter_and_token_by_the_peak_of_the_data_sheet(tmp_path):
    (tmp_path / "parameters.json").write_text("8030000000")
    measured = {"step_seconds": [9.0, 4096 / 13_000, 0.1]}
    found = figures_of(row("lora-8b"), tmp_path, 4096, measured)
    assert found["tokens_per_second"] == pytest.approx(13_000)
    assert found["mfu"] == pytest.approx(0.422, abs=5e-4)
    full = figures_of(row("full-1b"), tmp_path, 4096, measured)
    assert full["mfu"] == pytest.approx(1.5 * found["mfu"])


def test_a_device_is_idle_where_no_kernel_runs_and_kernels_may_overlap():
    spans = [(0, 40), (10, 20), (30, 50), (90, 100)]
    events = [{"cat": "kernel", "ts": start, "dur": end - start} for start, end in spans]
    events += [{"cat": "gpu_user_annotation", "ts": 0, "dur": 100}, {"name": "no time"}]
    assert idle_share(events, ("kernel",)) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="no events of gpu_memcpy"):
        idle_share(events, ("gpu_memcpy",))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rows_begin_with_what_a_manifest_gets_that_says_nothing(strategy):
    asked = job(topology={"gpusPerNode": 8}, strategy={"type": strategy})
    derived = derive_train_config(make_plan(asked), 1, Locations(str, "r", "c", "o", "d", "t"))
    changes = DEFAULTS if strategy == "ddp" else {**DEFAULTS, "strategy": FSDP["strategy"]}
    for section, values in changes.items():
        found = getattr(derived, section).model_dump()
        assert {name: found[name] for name in values} == values
    made = config_of(row("lora-8b"), "cuda", model="m", rows="r", folder="f")
    assert made.training.model_dump().items() >= DEFAULTS["training"].items()


def test_cards_have_tables_of_their_own_with_their_own_bounds():
    speed = {"tokens_per_second": 12_500.0, "flops_per_second": 4e14, "mfu": 0.4}
    speed |= {"peak_gib": 42.0, "formula_gib": 41.0}
    product = {"flops_per_second": 8e14}
    rows = {"gemm": [product], "lora-8b": [speed]}
    one, other = cells(card(H100, rows), card(H200, rows))
    assert one["lora-8b"][:4] == ["12500 tokens/s", "40.0%", "50.0%", "42.0 (41.0)"]
    assert one["lora-8b"][5:7] == ["`tokens_per_second` ≥ 12,000", "met"]
    assert other["lora-8b"][5:7] == ["`tokens_per_second` ≥ 13,000", "**missed**"]


def test_speeds_are_compared_by_round_and_never_across_commits():
    ours = [{"tokens_per_second": speed, "flops_per_second": 1.0} for speed in (100.0, 200.0)]
    theirs = [{"tokens_per_second": speed, "flops_per_second": 1.0} for speed in (90.0, 160.0)]
    made = card(H200, {"lora-8b": ours, "peer-lora-8b": theirs})
    (found,) = cells(made)
    assert found["peer-lora-8b"][4] == "0.850 x `lora-8b`"
    assert found["peer-lora-8b"][6] == "met"
    for one in made["rows"]["lora-8b"]:
        one["made_with"] = "commit b"
    (found,) = cells(made)
    assert found["peer-lora-8b"][4:7] == ["", "`beside` ≤ 0.9091, `peak_beside` ≥ 1", ""]


def test_a_row_without_figures_says_why():
    full = {"said": "out of memory: 16 GiB", "is_out_of_memory": True}
    made = card(H100, {"full-8b": [full], "qlora-8b": [{"said": "it broke"}]})
    (found,) = cells(made)
    assert found["full-8b"][0] == "out of memory"
    assert found["qlora-8b"][0] == found["full-1b"][0] == "not measured"
    text = page({"is_tiny": False, "cards": {H100: made}})
    assert "- `full-8b`: out of memory: 16 GiB\n- `qlora-8b`: it broke\n" in text


def test_without_a_gpu_each_row_says_that_it_was_not_measured():
    lines = page({"is_tiny": False, "cards": {}}).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(ROWS)
    assert all("| not measured |" in line for line in rows)


@pytest.mark.parametrize("how", [["--device", "cpu"], ["--shape", "tiny"]])
def test_tiny_models_are_never_written_among_published_figures(how):
    before = {name: (FOLDER / name).read_bytes() for name in ("gpu.json", "gpu.md")}
    with pytest.raises(SystemExit, match="tiny models write elsewhere"):
        main([*how, "--out", str(FOLDER)])
    assert {name: (FOLDER / name).read_bytes() for name in before} == before


def test_a_folder_of_whole_models_is_refused_to_tiny_ones(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps({"is_tiny": False, "cards": {}}))
    with pytest.raises(SystemExit, match="tiny and whole models"):
        main(["--device", "cpu", "--out", str(tmp_path)])
