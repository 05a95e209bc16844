"""What a supervisor hands its ranks through the environment, and what each rank hands back.

Used by `supervisor` and `worker` alone; a foreign launcher sets none of this.
"""

from pathlib import Path

from finetune_trainer.config import ContractModel, Termination
from finetune_trainer.files import replace_text

ENV_REPORT_DIR = "FINETUNE_REPORT_DIR"  # private folder the reports go to
ENV_STARTED = "FINETUNE_STARTED"  # when the supervisor's process started, seconds since the epoch
ENV_SUPERVISOR_PID = "FINETUNE_SUPERVISOR_PID"
DEFAULT_ENTRY = "finetune_trainer.rank:run"  # does a rank's work


class RankReport(ContractModel):
    """How one rank ended.

    `is_collateral` is true when the rank failed only because it lost its peers.
    """

    rank: int
    time: float
    termination: Termination
    is_collateral: bool = False


def write_report(folder: Path, report: RankReport) -> None:
    """Leave a rank's report for its supervisor; whole or not at all."""
    replace_text(folder / f"rank-{report.rank}.json", report.to_json())


def read_report(folder: Path, rank: int) -> RankReport | None:
    """Return the report that a rank left, or None when it left none."""
    path = folder / f"rank-{rank}.json"
    return RankReport.read(path) if path.exists() else None
