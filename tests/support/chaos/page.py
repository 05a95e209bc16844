"""The page docs/reliability.md, from the table and the record of the last runs."""

import json
from pathlib import Path
from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from support.chaos.case import Case, Place
from support.chaos.table import CASES

DOCS = Path(__file__).parents[3] / "docs"
PAGE, RECORDED = DOCS / "reliability.md", DOCS / "benchmarks" / "reliability.json"

_HEAD = """\
# Reliability

`make chaos` generates this page from the faults in `tests/support/chaos` and the record of their
last run. A run is right if the status names the fault, the attempt has the expected class, counts
against the expected limit, and the next attempt continues from the expected step.

*Counts* is the limit of `restartPolicy` that the attempt uses up: `maxRestarts` (counted),
`maxDisruptions` (free), or neither. In virtual time a step takes a second and a checkpoint follows
each tenth step; the next attempt waits for its pods for 3 seconds and loads for 5. *Trains again*
is the time from the fault, or from its repair, until the job trains.
"""
_PLACES = {
    Place.VIRTUAL: ("In virtual time", "The cluster is played: `make test` runs these faults."),
    Place.PROCESSES: ("With real trainers", "Trainers run as processes of one machine."),
    Place.CONTROL_PLANE: (
        "On a control plane",
        "API server, scheduler and controllers are real; nodes are played.",
    ),
    Place.NODE: ("On nodes", "Pods train on a cluster: `make e2e` runs these faults."),
}
_COLUMNS = ("fault", "what the user sees", "counts", "continues from", "trains again", "right")


def recorded() -> dict[str, Any]:
    """Return the record of the last run of each case, by its slug."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for place, (title, text) in _PLACES.items():
        cases = [one for one in CASES if one.place is place]
        lines += [f"## {title}\n", f"{text}\n", _row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
        lines += [_row(_cells(case, record.get(case.slug))) for case in cases]
        lines.append("")
    return "\n".join(lines)


def _cells(case: Case, run: dict[str, Any] | None) -> list[str]:
    truth, outcome = case.truth, (run or {}).get("outcome") or {}
    name = truth.final or truth.failure or truth.reason
    names = ", ".join(f"`{one}`" for one in name.replace(" or ", ", ").split(", ") if one)
    seen = outcome.get("seen") or "; ".join(truth.words)
    lost = outcome.get("lost_steps")
    resumes = f"step {truth.resumes}" if isinstance(truth.resumes, int) else truth.resumes
    if truth.phase is JobPhase.FAILED:
        resumes = "no attempt follows"
    if lost is not None:
        resumes += f"; {lost} steps lost"
    seconds = outcome.get("recovery_seconds")
    if case.not_run:
        right = f"not run: {case.not_run}"
    else:
        right = f"{run['right']} of {run['runs']}" if run else "not run"
    return [
        f"{case.fault}: {case.how}",
        f"{names}: {seen}" if names else seen,
        truth.budget.value if truth.failure else "",
        resumes,
        f"{seconds:.0f} s" if seconds is not None else "",
        right,
    ]


def _row(cells: Any) -> str:
    return "| " + " | ".join(one.replace("|", "\\|") for one in cells) + " |"
