"""The outlets of telemetry as others see them: in TensorBoard, on disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from finetune_trainer.config import Phase, Progress
from finetune_trainer.telemetry import StepReport, Telemetry
from support.launch.disks import fill
from support.launch.journals import journal_in
from support.launch.launches import clean_environment, train_config, until


def step(number: int) -> StepReport:
    return StepReport(
        step=number,
        epoch=number / 10,
        loss=2.0,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=100,
        samples=4,
        seconds=0.5,
    )


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return step and value of each point, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return [(event.step, event.value) for event in shown.Scalars(tag)]


def wait_for_the_next_second() -> None:
    """Event files are ordered by the second they were made in; real attempts lie further apart."""
    began = int(time.time())
    while int(time.time()) == began:
        pass


def test_tensorboard_shows_one_curve_over_a_resume(tmp_path: Path) -> None:
    config = train_config(tmp_path)
    first = Telemetry(config, rank=0, world_size=1)
    first.evaluated(0, 3.0, 1.0)
    for number in range(1, 6):
        first.step(step(number))
    first.close()
    wait_for_the_next_second()
    second = Telemetry(config, rank=0, world_size=1)
    second.resumed(3)
    for number in range(4, 7):
        second.step(step(number))
    second.close()
    folder = tmp_path / "run" / "tensorboard"
    assert [point for point, _ in scalars(folder, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert scalars(folder, "eval/loss") == [(0, 3.0)]
    for tag in ("train/grad_norm", "train/learning_rate", "train/tokens_per_second"):
        assert len(scalars(folder, tag)) == 6


def test_a_disk_that_is_full_for_a_while_ends_no_training(small_disk: Path) -> None:
    telemetry = Telemetry(train_config(small_disk), rank=0, world_size=1)
    telemetry.step(step(1))
    filler = fill(small_disk)
    for number in range(2, 400):
        telemetry.step(step(number))
        telemetry.phase(Phase.TRAINING)
    [warning] = telemetry.progress.warnings
    assert warning.startswith(f"{small_disk}/run cannot be written (No space left on device)")
    assert Progress.read(small_disk / "run" / "progress.json").step == 1
    filler.unlink()
    wait_for_the_next_second()
    telemetry.phase(Phase.EVALUATING)
    telemetry.step(step(400))
    telemetry.close()
    assert Progress.read(small_disk / "run" / "progress.json").step == 400
    told = [line.get("step") for line in journal_in(small_disk / "run")]
    assert (told[-1], told.count(1)) == (400, 1)
    assert [point for point, _ in scalars(small_disk / "run/tensorboard", "train/loss")][-1] == 400


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from finetune_trainer.config import Phase, TrainConfig
from finetune_trainer.telemetry import Telemetry
telemetry = Telemetry(TrainConfig.read(Path(sys.argv[1])), rank=0, world_size=1)
for number in range(10**9):
    telemetry.warn(f"{number} " + "x" * 500)
"""


def test_progress_is_never_seen_half_written_even_when_the_writer_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(train_config(tmp_path).to_json())
    progress = tmp_path / "run" / "progress.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(path)],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    seen = set()

    def has_raced_long_enough() -> bool:
        for _ in range(100):
            seen.add(Progress.read(progress).warnings[-1:])
        return len(seen) > 50

    try:
        until(progress.exists)
        until(has_raced_long_enough)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    Progress.read(progress)
    # The next attempt starts on whatever was left.
    Telemetry(train_config(tmp_path), rank=0, world_size=1).close()
    assert Progress.read(progress).phase is Phase.STARTING
