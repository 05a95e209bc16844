"""`ftctl run`, `ftctl logs` and `ftctl dev` of a job whose backend is a plugin."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.resources import FINE_TUNE_JOBS
from support.api.builders import manifest
from support.cluster.operators import Api, wait_until
from support.local.local_runs import is_running, kill_what_runs_below, starts, write_inputs
from support.local.plugin_elsewhere import install

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
            "PYTHONPATH": ":".join(filter(None, [install(folder), os.getenv("PYTHONPATH")])),
            "FINETUNE_STAND_IN": plays,
        }

    def job(self, **spec: Any) -> dict[str, Any]:
        return manifest(name="tiny", backend={"type": self._backend}, **spec)

    def write_job(self, **spec: Any) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(self.job(**spec)))

    def set(self, **variables: str) -> None:
        """Set variables of later commands."""
        self._environ |= variables

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
        with self.start(*arguments) as process:
            try:
                said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            finally:
                process.kill()
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


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """Return the line with these words, and those before it; a job that runs says one each 5 s."""
    assert process.stdout is not None
    said, end = "", time.monotonic() + PATIENCE_SECONDS
    for line in process.stdout:
        said += line
        if words in line:
            return said
        if time.monotonic() > end:
            break
    process.kill()
    raise AssertionError(f"no {words!r} in:\n{said}")


@contextmanager
def left_running(project: Project) -> Iterator[int]:
    """Have attempt 1 of the job of a service run, with nobody who follows it; yield its process."""
    try:
        with project.start("run", "job.yaml") as process:
            read_until(process, "  Training")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_SECONDS)
        yield int((project.folder / STARTS).read_text().split()[2])
    finally:
        kill_what_runs_below(project.folder)


def uid_in(run_dir: Path) -> str:
    return str(json.loads((run_dir / "job.json").read_text())["metadata"]["uid"])


def run_afresh(project: Project) -> str:
    """Return what is said until the new run trains, which is then left running."""
    with project.start("run", "job.yaml", "--fresh") as process:
        said = read_until(process, "  Training")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_SECONDS)
    return said


@pytest.mark.full
def test_fresh_first_ends_what_a_service_still_runs(tmp_path: Path) -> None:
    project, run_dir = Project(tmp_path, "service", ENDLESS), tmp_path / "runs/default/tiny"
    with left_running(project) as pid:
        uid = uid_in(run_dir)
        said = run_afresh(project)
        assert not is_running(pid)
        assert f"ending attempt 1 of the earlier run (file://{run_dir}) first" in said
        assert f"moved the old run to {run_dir}.1" in said
        assert uid_in(run_dir.with_name("tiny.1")) == uid
        assert uid_in(run_dir) != uid
        assert starts(tmp_path) == [(1, 0)]


@pytest.mark.full
def test_fresh_is_refused_while_the_service_is_silent(tmp_path: Path) -> None:
    project, run_dir = Project(tmp_path, "service", ENDLESS), tmp_path / "runs/default/tiny"
    with left_running(project) as pid:
        uid = uid_in(run_dir)
        (tmp_path / "silent").touch()
        code, said = project.call("run", "job.yaml", "--fresh")
        assert code == 1, said
        assert "--fresh starts no new run while attempt 1 of the earlier run" in said
        assert f"(file://{run_dir}) may run: " in said
        assert "the service does not answer; end it there and run this again, or" in said
        assert len(said.splitlines()) == 2, said
        assert "reconcile failed" in (run_dir / "operator.log").read_text()
        assert is_running(pid)
        assert uid_in(run_dir) == uid
        (tmp_path / "silent").unlink()
        run_afresh(project)
        assert not is_running(pid)
        assert uid_in(run_dir.with_name("tiny.1")) == uid


@pytest.mark.full
def test_fresh_is_refused_where_the_service_ends_nothing_in_time(tmp_path: Path) -> None:
    project, run_dir = Project(tmp_path, "service", ENDLESS), tmp_path / "runs/default/tiny"
    with left_running(project) as pid:
        uid = uid_in(run_dir)
        (tmp_path / "deaf").touch()
        code, said = project.call("run", "job.yaml", "--fresh")
        assert code == 1, said
        assert re.search(
            r"may run: it has not ended within 2\ds; end it there and run this again", said
        )
        assert is_running(pid)
        assert uid_in(run_dir) == uid


@pytest.mark.full
def test_ctrl_c_leaves_what_fresh_waits_for(tmp_path: Path) -> None:
    project, run_dir = Project(tmp_path, "service", ENDLESS), tmp_path / "runs/default/tiny"
    with left_running(project) as pid:
        uid = uid_in(run_dir)
        (tmp_path / "deaf").touch()
        with project.start("run", "job.yaml", "--fresh") as process:
            read_until(process, "ending attempt 1")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 130, said
        assert f"left attempt 1 of the earlier run (file://{run_dir}) as it is" in said
        assert "Resume it: ftctl run job.yaml\n" in said
        assert is_running(pid)
        assert uid_in(run_dir) == uid
        assert not run_dir.with_name("tiny.1").exists()


@pytest.mark.full
def test_a_job_of_a_service_says_from_which_checkpoint_it_goes_on(tmp_path: Path) -> None:
    project = Project(tmp_path, "service", ENDLESS)
    with left_running(project):
        project.write_job(suspend=True)
        code, said = project.call("run", "job.yaml")
        assert code == 130, said
        found = re.search(r"the checkpoint of step \d+ is saved", said)
        assert found, said
        kept = found[0].removesuffix(" is saved")
        # As where they are in a datastore.
        (tmp_path / "runs/default/tiny/checkpoints").rename(tmp_path / "datastore")
        project.write_job()
        with project.start("run", "job.yaml") as process:
            said = read_until(process, "resuming with")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_SECONDS)
        assert f"resuming with attempt 2, from {kept}\n" in said


@pytest.mark.full
def test_a_job_of_a_service_that_told_of_no_checkpoint_may_have_one(tmp_path: Path) -> None:
    project = Project(tmp_path, "service", {"fail_at": 2, "exit_code": 65})
    code, said = project.call("run", "job.yaml")
    assert code == 1, said
    code, said = project.call("run", "job.yaml")
    assert code == 1, said
    start = "from its newest checkpoint, or from the first step if there is none"
    assert f"resuming with attempt 2, {start}\n" in said
    project.write_job(suspend=True)
    code, said = project.call("run", "job.yaml")
    assert code == 130, said
    assert "no checkpoint is known" in said


@pytest.mark.full
def test_ctrl_c_leaves_a_job_running_that_a_service_runs(tmp_path: Path) -> None:
    project = Project(tmp_path, "service", ENDLESS)
    try:
        for _ in range(2):
            with project.start("run", "job.yaml") as process:
                read_until(process, "  Training")
                process.send_signal(signal.SIGINT)
                said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 130, said
            assert "tiny continues: " in said
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


@pytest.mark.full
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
            assert "left running; the next start finds them: default/tiny" in said
            assert is_running(int((tmp_path / STARTS).read_text().split()[2]))
        assert starts(tmp_path) == [(1, 0)]
    finally:
        kill_what_runs_below(tmp_path)


@pytest.mark.full
def test_logs_of_a_waiting_job_give_its_reason_and_follow_waits_for_it(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with project.start("dev", "--port", "0") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("export KUBECONFIG=")
            kubeconfig = f"{tmp_path}/runs/.dev/kubeconfig"
            api = Api(kubeconfig)
            api.run(api.client.create(FINE_TUNE_JOBS, project.job(suspend=True), "default"))
            wait_until(lambda: api.phase("default", "tiny") == "Suspended", PATIENCE_SECONDS)
            project.set(KUBECONFIG=kubeconfig)
            reason = (
                "no log of FineTuneJob default/tiny: it has no attempt yet; the job is Suspended "
                "(SuspendedByUser): "
            )
            code, output = project.call("logs", "tiny", "-n", "default")
            assert (code, len(output.splitlines())) == (1, 1), output
            assert output.startswith(reason)
            with project.start("logs", "tiny", "-n", "default", "-f") as followed:
                assert followed.stdout is not None
                assert followed.stdout.readline().startswith(reason)
                resume = {"spec": {"suspend": False}}
                api.run(api.client.patch(FINE_TUNE_JOBS, "tiny", "default", resume))
                output, _ = followed.communicate(timeout=PATIENCE_SECONDS)
            assert followed.returncode == 0, output
            assert "node 0 of attempt 1 starts at step 0" in output
            api.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_SECONDS)
            kill_what_runs_below(tmp_path)


@pytest.mark.full
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
