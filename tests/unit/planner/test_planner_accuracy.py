"""`make planner-accuracy` on a few published runs."""

import csv
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import accuracy_table
import pytest
from planner_accuracy import main

RUNS = Path(__file__).with_name("published_runs.csv")


def output_of(file: Path) -> list[str]:
    with redirect_stdout(StringIO()) as output:
        main([str(file)])
    return output.getvalue().splitlines()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return output_of(RUNS)


def test_given_settings_are_listed_before_the_figures(lines: list[str]) -> None:
    memory = lines.index("memory: settings fully given in 3 of 6: 1 2 3")

    assert lines[memory + 1 : memory + 4] == [
        "  not: precision int4 base (GPTQ) + fp16/bf16: 4",
        "  not: strategy ddp/zero2?: 5",
        "  not: act_ckpt unknown; optimizer is empty; program torchtune+compile, packed; "
        "rank is empty: 6",
    ]
    assert any(line.startswith("rates: settings fully given in 3 of 6: 1 2 3") for line in lines)
    assert memory < next(i for i, line in enumerate(lines) if line.startswith("FULLY GIVEN"))


def test_memory_and_rates_of_given_runs_are_near_the_published_figures(lines: list[str]) -> None:
    memory, rates = (line.split() for line in lines if line.startswith("FULLY GIVEN  "))

    assert memory[2] == "3"
    assert float(memory[3].rstrip("%")) <= 8
    assert rates[2] == "3"
    assert rates[-1] == "100%"


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("optimizer", "adafactor", "optimizer adafactor"),
        ("mem_unit", "TiB", "mem_unit TiB"),
        ("mem_scope", "host", "mem_scope host"),
        ("act_ckpt", "True", "act_ckpt True"),
        ("precision", "fp8", "precision fp8"),
        ("seq_len", "0", "seq_len 0"),
        ("seq_len", "4", "the trainer refuses it: "),
        ("grad_accum", "0", "grad_accum 0"),
        ("strategy", "ddp+cpu_offload", "the trainer refuses it: "),
        ("params_b", "0", "params_b 0"),
    ],
)
def test_a_run_with_other_settings_is_not_fully_given(
    column: str, value: str, reason: str, tmp_path: Path
) -> None:
    with RUNS.open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    points = tmp_path / "points.csv"
    with points.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow({**row, column: value})
    lines = output_of(points)
    assert lines[0].startswith("memory: settings fully given in 0 of 1")
    assert lines[1].startswith(f"  not: {reason}")


def test_a_file_without_a_column_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = tmp_path / "points.csv"
    points.write_text("id,model\n1,Llama-2-7B\n")
    with pytest.raises(SystemExit):
        main([str(points)])
    assert "points.csv: no column params_b, method," in capsys.readouterr().err


def test_the_guide_shows_the_recorded_errors() -> None:
    recorded = json.loads(accuracy_table.FILE.read_text())

    assert set(recorded) == set(accuracy_table.ROWS)
    assert accuracy_table.table(recorded) in accuracy_table.GUIDE.read_text(encoding="utf-8")
