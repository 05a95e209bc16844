"""`kill -9` at every named point of a run, and the loss curve of a run that nobody killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from builders import manifest
from finetune_trainer.config import Phase
from finetune_trainer.failpoints import POINTS
from tiny_run import write_inputs

STEPS, SAVE_EVERY = 12, 2
# In the order a job comes by them. What an attempt that was killed had not committed is made
# again by the next, which therefore still reaches the points behind.
KILLS = (
    "tokenizing",
    "loading",
    "evaluating@0",
    "answering@0",
    "first-step@1",
    "mid-accumulation@2",
    "before-optimizer@3",
    "after-optimizer@4",
    "saving@4",
    "before-manifest@6",
    "before-rename@6",
    "after-rename@6",
    "restoring",
    "retention@8",
    "evaluating@12",
    "answering@12",
    "exporting",
    "before-export-rename",
)
KILLS_OF_TWO = (
    "loading:rank=1",
    "mid-accumulation@2:rank=1",
    "saving@4:rank=1",
    "before-rename@6:rank=0",
    "evaluating@12:rank=1",
    "exporting:rank=0",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def write_manifest(inputs: Path, folder: Path, *, processes: int, restarts: int = 1) -> Path:
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
            "topology.processesPerNode": processes,
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


def journal(path: Path) -> list[dict]:
    log = path.parent / "runs" / "default" / "tiny" / "logs" / "rank-0.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def read_run(path: Path) -> tuple[dict[int, float], dict]:
    """Return the loss of each step, of the attempt that made it last, and the job's status."""
    run_dir = path.parent / "runs" / "default" / "tiny"
    curve = {entry["step"]: entry["loss"] for entry in journal(path) if entry["event"] == "step"}
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


def test_every_named_point_is_killed_at():
    assert {kill.split("@")[0] for kill in KILLS} == set(POINTS)


def test_one_and_two_ranks_train_on_the_same_loss_curve(unbroken):
    assert unbroken[2] == pytest.approx(unbroken[1], abs=2e-5)


@pytest.mark.timeout(900)  # nineteen attempts, each of which imports torch anew
@pytest.mark.parametrize(
    ("processes", "kills"),
    [pytest.param(1, KILLS, id="one rank"), pytest.param(2, KILLS_OF_TWO, id="two ranks")],
)
def test_workers_killed_at_every_point_lose_no_step_beyond_the_last_commit(
    processes, kills, inputs, unbroken, tmp_path
):
    """One job, killed at each point in turn; every attempt must find what the one before left."""
    path = write_manifest(inputs, tmp_path, processes=processes, restarts=len(kills))
    marks = tmp_path / "marks"
    finished = ftctl_run(
        path, FINETUNE_FAILPOINT=",".join(kills), FINETUNE_FAILPOINT_ONCE=str(marks)
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert sorted(os.listdir(marks)) == sorted(kills), "a point was never reached"
    curve, status = read_run(path)
    assert curve == pytest.approx(unbroken[processes], abs=2e-5)
    assert status["attempt"] == len(kills) + 1
    assert status["restarts"]["counted"] == len(kills)
    *killed, last = status["attempts"]
    assert {(a["failureClass"], a["exitCode"]) for a in killed} == {("WorkerLost", 137)}
    assert last["failureClass"] == "Completed"
    for committed, resumed in commits_and_resumes(path):
        assert resumed == committed


def commits_and_resumes(path: Path) -> list[tuple[int, int]]:
    """Pair what each attempt started from with the newest commit the attempts before had told of.

    A commit that was made but not told of yet when its attempt was killed counts as well.
    """
    pairs, told = [], 0
    for entry in journal(path):
        if entry["event"] == "checkpointed":
            told = max(told, entry["checkpoint"]["step"])
        if entry["event"] == "resumed":
            pairs.append((max(told, entry["step"]), entry["step"]))
    return pairs


@pytest.mark.parametrize("moment", ["job.json", "Tokenizing", "Loading", "Training", "Done"])
def test_a_killed_ftctl_adopts_what_still_runs(moment, inputs, unbroken, tmp_path):
    path = write_manifest(inputs, tmp_path, processes=1)
    with start_ftctl(path) as first:
        wait_for(lambda: moment_reached(path, moment), first)
        first.kill()
    finished = ftctl_run(path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    curve, status = read_run(path)
    assert curve == pytest.approx(unbroken[1], abs=2e-5)
    assert status["attempt"] == 1
    assert status["restarts"]["counted"] == 0


def start_ftctl(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "finetune_operator", "run", str(path)],
        env=os.environ | {"XDG_CACHE_HOME": str(path.parent / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def moment_reached(path: Path, moment: str) -> bool:
    """Tell whether the run has come to a phase of the trainer, or ftctl to its first write."""
    run_dir = path.parent / "runs" / "default" / "tiny"
    if moment == "job.json":
        return (run_dir / "job.json").exists()
    progress = run_dir / "progress.json"
    phases = [str(phase) for phase in Phase]
    if not progress.exists():
        return False
    return phases.index(json.loads(progress.read_text())["phase"]) >= phases.index(moment)


def wait_for(happened, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, "ftctl ended before the moment came"
        assert time.monotonic() < deadline, "the moment did not come within 120 s"
        time.sleep(0.01)
