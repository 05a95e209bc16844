"""Environment variables and reports that a supervisor and its ranks exchange.

Used only by `supervisor` and `worker`; other launchers set none of these variables.
"""

from pathlib import Path

from finetune_trainer.config import ContractModel, Termination
from finetune_trainer.files import replace_text

ENV_REPORT_DIR = "FINETUNE_REPORT_DIR"  # private folder for the reports
ENV_STARTED = "FINETUNE_STARTED"  # start of the supervisor's process, seconds since the epoch
ENV_SUPERVISOR_PID = "FINETUNE_SUPERVISOR_PID"
DEFAULT_ENTRY = "finetune_trainer.rank:run"  # does a rank's work


class RankReport(ContractModel):
    """Report of how a rank ended.

    `is_collateral` is true if the rank failed only because it lost its peers.
    """

    rank: int
    time: float
    termination: Termination
    is_collateral: bool = False


def write_report(folder: Path, report: RankReport) -> None:
    """Write a rank's report for its supervisor, atomically."""
    replace_text(folder / f"rank-{report.rank}.json", report.to_json())


def read_report(folder: Path, rank: int) -> RankReport | None:
    """Return the report of a rank, or None if it left none."""
    path = folder / f"rank-{rank}.json"
    return RankReport.read(path) if path.exists() else None
