"""The benchmark on GPUs, run on a CPU: rows outlive one another, and are measured once."""

import json
import time

import pytest
from bench_gpu import main
from gpu_bench.processes import Bench, measure
from gpu_bench.rows import NO_CHECKPOINT, ROWS, Row

EAGER = {**NO_CHECKPOINT, "training": {"compile": False}}
# More than addresses reach, so that no machine tries.
HUGE = {**EAGER, "method": {"lora": {"r": 10**13, "alpha": 32}}}
ROWS_HERE = [
    ROWS[0],
    Row("too-large", "8B LoRA, too large", changes=HUGE),
    Row("lora", "8B LoRA", changes=EAGER),
]


@pytest.mark.full
def test_a_row_outlives_one_that_runs_out_of_memory_and_none_is_measured_twice(tmp_path):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert main([*arguments, "--rows", "gemm", "too-large"], ROWS_HERE) == 0
    first = json.loads((tmp_path / "gpu.json").read_text())["cards"]["CPU"]["rows"]
    assert first["too-large"][0]["is_out_of_memory"]
    assert "lora" not in first
    assert main(arguments, ROWS_HERE) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["cards"]["CPU"]["rows"]
    assert {name: rows[name] for name in first} == first
    (lora,) = rows["lora"]
    assert lora["tokens_per_second"] > 0
    assert lora["mfu"] > 0
    assert "no figure here says anything of a GPU" in (tmp_path / "gpu.md").read_text()


@pytest.mark.full
def test_a_row_that_fails_for_another_reason_is_told_and_tried_again(tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    refused = Row("one", "8B LoRA", changes={**EAGER, "strategy": {"type": "fsdp"}})
    assert main(arguments, [refused]) == 1
    assert "failed: one" in capsys.readouterr().err
    assert "at least two processes" in (tmp_path / "gpu.json").read_text()
    assert main(arguments, [Row("one", "8B LoRA", changes=EAGER)]) == 0
    (found,) = json.loads((tmp_path / "gpu.json").read_text())["cards"]["CPU"]["rows"]["one"]
    assert found["tokens_per_second"] > 0


def test_a_row_is_ended_when_its_time_is_over(tmp_path):
    began = time.monotonic()
    found = measure(ROWS_HERE[2], Bench("cpu", is_tiny=True, work=tmp_path), seconds=1.0)
    assert found["is_out_of_time"]
    assert time.monotonic() - began < 30
