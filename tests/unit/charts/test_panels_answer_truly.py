"""What panels say of series whose answer can be worked out by hand."""

from pathlib import Path

import pytest

from monitoring.boards import boards
from monitoring.windows import Windows
from support.charts.played_series import Series, check, needs_promtool, of
from support.charts.prometheus import filled

pytestmark = needs_promtool

WINDOWS = Windows()
CHOSEN = {"namespace": "team", "finetunejob": "llama", "node": "n-llama"}
PHASE = "finetune_train_phase_seconds_total"
STEPS = "finetune_train_steps_total"
SAVED = "finetune_train_checkpoint_duration_seconds"
SIZE = "finetune_train_checkpoint_bytes_total"
BESIDE = ("llama", "another-on-its-node")


def phase(name: str, rank: str) -> str:
    return f"{PHASE}{of('llama', phase=name, rank=rank)}"


def collective(name: str, rank: str) -> str:
    labels = {"op": "all_reduce", "group": "dp", "size": "large"}
    return f"finetune_comm_{name}_total{of('llama', rank=rank, **labels)}"


def spent(job: str, category: str) -> str:
    return f"finetune_job_wallclock_seconds{of(job, category=category)}"


def gpu(name: str, job: str, **labels: str) -> str:
    return f"finetune_gpu_{name}_total{of(job, node='n-llama', gpu='GPU-1', **labels)}"


@pytest.mark.parametrize(
    ("board", "title", "series", "expected"),
    [
        pytest.param(
            "job",
            "Time by phase",
            {
                phase("forward", "0"): "0+45x90",
                phase("data_wait", "0"): "0+15x90",
                phase("forward", "1"): "100x90",  # it has ended
                phase("data_wait", "1"): "0x90",
            },
            {'{phase="forward"}': 0.75, '{phase="data_wait"}': 0.25},
            id="time by phase beside a rank that has ended",
        ),
        pytest.param(
            "job",
            "Time by phase",
            {phase("forward", "0"): "0x90", phase("data_wait", "0"): "0x90"},
            {},
            id="time by phase of a job that has just begun",
        ),
        pytest.param(
            "job",
            "Busy time per step",
            {phase("eval", "0"): "0+60x90", f"{STEPS}{of('llama')}": "7x90"},
            {},
            id="busy time of a step while a job evaluates",
        ),
        pytest.param(
            "job",
            "Checkpoint size",
            {
                # One is written, one fails, and a third is still being written.
                f"{SAVED}_count{of('llama', kind='save_blocking')}": "0x55 1 2 3x30",
                f"{SAVED}_count{of('llama', kind='save_async')}": "0x55 1x90",
                f"{SIZE}{of('llama')}": "0x55 4096x90",
            },
            {"{}": 4096},
            id="size of a checkpoint where others fail",
        ),
        pytest.param(
            "job",
            "Collective data per second",
            {collective("bytes", rank): "0+6000x90" for rank in "0123"},
            {'{group="dp", op="all_reduce"}': 100},
            id="data of collectives that all ranks have in common",
        ),
        pytest.param(
            "job",
            "Collective calls per second",
            {collective("collectives", rank): "0+120x90" for rank in "0123"},
            {'{op="all_reduce", size="large"}': 2},
            id="calls that all ranks have in common",
        ),
        pytest.param(
            "node",
            "Share of time at a reduced clock",
            {gpu("throttle_seconds", job, reason="hw_thermal"): "0+60x90" for job in BESIDE},
            {'{gpu="GPU-1", reason="hw_thermal"}': 1},
            id="a GPU that two pages tell of",
        ),
        pytest.param(
            "node",
            "PCIe traffic",
            {gpu("pcie_bytes", job, direction="tx"): "0+600x90" for job in BESIDE},
            {'{direction="tx", gpu="GPU-1"}': 10},
            id="bytes of a GPU that two pages tell of",
        ),
        pytest.param(
            "fleet",
            "Jobs by phase",
            {
                f"finetune_job_status_phase{of('llama', phase='Running', pod=pod)}": "1x90"
                for pod in ("the-leader-before", "the-leader")
            },
            {'{phase="Running"}': 1},
            id="a job that two leaders have told of",
        ),
        pytest.param(
            "fleet",
            "Jobs by time category",
            {
                spent("made-anew", "productive"): "0+60x39 0+60x90",
                spent("llama", "productive"): "0+60x90",
                spent("llama", "data"): "0x90",
            },
            {'{category="productive"}': 1, '{category="data"}': 0},
            id="time of a job beside one that was made anew",
        ),
    ],
)
def test_a_panel_says_what_can_be_worked_out(
    tmp_path: Path, board: str, title: str, series: Series, expected: dict[str, float]
) -> None:
    (shown,) = (one for one in boards(WINDOWS) if one.name == board)
    (panel,) = (one for one in shown.panels if one.title == title)

    for query in panel.queries:
        expr = filled(query.expr, CHOSEN, WINDOWS)
        check(tmp_path, series, "60m", expr, expected)
