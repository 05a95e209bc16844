"""What the chart's rules make of series that a test writes, by promtool."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from monitoring.generate import FILES

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on the PATH (Debian's package prometheus)"
)

Series = dict[str, str]
"""By metric and labels, values a minute apart in promtool's notation."""


def check(folder: Path, series: Series, at: str, expr: str, expected: Mapping[str, float]) -> None:
    """Check what a query answers at a time, by the labels of its series."""
    case = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values}
            for name, values in {"finetune_operator_leader": "1x90", **series}.items()
        ],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": at,
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in expected.items()
                ],
            }
        ],
    }
    file = folder / "played.yaml"
    rules = {"rule_files": [str(FILES / "rules.yaml")], "evaluation_interval": "30s"}
    file.write_text(yaml.safe_dump({**rules, "tests": [case]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def of(job: str, **labels: str) -> str:
    """Return the labels of a series of rank 0 of a job."""
    inside = {"namespace": "team", "finetunejob": job, "node": f"n-{job}", "rank": "0", **labels}
    return "{" + ",".join(f'{name}="{value}"' for name, value in inside.items()) + "}"
