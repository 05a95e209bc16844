"""`ftctl dev` as a process: jobs come and go, and so does it, at moments that nobody chose."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from support.api.builders import job as model_of
from support.api.builders import manifest
from support.cluster.operators import Api, condition, phase_of, wait_until
from support.launch.disks import fill
from support.local.local_runs import is_running, kill_what_runs_below, starts, write_inputs

FTCTL = [sys.executable, "-m", "finetune_operator"]
STAND_IN = [
    sys.executable,
    str(Path(__file__).parents[2] / "support" / "local" / "dev_stand_in.py"),
]
PATIENCE_SECONDS = 60.0  # no promise: a start alone takes ten on a busy machine
PROMPT_SECONDS = 25.0  # ... but before a job would be looked at anyway
ENDLESS = {"steps": 100_000, "step_seconds": 0.02, "save_every": 50}


class Dev:
    """One `ftctl dev`, whose jobs run the stand-in trainer."""

    def __init__(self, folder: Path, plays: dict[str, Any]) -> None:
        self.folder = folder
        with (folder / "dev.log").open("a") as log:
            self.process = subprocess.Popen(
                [*STAND_IN, str(folder)],
                env={
                    **os.environ,
                    "FINETUNE_STAND_IN": json.dumps(plays),
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                },
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.process.stdout.close()
        assert line == f"export KUBECONFIG={folder}/runs/.dev/kubeconfig\n", self.log
        self.api = Api(f"{folder}/runs/.dev/kubeconfig")

    @property
    def log(self) -> str:
        return (self.folder / "dev.log").read_text()

    def apply(self, name: str = "tiny", **overrides: Any) -> None:
        made = manifest(name=name, **overrides)
        self.api.run(self.api.client.create(FINE_TUNE_JOBS, made, "default"))

    def job(self, name: str = "tiny") -> Object:
        made = self.api.job("default", name)
        assert made is not None
        return made

    def wait_for(self, phase: str, name: str = "tiny") -> Object:
        wait_until(lambda: phase_of(self.job(name)) == phase, PATIENCE_SECONDS, phase)
        return self.job(name)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: step_of(self.folder) >= step, PATIENCE_SECONDS)

    def end(self, *numbers: signal.Signals) -> int:
        """Send signals, one after the other has been heard, and return the exit code."""
        self.api.close()
        for number in numbers:
            self.process.send_signal(number)
            wait_until(lambda: "stopping all jobs" in self.log or self.has_ended, PATIENCE_SECONDS)
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


def step_of(folder: Path) -> int:
    try:
        return int(json.loads((run_dir(folder) / "progress.json").read_text())["step"])
    except FileNotFoundError:
        return -1


def run_dir(folder: Path) -> Path:
    return folder / "runs" / "default" / "tiny"


def attempts_of(made: Object) -> list[tuple[int, int | None]]:
    """Return number and first checkpoint of every attempt."""
    return [(one["number"], one.get("resumedStep")) for one in made["status"]["attempts"]]


Serve = Callable[..., Dev]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that a job names."""
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """Start `ftctl dev`; whatever a failed test leaves is ended."""
    started: list[Dev] = []

    def start(**plays: dict[str, Any]) -> Dev:
        named = {key.removeprefix("attempt_"): play for key, play in plays.items()}
        started.append(Dev(folder, named))
        return started[-1]

    yield start
    for one in started:
        if not one.has_ended:
            one.end(signal.SIGTERM, signal.SIGTERM)
    kill_what_runs_below(folder)


