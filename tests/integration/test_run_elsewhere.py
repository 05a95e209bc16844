"""`ftctl run`, `ftctl logs` and `ftctl dev` of a job whose backend is a plugin."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import manifest
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from local_runs import is_running, kill_what_runs_below, starts, write_inputs
from operators import Api, wait_until
from plugin_elsewhere import install

FTCTL = [sys.executable, "-m", "finetune_operator"]
ENDLESS = {"steps": 100_000, "step_seconds": 0.02, "save_every": 50}
PATIENCE_SECONDS = 60.0
STARTS = "runs/default/tiny/starts.txt"


class Project:
    """A folder with the manifest of a job for the plugin."""

    def __init__(
        self, folder: Path, backend: str = "elsewhere", play: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self._backend = backend
        write_inputs(folder)
        self.write_job()
        plays = json.dumps({"*": play or {}})
        self._environ = {
            **os.environ,
            "PYTHONPATH": install(folder),
            "FINETUNE_STAND_IN": plays,
        }

    def job(self, **spec: Any) -> dict[str, Any]:
        return manifest(name="tiny", backend={"type": self._backend}, **spec)

    def write_job(self, **spec: Any) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(self.job(**spec)))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*FTCTL, *arguments],
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, said


def test_a_job_runs_on_a_plugin_and_its_log_is_read_there(tmp_path: Path) -> None:
    project = Project(tmp_path)
    code, said = project.call("run", "job.yaml")
    assert code == 0, said
    assert f"file://{tmp_path}/runs/default/tiny/output" in said
    assert starts(tmp_path) == [(1, 0)]
    code, said = project.call("logs", "job.yaml")
    assert code == 0, said
    assert "node 0 of attempt 1 starts at step 0" in said


@pytest.mark.parametrize("is_deaf", [False, True])
def test_ctrl_c_once_saves_and_twice_kills(tmp_path: Path, is_deaf: bool) -> None:
    project = Project(tmp_path, play={**ENDLESS, "is_deaf": is_deaf})
    with project.start("run", "job.yaml") as process:
        try:
            wait_until(lambda: starts(tmp_path) != [], PATIENCE_SECONDS)
            pid = int((tmp_path / STARTS).read_text().split()[2])
            for number in range(1 + is_deaf):
                process.send_signal(signal.SIGINT)
                log = tmp_path / "runs/default/tiny/attempts/1/cancel.json"
                wait_until(log.exists, PATIENCE_SECONDS, f"Ctrl-C {number}")
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            kill_what_runs_below(tmp_path)
    assert process.returncode == 130, said
    assert not is_running(pid)
    assert ("killing it now" in said) == is_deaf


def test_ctrl_c_leaves_a_job_running_that_a_service_runs(tmp_path: Path) -> None:
    project = Project(tmp_path, "service", ENDLESS)
    try:
        for _ in range(2):
            with project.start("run", "job.yaml") as process:
                assert process.stdout is not None
                said = process.stdout.readline()
                while "Training" not in said:
                    said = process.stdout.readline()
                process.send_signal(signal.SIGINT)
                said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 130, said
            assert "tiny goes on: " in said
            assert "Follow it again: ftctl run job.yaml" in said
            assert is_running(int((tmp_path / STARTS).read_text().split()[2]))
        project.write_job(suspend=True)
        code, said = project.call("run", "job.yaml")
        assert code == 130, said
        assert "Stopped" in said
        assert not is_running(int((tmp_path / STARTS).read_text().split()[2]))
        assert starts(tmp_path) == [(1, 0)]
    finally:
        kill_what_runs_below(tmp_path)


def wait_until_running(api: Api) -> None:
    wait_until(lambda: api.phase("default", "tiny") == "Running", PATIENCE_SECONDS)


def test_the_end_of_ftctl_dev_leaves_jobs_of_a_service_to_the_next_start(tmp_path: Path) -> None:
    project = Project(tmp_path, "service", ENDLESS)
    try:
        for number in range(2):
            with project.start("dev", "--port", "0") as process:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("export KUBECONFIG=")
                api = Api(f"{tmp_path}/runs/.dev/kubeconfig")
                if not number:
                    api.run(api.client.create(FINE_TUNE_JOBS, project.job(), "default"))
                wait_until_running(api)
                api.close()
                process.send_signal(signal.SIGINT)
                said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, said
            assert "left running, and found by the next start: default/tiny" in said
            assert is_running(int((tmp_path / STARTS).read_text().split()[2]))
        assert starts(tmp_path) == [(1, 0)]
    finally:
        kill_what_runs_below(tmp_path)


def test_ftctl_dev_serves_it_too(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with project.start("dev", "--port", "0") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("export KUBECONFIG=")
            api = Api(f"{tmp_path}/runs/.dev/kubeconfig")
            api.run(api.client.create(FINE_TUNE_JOBS, project.job(), "default"))
            wait_until(lambda: api.phase("default", "tiny") == "Succeeded", PATIENCE_SECONDS)
            api.close()
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            kill_what_runs_below(tmp_path)
    assert process.returncode == 0, said
