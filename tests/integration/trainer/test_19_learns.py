"""Each strategy learns sixty-four rows by heart."""

from pathlib import Path

import pytest
import torch

from support.strategies.parity import VOCAB, Case, Row, train_cases

ROWS, LENGTH, STEPS = 64, 8, 80


def rows_to_memorise(case: Case, step: int) -> list[Row]:
    """Return the same rows at every step, each with a first token of its own."""
    tokens = torch.randint(
        3, VOCAB, (case.rows, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    tokens[:, 0] = torch.arange(3, 3 + case.rows)
    is_label = [False] + [True] * (LENGTH - 1)
    return [(row, is_label) for row in tokens.tolist()]


CASES = [
    Case(
        name,
        strategy,
        precision=precision,
        rows=ROWS,
        micro_batch_size=ROWS // 2,
        steps=STEPS,
        learning_rate=2e-2,
        rows_of=rows_to_memorise,
    )
    for name, strategy, precision in (
        ("ddp", {"type": "ddp"}, "fp32"),
        ("ddp-bf16", {"type": "ddp"}, "bf16"),
        ("fsdp", {"type": "fsdp"}, "fp32"),
        ("fsdp-bf16", {"type": "fsdp"}, "bf16"),
    )
]


@pytest.mark.full
def test_rows_are_learnt_by_heart_under_each_native_strategy(tmp_path: Path) -> None:
    last = {name: outcome.losses[-1] for name, outcome in train_cases(tmp_path, CASES).items()}
    assert max(last.values()) < 0.05, last
