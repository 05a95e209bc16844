"""A run and its experiment trackers: one process beside the ranks, one run for all attempts."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import ExitCode, Progress, TrainConfig
from support.launch.launches import Launch, launch, train_config, until
from support.launch.stand_in_mlflow import StandInMlflow, running_mlflow

TOKEN = "s3cr3t-t0ken"
REAL_SERVER = os.environ.get("FINETUNE_TEST_MLFLOW")
TRACKER = {"type": "mlflow", "project": "trial"}


@pytest.fixture
def server() -> Iterator[StandInMlflow]:
    with running_mlflow() as running:
        yield running


@pytest.fixture(params=["stand-in", "real"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "stand-in":
        with running_mlflow() as running:
            yield running.address
        return
    if REAL_SERVER is None:
        pytest.skip("FINETUNE_TEST_MLFLOW names no mlflow program")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = f"sqlite:///{tmp_path}/mlflow.db"
    words = ["server", "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    with subprocess.Popen([REAL_SERVER, *words], start_new_session=True) as process:
        try:
            until(lambda: responds(f"http://127.0.0.1:{port}/health"))
            url = f"http://127.0.0.1:{port}"
            run = warm_up(url)  # the first requests import the store
            call(url, "runs/log-batch", {"run_id": run, "metrics": []})
            call(url, "runs/update", {"run_id": run, "status": "FINISHED"})
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def call(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        found: dict[str, Any] = json.load(response)
    return found


def warm_up(address: str) -> str:
    """Create a run in another experiment and return its id."""
    experiment = call(address, "experiments/create", {"name": "other"})["experiment_id"]
    call(address, "runs/search", {"experiment_ids": [experiment]})
    created = call(address, "runs/create", {"experiment_id": experiment, "run_name": "other"})
    return str(created["run"]["info"]["run_id"])


def run_config(folder: Path, attempt: int = 1, **telemetry: Any) -> TrainConfig:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return train_config(
        folder,
        job={"attempt": attempt},
        world={"nproc_per_node": 1},
        telemetry={"metrics_port": port, **telemetry},
    )


def progress_of(config: TrainConfig) -> Progress:
    try:
        return Progress.read(Path(config.run_dir) / "progress.json")
    except FileNotFoundError:
        return Progress()


def stopped(run: Launch) -> int:
    run.process.send_signal(signal.SIGTERM)
    return run.wait()


def test_all_attempts_are_one_run_and_no_rank_sees_the_credentials(
    address: str, tmp_path: Path
) -> None:
    environ = {"MLFLOW_TRACKING_URI": address, "MLFLOW_TRACKING_TOKEN": TOKEN}
    first = run_config(tmp_path, trackers=[TRACKER])
    run = launch(first, "train", environ)
    until(lambda: progress_of(first).trackers is not None)
    (page,) = progress_of(first).trackers or ()
    assert stopped(run) == ExitCode.PREEMPTED
    assert page.type == "mlflow"
    experiment, _, run_id = page.url.removeprefix(f"{address}/#/experiments/").split("/")
    search = {"experiment_ids": [experiment], "filter": "tags.`finetune.job_uid` = 'u-1'"}
    (found,) = call(address, "runs/search", search)["runs"]
    assert (found["info"]["run_id"], found["info"]["status"]) == (run_id, "KILLED")

    second = run_config(tmp_path, 2, trackers=[TRACKER])
    run = launch(second, "few_steps", environ)
    assert run.wait() == 0
    (found,) = call(address, "runs/search", search)["runs"]
    assert (found["info"]["run_id"], found["info"]["status"]) == (run_id, "FINISHED")
    path = f"metrics/get-history?run_id={run_id}&metric_key="
    losses = call(address, f"{path}train/loss")["metrics"]
    journal = [one for one in run.events(0) if one["event"] == "step"]
    assert [one["step"] for one in losses] == [one["step"] for one in journal]
    assert [one["step"] for one in losses[-3:]] == [1, 2, 3]
    (held_out,) = call(address, f"{path}eval/loss")["metrics"]
    assert (held_out["step"], held_out["value"]) == (3, 0.5)
    names = (Path(second.run_dir) / "environment.txt").read_text().split()
    assert "PATH" in names
    assert not [name for name in names if name.startswith("MLFLOW_")]
    assert TOKEN not in run.stderr


def test_a_tracker_that_refuses_costs_one_warning_without_its_credentials(
    server: StandInMlflow, tmp_path: Path
) -> None:
    server.token = "another"  # the response repeats the header
    (tmp_path / "credentials").write_text(TOKEN)
    own = {"url": server.address, "credentials_path": str(tmp_path / "credentials")}
    config = run_config(tmp_path, trackers=[TRACKER | own])
    # In a pod a user may have set variables; the configuration decides.
    run = launch(config, "train", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"})
    until(lambda: bool(progress_of(config).warnings))
    assert stopped(run) == ExitCode.PREEMPTED
    (warning,) = progress_of(config).warnings
    assert warning == (
        "tracker mlflow: HTTP 401 not Bearer ***; its curves may be incomplete, and training "
        "continues"
    )
    assert run.stderr.count("tracker mlflow") == 1
    assert TOKEN not in run.stderr
    assert progress_of(config).trackers is None


@pytest.mark.full
def test_a_tracker_that_hangs_costs_one_warning_and_no_step(
    server: StandInMlflow, tmp_path: Path
) -> None:
    server.hangs.set()
    config = run_config(tmp_path, trackers=[TRACKER | {"url": server.address}])
    run = launch(config, "train")
    until(lambda: bool(server.authorizations))
    step = progress_of(config).step
    until(lambda: progress_of(config).step > step + 10)
    assert stopped(run) == run.termination.exit_code == ExitCode.PREEMPTED
    assert run.stderr.count("tracker mlflow") == 1


def write_journal(config: TrainConfig, steps: range) -> None:
    journal = Path(config.run_dir) / f"logs/attempt-{config.job.attempt}.1/rank-0.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"event": "step", "step": step, "time": 1e9 + step, "loss": step} for step in steps]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def follow(config: TrainConfig, word: str, environ: dict[str, str]) -> str:
    """Let the process of the trackers read the whole journal, and return its output."""
    path = Path(config.termination_path).with_name("config.json")
    path.write_text(config.to_json())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "finetune_trainer.launch.trackers", str(path), "0", ""],
        input=word,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def records(file: Path) -> list[Any]:
    """Return the records that the library has stored for `wandb sync`, in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, at, data, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if (left := 32_768 - at % 32_768) < 7:
            at += left  # no header fits into the rest of a block
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        data += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
            data = b""
    return found


def test_attempts_are_one_run_of_wandb_whose_step_may_go_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    environ = {"WANDB_MODE": "offline", "WANDB_API_KEY": 40 * "k", "HOME": str(tmp_path / "home")}
    points: list[tuple[float, float]] = []
    for attempt, steps, word in ((1, range(1, 6), "stopped"), (2, range(4, 8), "done")):
        config = run_config(tmp_path, attempt, trackers=[{"type": "wandb", "project": "trial"}])
        write_journal(config, steps)
        assert follow(config, word, environ) == ""
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*-u-1/run-u-1.wandb"))
    assert len(files) == 2
    for file in files:
        for record in records(file):
            if record.HasField("run"):
                run = record.run
                assert (run.run_id, run.project, run.display_name) == ("u-1", "trial", "tiny")
            if record.HasField("history"):
                values = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                points.append((values["train/global_step"], values["train/loss"]))
    assert points == [(step, step) for step in (1, 2, 3, 4, 5, 4, 5, 6, 7)]
    everything = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    assert 40 * b"k" not in everything
    assert not list(tmp_path.rglob("requirements.txt"))