def ftctl(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FTCTL, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_a_job_runs_to_its_end_and_its_log_is_found_by_its_name(serve: Serve, folder: Path) -> None:
    dev = serve(attempt_1={"steps": 3, "step_seconds": 0.7})
    dev.apply(backend=None)
    done = dev.wait_for("Succeeded")
    assert condition(done, "Complete")["status"] == "True"
    assert done["status"]["artifacts"] == [f"file://{run_dir(folder)}/output"]
    wait_until(lambda: "finalizers" not in dev.job()["metadata"], PROMPT_SECONDS)
    wait_until(lambda: len(dev.api.events("default")) == 3, PROMPT_SECONDS)
    assert dev.api.events("default") == ["AttemptCreated", "Completed", "Training"]
    said = ftctl("logs", "tiny", folder=folder)
    assert "starts at step 0" in said.stdout


@pytest.mark.full
def test_ctrl_c_stops_with_a_checkpoint_and_the_next_start_goes_on_from_it(serve: Serve) -> None:
    dev = serve(attempt_1=ENDLESS)
    dev.apply()
    dev.apply("by-hand", suspend=True)
    dev.wait_for_step(5)
    assert dev.end(signal.SIGINT) == 0
    stopped = step_of(dev.folder)
    again = serve(attempt_2={"steps": stopped + 2})
    done = again.wait_for("Succeeded")
    assert attempts_of(done) == [(1, None), (2, stopped)]
    assert done["status"]["restarts"] == {"counted": 0, "disruptions": 0}
    assert done["spec"]["suspend"] is False
    assert again.wait_for("Suspended", "by-hand")["spec"]["suspend"] is True


@pytest.mark.full
def test_ctrl_c_twice_kills_what_does_not_listen(serve: Serve) -> None:
    dev = serve(attempt_1=ENDLESS | {"is_deaf": True}, attempt_2={"steps": 51})
    dev.apply()
    dev.wait_for_step(50)
    assert dev.end(signal.SIGINT, signal.SIGINT) == 0
    done = serve(attempt_2={"steps": 51}).wait_for("Succeeded")
    assert [one["exitCode"] for one in done["status"]["attempts"]] == [137, 0]
    assert done["status"]["restarts"]["counted"] == 0


def test_a_crash_is_followed_by_the_next_attempt_from_the_last_checkpoint(serve: Serve) -> None:
    dev = serve(attempt_1={"steps": 6, "save_every": 2, "kill_at": 5}, attempt_2={"steps": 6})
    dev.apply(restartPolicy__backoff={"baseSeconds": 0})
    done = dev.wait_for("Succeeded")
    assert attempts_of(done) == [(1, None), (2, 4)]
    stored = RunFolder(run_dir(dev.folder)).load()
    assert stored is not None
    assert stored.status.attempt == 2


@pytest.mark.full
def test_a_disk_that_is_full_for_a_while_is_told_and_costs_no_job(
    small_disk: Path, serve: Serve, folder: Path
) -> None:
    (folder / "runs").symlink_to(small_disk)
    dev = serve(attempt_1=ENDLESS, attempt_2={"steps": 60})
    dev.apply(restartPolicy__backoff={"baseSeconds": 0})
    dev.wait_for_step(50)
    wait_until(lambda: dev.job()["status"].get("backendRef"), PROMPT_SECONDS)
    filler = fill(small_disk)  # the stand-in's progress has no room, and it ends
    wait_until(lambda: "No space left on device" in said_of(dev.job()), PROMPT_SECONDS)
    assert "make room" in said_of(dev.job())
    filler.unlink()
    done = dev.wait_for("Succeeded")
    [(_, _), (second, resumed)] = attempts_of(done)
    assert second == 2
    assert resumed is not None
    assert resumed >= 50
    state = folder / "runs/.dev/state.json"
    wait_until(lambda: "Succeeded" in state.read_text(), PROMPT_SECONDS)


def said_of(made: Object) -> str:
    return json.dumps(made["status"]["conditions"])


@pytest.mark.full
def test_what_a_killed_process_started_is_adopted_by_the_next(serve: Serve) -> None:
    dev = serve(attempt_1={"steps": 150, "step_seconds": 0.05})
    dev.apply()
    dev.wait_for_step(3)
    wait_until(lambda: dev.job()["status"].get("backendRef"), PROMPT_SECONDS)
    wait_until(
        lambda: "backendRef" in (dev.folder / "runs/.dev/state.json").read_text(), PROMPT_SECONDS
    )
    assert dev.end(signal.SIGKILL) == -signal.SIGKILL
    done = serve().wait_for("Succeeded")
    assert attempts_of(done) == [(1, None)]
    assert starts(dev.folder) == [(1, 0)]


@pytest.mark.full
def test_a_job_applied_again_after_its_deletion_starts_anew(serve: Serve, folder: Path) -> None:
    dev = serve(attempt_1=ENDLESS)
    dev.apply()
    dev.wait_for_step(3)
    [first] = (run_dir(folder) / "starts.txt").read_text().splitlines()
    dev.api.delete("default")
    wait_until(lambda: dev.api.job("default") is None, PROMPT_SECONDS)
    assert not is_running(int(first.split()[2]))
    dev.apply()
    wait_until((run_dir(folder).with_name("tiny.1") / "checkpoints").is_dir, PROMPT_SECONDS)
    dev.wait_for_step(1)
    assert attempts_of(dev.job()) == [(1, None)]


@pytest.mark.full
def test_a_job_that_takes_over_goes_on_with_what_the_deleted_one_of_its_name_wrote(
    serve: Serve, folder: Path
) -> None:
    dev = serve(attempt_1=ENDLESS | {"save_every": 1})
    dev.apply()
    dev.wait_for_step(3)
    dev.api.delete("default")
    wait_until(lambda: dev.api.job("default") is None, PROMPT_SECONDS)
    dev.apply(takeOver=True)
    wait_until((run_dir(folder) / "attempts.1" / "1").is_dir, PROMPT_SECONDS)
    dev.wait_for_step(4)
    told = json.loads((run_dir(folder) / "progress.json").read_text())
    assert told["attempt"] == 1
    assert told["resumedStep"] >= 3


@pytest.mark.full
def test_a_folder_in_use_by_ftctl_run_is_named_and_left_alone(serve: Serve, folder: Path) -> None:
    dev = serve(attempt_1={"steps": 1})
    with RunFolder(run_dir(folder)) as theirs:
        theirs.save(model_of())
        dev.apply()
        wait_until(lambda: condition(dev.job(), "Stalled")["status"] == "True", PROMPT_SECONDS)
        message = condition(dev.job(), "Stalled")["message"]
        assert f"{run_dir(folder)} is in use by process {os.getpid()}" in message
        assert message.endswith(f"ftctl logs -f {run_dir(folder)}")
        dev.api.delete("default")
        wait_until(lambda: dev.api.job("default") is None, PROMPT_SECONDS)
    dev.apply()
    dev.wait_for("Succeeded")


@pytest.mark.full
def test_ctrl_c_waits_for_no_attempt_that_could_not_be_created(serve: Serve, folder: Path) -> None:
    dev = serve()
    with RunFolder(run_dir(folder)) as theirs:
        theirs.save(model_of())
        dev.apply()
        wait_until(lambda: condition(dev.job(), "Stalled")["status"] == "True", PROMPT_SECONDS)
        assert dev.end(signal.SIGINT) == 0
    again = serve(attempt_1={"steps": 1})
    again.wait_for("Succeeded")


@pytest.mark.full
def test_a_missing_model_is_told_with_where_it_was_looked_for(serve: Serve, folder: Path) -> None:
    dev = serve()
    dev.apply(model__source="file://./nowhere")
    wait_until(lambda: condition(dev.job(), "Accepted")["status"] == "False", PROMPT_SECONDS)
    sentence = f"spec.model.source file://./nowhere: {folder}/nowhere does not exist"
    assert sentence in condition(dev.job(), "Accepted")["message"]
    assert dev.end(signal.SIGTERM) == 0


def test_a_backend_that_needs_a_cluster_is_refused_by_its_name(serve: Serve) -> None:
    dev = serve()
    hub = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
    dev.apply(backend__type="kubernetes", **hub)
    wait_until(lambda: condition(dev.job(), "Accepted")["status"] == "False", PROMPT_SECONDS)
    sentence = "spec.backend.type kubernetes does not run here (available: local, azureml); use an "
    assert sentence in condition(dev.job(), "Accepted")["message"]


@pytest.mark.full
def test_a_second_process_is_told_of_the_first(serve: Serve, folder: Path) -> None:
    dev = serve()
    refused = ftctl("dev", folder=folder)
    assert refused.returncode == 1
    assert f"{folder} is served by process {dev.process.pid}" in refused.stderr


@pytest.mark.parametrize("options", [[], ["--fresh"], ["--plain", "--fresh"]], ids=str)
def test_a_job_is_run_by_another_command(folder: Path, options: list[str]) -> None:
    refused = ftctl("dev", "--run", "a job.yaml", *options, folder=folder)
    assert refused.returncode == 2
    said = " ".join(refused.stderr.replace("│", " ").split())
    assert f"use: ftctl run 'a job.yaml'{' --fresh' * ('--fresh' in options)}" in said
    assert not (folder / "runs").exists()


@pytest.mark.full
def test_what_keeps_it_from_starting_is_one_sentence(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = ftctl("dev", "--port", port, folder=folder)
    expected = f"--port {port} cannot be used (Address already in use); choose another"
    assert refused.stderr.startswith(expected)
    (folder / "runs" / ".dev" / "state.json").write_text("{")
    damaged = ftctl("dev", folder=folder)
    assert re.match(
        r"\S+/runs/.dev/state.json holds no objects of an .*; move it away", damaged.stderr
    )
    (folder / "file").mkdir()
    (folder / "file" / "runs").write_text("")
    refused = ftctl("dev", "file", folder=folder)
    assert "runs/.dev cannot be written (Not a directory)" in refused.stderr
    assert len(damaged.stderr.splitlines()) == len(refused.stderr.splitlines()) == 1
