"""`kill -9` of ranks and of ftctl itself: the job goes on, and its loss curve is the unbroken one.

What ftctl sees is the main process: one rank is enough for it. Every point that each of several
ranks can be killed at is tried without ftctl, in test_07_exact_resume.py.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_trainer.config import Phase
from support.api.builders import manifest
from support.launch.journals import journal_in
from support.launch.tiny_run import write_inputs

STEPS, SAVE_EVERY = 12, 2
KILLS = ("mid-accumulation@2", "before-commit@6", "exporting")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def write_manifest(inputs: Path, folder: Path, *, restarts: int = 1) -> Path:
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
                "evalEverySteps": 6,
            },
            "topology.processesPerNode": 1,
            "checkpoint": {"everySteps": SAVE_EVERY},
            "restartPolicy": {"maxRestarts": restarts},
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
        timeout=800,
    )


def journal(path: Path) -> list[dict[str, Any]]:
    return journal_in(path.parent / "runs" / "default" / "tiny")


def read_run(path: Path) -> tuple[dict[int, float], dict[str, Any]]:
    """Return the loss of each step, of the attempt that made it last, and the job's status."""
    run_dir = path.parent / "runs" / "default" / "tiny"
    curve = {entry["step"]: entry["loss"] for entry in journal(path) if entry["event"] == "step"}
    return curve, json.loads((run_dir / "job.json").read_text())["status"]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory) -> dict[int, float]:
    path = write_manifest(inputs, tmp_path_factory.mktemp("unbroken"))
    finished = ftctl_run(path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    curve, status = read_run(path)
    assert status["attempt"] == 1
    assert list(curve) == list(range(1, STEPS + 1))
    return curve


@pytest.mark.full
def test_workers_that_are_killed_lose_no_step_beyond_the_last_commit(inputs, unbroken, tmp_path):
    path = write_manifest(inputs, tmp_path, restarts=len(KILLS))
    marks = tmp_path / "marks"
    finished = ftctl_run(
        path, FINETUNE_FAILPOINT=",".join(KILLS), FINETUNE_FAILPOINT_ONCE=str(marks)
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert sorted(os.listdir(marks)) == sorted(KILLS), "a point was never reached"
    curve, status = read_run(path)
    assert curve == unbroken
    assert status["attempt"] == len(KILLS) + 1
    assert status["restarts"]["counted"] == len(KILLS)
    *killed, last = status["attempts"]
    assert {(a["failureClass"], a["exitCode"]) for a in killed} == {("WorkerLost", 137)}
    assert last["failureClass"] == "Completed"


@pytest.mark.full
def test_a_killed_ftctl_adopts_what_still_runs(inputs, unbroken, tmp_path):
    path = write_manifest(inputs, tmp_path)
    with start_ftctl(path) as killed:
        wait_for(partial(has_begun_training, path), killed)
        killed.kill()
    finished = ftctl_run(path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    curve, status = read_run(path)
    assert curve == unbroken
    assert status["attempt"] == 1
    assert status["restarts"]["counted"] == 0


def start_ftctl(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "finetune_operator", "run", str(path)],
        env=os.environ | {"XDG_CACHE_HOME": str(path.parent / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def has_begun_training(path: Path) -> bool:
    progress = path.parent / "runs" / "default" / "tiny" / "progress.json"
    phases = [str(phase) for phase in Phase]
    if not progress.exists():
        return False
    return phases.index(json.loads(progress.read_text())["phase"]) >= phases.index(Phase.TRAINING)


def wait_for(happened, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        has_ended = process.poll() is not None  # seen before the last look, as it may be slow
        assert not has_ended or happened(), "ftctl ended before the moment came"
        assert time.monotonic() < deadline, "the moment did not come within 120 s"
        time.sleep(0.01)
