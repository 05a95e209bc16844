"""`make planner-accuracy` on a few published runs."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import accuracy_table
import pytest
from planner_accuracy import main

RUNS = Path(__file__).with_name("published_runs.csv")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    with redirect_stdout(StringIO()) as output:
        main([str(RUNS)])
    return output.getvalue().splitlines()


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


def test_the_guide_shows_the_recorded_errors() -> None:
    recorded = json.loads(accuracy_table.FILE.read_text())

    assert set(recorded) == set(accuracy_table.ROWS)
    assert accuracy_table.table(recorded) in accuracy_table.GUIDE.read_text(encoding="utf-8")
