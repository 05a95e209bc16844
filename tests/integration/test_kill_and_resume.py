"""`kill -9` at every named point of a run, and the loss curve of a run that nobody killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from builders import manifest
from finetune_trainer.failpoints import POINTS
from text_fixtures import tiny_model

STEPS, SAVE_EVERY = 6, 2
# A step other than the last, where a save, an evaluation or an update can be cut short.
AT_STEP = {
    "first-step": 1,
    "mid-accumulation": 4,
    "before-optimizer": 4,
    "after-optimizer": 4,
    "saving": 4,
    "before-manifest": 4,
    "before-rename": 4,
    "after-rename": 4,
    "retention": 4,
    "evaluating": 3,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model")
    for name, count in (("train", 40), ("eval", 6)):
        rows = [
            {"prompt": f"What is {name} number {i} plus {i}?", "completion": f"It is {2 * i}."}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def write_manifest(inputs: Path, folder: Path, *, processes: int) -> Path:
    wanted = manifest(
        name="tiny",
        **{
            "model.source": f"file://{inputs / 'model'}",
            "dataset.source": f"file://{inputs / 'train.jsonl'}",
            "dataset.evalSource": f"file://{inputs / 'eval.jsonl'}",
            # Dropout shows whether a resumed run draws the masks of the unbroken one.
            "method.lora": {"r": 4, "dropout": 0.2},
            "training": {
                "globalBatchSize": 4,
                "maxSeqLength": 64,
                "maxSteps": STEPS,
                "learningRate": 1e-2,
                "evalEverySteps": 3,
            },
            "topology.processesPerNode": processes,
            "checkpoint": {"everySteps": SAVE_EVERY},
            "restartPolicy": {"maxRestarts": 1},
            "observability": {"samplePrompts": ["What is 1 plus 1?"]},
            "backend.local": {"threadsPerProcess": 1},
        },
    )
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(wanted))
    return path


def ftctl_run(path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "finetune_operator", "run", str(path)],
        env=os.environ | {"XDG_CACHE_HOME": str(path.parent / "cache")} | environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


def read_run(path: Path) -> tuple[dict[int, float], dict]:
    """Return the loss of each step, of the attempt that made it last, and the job's status."""
    run_dir = path.parent / "runs" / "default" / "tiny"
    lines = (run_dir / "logs" / "rank-0.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["event"] == "step"]
    curve = {entry["step"]: entry["loss"] for entry in steps}
    return curve, json.loads((run_dir / "job.json").read_text())["status"]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory) -> dict[int, dict[int, float]]:
    curves = {}
    for processes in (1, 2):
        path = write_manifest(inputs, tmp_path_factory.mktemp("unbroken"), processes=processes)
        finished = ftctl_run(path)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        curves[processes], status = read_run(path)
        assert status["attempt"] == 1
        assert list(curves[processes]) == list(range(1, STEPS + 1))
    return curves


def test_one_and_two_ranks_train_on_the_same_loss_curve(unbroken):
    assert unbroken[2] == pytest.approx(unbroken[1], abs=2e-5)


@pytest.mark.parametrize(
    ("point", "processes"),
    [
        *((point, 1) for point in POINTS if point != "restoring"),
        ("loading", 2),
        ("mid-accumulation", 2),
        ("before-rename", 2),
        ("exporting", 2),
    ],
)
def test_a_killed_worker_loses_no_step_beyond_the_last_commit(
    point, processes, inputs, unbroken, tmp_path
):
    path = write_manifest(inputs, tmp_path, processes=processes)
    at = f"@{AT_STEP[point]}" if point in AT_STEP else ""
    last_rank = f":rank={processes - 1}" if point in ("loading", "mid-accumulation") else ""
    once = tmp_path / "killed"
    finished = ftctl_run(
        path,
        FINETUNE_FAILPOINT=f"{point}{at}{last_rank}",
        FINETUNE_FAILPOINT_ONCE=str(once),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert once.exists(), "the point was never reached, so nothing was tested"
    curve, status = read_run(path)
    assert curve == pytest.approx(unbroken[processes], abs=2e-5)
    assert status["restarts"]["counted"] == 1
    first, second = status["attempts"]
    assert first["failureClass"] == "WorkerLost"
    assert first["exitCode"] == 137
    assert second["failureClass"] == "Completed"
    assert (second.get("resumedStep") or 0) >= committed_before(point)


def committed_before(point: str) -> int:
    """Return the newest step that was surely committed when the point was reached."""
    step = AT_STEP.get(point, STEPS if point.startswith(("exporting", "before-export")) else 0)
    if point in ("after-rename", "retention", "exporting", "before-export-rename"):
        return step
    return max(0, (step - 1) // SAVE_EVERY * SAVE_EVERY - SAVE_EVERY)


def test_a_worker_killed_while_restoring_starts_again_from_the_same_checkpoint(
    inputs, unbroken, tmp_path
):
    path = write_manifest(inputs, tmp_path, processes=1)
    path.write_text(path.read_text().replace("maxRestarts: 1", "maxRestarts: 2"))
    # No mark that the kill was made: the first attempt dies at step 5, and then every attempt
    # that restores dies too, until the budget is used up.
    finished = ftctl_run(
        path, FINETUNE_FAILPOINT="mid-accumulation@5", FINETUNE_FAILPOINT_ONCE=str(tmp_path / "a")
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    curve, status = read_run(path)
    assert curve == pytest.approx(unbroken[1], abs=2e-5)
    assert status["attempts"][1]["resumedStep"] == 4
