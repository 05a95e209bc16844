"""Claim the folders that an attempt writes to, before anything is written there.

Called by `worker` on rank 0. It imports no torch, so that a refused job fails immediately.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from finetune_trainer.checkpoint.start import job_of_checkpoints
from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, listing_lag_seconds, take
from finetune_trainer.config import JobRef, TrainConfig
from finetune_trainer.errors import Preempted
from finetune_trainer.export.publish import job_of_export

_SECONDS_BETWEEN_POLLS = 0.1


def claim_folders(config: TrainConfig, should_stop: Callable[[], bool]) -> Fence:
    """Claim run directory, checkpoints and output; return the fence that holds the claims.

    Raises:
        FolderTakenError: Another job owns a folder.
        OutputNotWritableError: A folder is not writable.
        OvertakenError: A later attempt of the job exists.
        Preempted: `should_stop` returned True while waiting for other writers.
    """

    def sleep(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if should_stop():
                raise Preempted("asked to stop before training began; no work is lost")
            time.sleep(min(left, _SECONDS_BETWEEN_POLLS))

    def pace(folder: Path) -> Pace:
        lag = config.listing_lag_seconds
        if lag is None:
            lag = listing_lag_seconds(folder)
        if lag:
            print(
                f"claiming {folder}, whose listings may be {lag:g} s late: this takes "
                f"{2 * lag:g} to {6 * lag:g} s",
                file=sys.stderr,
                flush=True,
            )
        return Pace(lag_seconds=lag, patience_seconds=10 + 8 * lag, sleep=sleep)

    def wanted(
        text: str,
        field: str,
        left_by: Callable[[Path], JobRef | None],
        remedy: str = "",
    ) -> Wanted:
        return Wanted(
            Path(text).absolute(),
            field,
            config.job,
            remedy=remedy,
            take_over=config.take_over,
            left_by=left_by,
        )

    run_dir = wanted(
        config.run_dir,
        "the run directory",
        lambda folder: None,
        remedy="give the job another name, or another run directory",
    )
    return take(
        [
            # Folders that the manifest names come first, because a copied manifest shares them.
            wanted(config.checkpoint.dir, "spec.checkpoint.uri", job_of_checkpoints),
            wanted(config.output.dir, "spec.output.uri", job_of_export),
            run_dir,
        ],
        pace,
    )
