"""`ftctl doctor --bundle`: contents and redaction of the archive, in a cluster and on this machine.

The cluster is the embedded API server, which here also serves the logs of pods.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from finetune_operator.cli.app import app
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import (
    EVENTS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    PODS,
    SECRETS,
    Object,
)
from support.api.builders import manifest
from support.cluster.faults import Fault, FaultyApi
from support.cluster.operators import Api
from support.kernel.loop_thread import loop_thread

HUB = "hf_" + "abcdefghijklmnopqrstuvwx"
SAS = "https://account.blob.core.windows.net/c/f?sv=2022&sp=r&sig=abc%2Bdef%3D"
HEADER = "Authorization: Bearer " + "abcdefghijklmnop.qrst-uv"
PASSWORD = "mongodb://admin:s3cr3t-word@db.test/a"
PLANTED = f"get {SAS}: 403\n{HUB}\n{HEADER}\n{PASSWORD}\n\x1b[32m{HUB} /home/alice/x of alice"
SECRET_PARTS = (
    *(HUB, "abc%2Bdef", "abcdefghijklmnop.qrst", "s3cr3t-word", "alice"),
    *("env-value", "secret-value", "a row of data", "annotated"),
)
UID_OF_OTHER = "11111111-2222-3333-4444-555555555555"


class LogApi(FaultyApi):
    """An embedded API server with logs of pods by `POD/CONTAINER`; operators have one container."""

    logs: Mapping[str, str]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if not path.endswith("/log"):
            return await super()._handle(request)
        name = f"{path.split('/')[-2]}/{request.query.get('container', '')}"
        lines = self.logs[name].splitlines()[-int(request.query["tailLines"]) :]
        return web.Response(text="".join(f"{line}\n" for line in lines))


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    returncode: int
    stdout: str
    stderr: str


class Cluster:
    """The API server, and a home folder of the user `alice`."""

    def __init__(self, server: LogApi, api: Api, folder: Path) -> None:
        self.server, self.api, self.folder = server, api, folder

    def doctor(self, *arguments: str) -> Done:
        return doctor(self.folder, *arguments, kubeconfig=self.api.kubeconfig)

    def put(self, kind: Any, namespace: str | None, body: Object) -> Object:
        status = body.pop("status", None)
        stored = self.api.run(self.api.client.create(kind, body, namespace))
        if status is not None:
            change = {"status": status}
            name = stored["metadata"]["name"]
            stored = self.api.run(
                self.api.client.patch(kind, name, namespace, change, subresource="status")
            )
        return stored


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    server = LogApi(())
    server.logs = {}
    with loop_thread() as loop:
        loop.run(server.__aenter__())
        file = tmp_path / "kubeconfig.json"
        file.write_text(json.dumps(server.kubeconfig()))
        api = Api(str(file))
        api.install_crds()
        try:
            yield Cluster(server, api, tmp_path)
        finally:
            api.close()
            loop.run(server.__aexit__(None, None, None))


def doctor(folder: Path, *arguments: str, kubeconfig: str = "/nowhere") -> Done:
    """Run `ftctl doctor` in a folder, in this process."""
    home = folder / "home" / "alice"
    home.mkdir(parents=True, exist_ok=True)
    environ = {"HOME": str(home), "USER": "alice", "LOGNAME": "alice", "KUBECONFIG": kubeconfig}
    with chdir(folder):
        result = CliRunner().invoke(app, ["doctor", *arguments], env=environ)
    if isinstance(result.exception, FineTuneError):  # `main` prints it
        return Done(1, result.stdout, str(result.exception))
    return Done(result.exit_code, result.stdout, result.stderr)


def texts_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("bundle/")] = file.read().decode()
    return found


def put_job(cluster: Cluster) -> Object:
    """Have a failed job of one pod, with secrets in every text, and another job beside it."""
    backend = {"type": "kubernetes", "kubernetes": {"profile": "gpus"}}
    body = manifest(
        name="tiny",
        model__source="hf://a/b",
        dataset__source="hf://a/c",
        backend=backend,
        observability__sample_prompts=["a row of data"],
    )
    body["metadata"] |= {"annotations": {"note": "annotated"}}
    body["status"] = {
        "phase": "Failed",
        "attempt": 1,
        "attempts": [{"number": 1, "failureClass": "Error", "message": PLANTED}],
    }
    job = cluster.put(FINE_TUNE_JOBS, "default", body)
    env = {"PLAIN": "env-value"}
    spec = {"image": "r.test/trainer:1", "env": env, "allow": {"namespaces": ["*"]}}
    cluster.put(FINE_TUNE_PROFILES, None, {"metadata": {"name": "gpus"}, "spec": spec})
    cluster.put(
        SECRETS, "default", {"metadata": {"name": "hub"}, "stringData": {"token": "secret-value"}}
    )
    labels = {JOB_UID_LABEL: job["metadata"]["uid"]}
    tail = {"finetune.dev/last-lines": f"stored\n{PLANTED}", "finetune.dev/config": "annotated"}
    metadata = {"name": "tiny-1", "labels": labels, "annotations": tail}
    cluster.put(JOBS, "default", {"metadata": metadata, "spec": {"parallelism": 1}})
    container = {"name": "trainer", "image": "x", "env": [{"name": "A", "value": "env-value"}]}
    terminated = {"exitCode": 1, "message": PLANTED}
    state = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{**state, "state": {"terminated": terminated}}],
    }
    pod = {"metadata": {"name": "tiny-1-0-abcde", "labels": labels}, "status": status}
    cluster.put(PODS, "default", {**pod, "spec": {"nodeName": "n1", "containers": [container]}})
    subjects = {
        "own": {"kind": "FineTuneJob", "name": "tiny", "uid": job["metadata"]["uid"]},
        "gone": {"kind": "Pod", "name": "tiny-1-0-zzzzz", "uid": "1"},
        "other": {"kind": "FineTuneJob", "name": "tiny-2", "uid": UID_OF_OTHER},
    }
    for name, subject in subjects.items():
        event = {"metadata": {"name": name}, "involvedObject": subject, "reason": name}
        cluster.put(EVENTS, "default", {**event, "message": PLANTED, "type": "Warning"})
    operator = {"name": "op", "labels": {"app.kubernetes.io/name": "finetune-operator"}}
    cluster.put(PODS, "default", {"metadata": operator, "spec": {"containers": [container]}})
    escaped = json.dumps({"message": PLANTED, "job": "default/tiny"})
    cluster.server.logs = {
        "tiny-1-0-abcde/trainer": "\n".join([*map(str, range(300)), PLANTED, repr(PLANTED)]),
        "op/": f"{escaped}\njob=default/tinyother\njob=default/tiny submitted",
    }
    return job


def test_a_bundle_has_the_job_of_a_cluster_without_a_secret(cluster: Cluster) -> None:
    put_job(cluster)
    done = cluster.doctor("tiny", "--cluster", "-n", "default", "--bundle", "out.tar.gz")
    assert done.returncode == 0, done.stderr
    texts = texts_of(cluster.folder / "out.tar.gz")
    assert sorted(texts) == [
        "CONTENTS.md",
        "batch-jobs.yaml",
        "doctor/cluster.txt",
        "doctor/machine.txt",
        "events.yaml",
        "job.yaml",
        "logs/tiny-1-0-abcde/trainer.log",
        "logs/tiny-1.last-lines.log",
        "operator/op.log",
        "pods.yaml",
        "profile.yaml",
    ]
    leaked = [(name, part) for name, text in texts.items() for part in SECRET_PARTS if part in text]
    assert leaked == []

    job = yaml.safe_load(texts["job.yaml"])
    assert job["spec"]["model"]["source"] == "hf://a/b"
    assert job["status"]["attempts"][0]["failureClass"] == "Error"
    profile = yaml.safe_load(texts["profile.yaml"])
    assert profile["spec"]["env"] == [{"name": "PLAIN", "value": "…"}]
    pod = yaml.safe_load(texts["pods.yaml"])
    assert pod["spec"] == {"nodeName": "n1"}
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1
    events = [one["reason"] for one in yaml.safe_load_all(texts["events.yaml"])]
    assert sorted(events) == ["gone", "own"]
    log = texts["logs/tiny-1-0-abcde/trainer.log"].splitlines()
    assert len(log) == 200
    assert "299" in log
    assert "get https://account.blob.core.windows.net/c/f 403" in log
    assert "job=default/tiny submitted" in texts["operator/op.log"]
    assert "tinyother" not in texts["operator/op.log"]


def test_the_contents_and_the_command_name_the_files_and_their_absence(cluster: Cluster) -> None:
    put_job(cluster)
    cluster.server.add(Fault(status=403, resources=["pods"]))
    done = cluster.doctor("tiny", "--cluster", "--bundle", ".")
    assert done.returncode == 0, done.stderr
    (path,) = cluster.folder.glob("ftctl-tiny-*Z.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    texts = texts_of(path)
    assert "pods.yaml" not in texts
    for text in (done.stdout, texts["CONTENTS.md"]):
        assert "- pods: you may not read it" in text
        assert "- the operator's log: you may not read it" in text
        assert "values of environment variables" in text
    assert "Look through the files before you send them" in done.stdout
    for name, text in texts.items():
        assert name == "CONTENTS.md" or (
            f"| {name} | {len(text.encode())} |" in texts["CONTENTS.md"]
        )
    assert "ftctl" in texts["doctor/machine.txt"]
    assert "FineTuneJob" in yaml.safe_load(texts["job.yaml"])["kind"]


def test_a_job_without_a_log_names_the_reason(cluster: Cluster) -> None:
    backend = {"type": "azureml", "azureml": {"profile": "absent"}}
    source = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
    cluster.put(FINE_TUNE_JOBS, "default", manifest(name="tiny", backend=backend, **source))
    done = cluster.doctor("tiny", "--cluster", "--bundle", "out.tar.gz")
    assert done.returncode == 0, done.stderr
    assert "- logs/rank-0.log: cannot be read (no log of FineTuneJob default/tiny" in done.stdout
    assert "profile.yaml" not in texts_of(cluster.folder / "out.tar.gz")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        pytest.param(["other", "--cluster"], 1, "has no FineTuneJob default/other", id="unknown"),
        pytest.param(["other"], 1, "no run of a job called other", id="no local run"),
        pytest.param(["other", "--json"], 2, "--bundle excludes", id="JSON"),
        pytest.param(["--azureml"], 2, "--bundle excludes", id="Azure ML"),
    ],
)
def test_a_refused_bundle_leaves_no_file(
    cluster: Cluster, arguments: list[str], code: int, sentence: str
) -> None:
    done = cluster.doctor(*arguments, "--bundle", "out.tar.gz")
    assert sentence in done.stderr
    assert done.returncode == code
    assert not (cluster.folder / "out.tar.gz").exists()


def test_an_existing_file_is_not_overwritten_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.tar.gz").write_text("mine")
    done = doctor(tmp_path, "--bundle", "out.tar.gz")
    assert done.stderr.strip() == "--bundle out.tar.gz exists; name a new file or a folder"
    assert done.returncode == 1
    assert (tmp_path / "out.tar.gz").read_text() == "mine"

    done = doctor(tmp_path, "--bundle", "absent/out.tar.gz")
    assert "--bundle absent/out.tar.gz cannot be created (No such file" in done.stderr
    assert done.returncode == 1


def run_directory(folder: Path) -> Path:
    """Write the run directory of a job that failed in its second attempt."""
    run = folder / "runs" / "default" / "tiny"
    job = manifest(status={"phase": "Failed", "attempt": 2}, training__max_steps=3)
    sample = {"event": "answered", "attempt": 2, "prompt": "a row of data", "after": "x"}
    journal = [{"event": "step", "attempt": 2, "step": one} for one in range(250)]
    journal.append({"event": "warning", "attempt": 2, "message": PLANTED})
    files = {
        "job.json": json.dumps(job),
        "progress.json": json.dumps({"step": 2, "samples": [{"prompt": "a row of data"}]}),
        "operator.log": f"attempt 1 submitted from {folder}/home/alice/project\n{PLANTED}\n",
        "attempts/2/config.json": json.dumps({"key": "secret-value"}),
        "attempts/2/node-0.log": "x" * 400_000 + f"\nTraceback: {PLANTED!r}\n",
        "attempts/2/node-0.termination.json": json.dumps({"exitCode": 1, "message": PLANTED}),
        "logs/attempt-1.1/rank-0.jsonl": "",
        "logs/attempt-2.1/rank-0.jsonl": "".join(
            f"{json.dumps(one)}\n" for one in (*journal, sample)
        ),
    }
    for name, text in files.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return run


@pytest.mark.parametrize("name", ["tiny", "runs/default/tiny"])
def test_a_bundle_has_the_files_of_a_local_job(tmp_path: Path, name: str) -> None:
    run_directory(tmp_path)
    done = doctor(tmp_path, name, "--bundle", "out.tar.gz")
    assert done.returncode == 0, done.stderr
    texts = texts_of(tmp_path / "out.tar.gz")
    assert sorted(texts) == [
        "CONTENTS.md",
        "attempts/2/node-0.log",
        "attempts/2/node-0.termination.yaml",
        "doctor/machine.txt",
        "job.yaml",
        "logs/attempt-1.1/rank-0.jsonl",
        "logs/attempt-2.1/rank-0.jsonl",
        "operator.log",
        "progress.yaml",
    ]
    leaked = [(file, part) for file, text in texts.items() for part in SECRET_PARTS if part in text]
    assert leaked == []
    assert yaml.safe_load(texts["job.yaml"])["spec"]["training"]["maxSteps"] == 3
    journal = [json.loads(one) for one in texts["logs/attempt-2.1/rank-0.jsonl"].splitlines()]
    assert [one.get("step") for one in journal] == [*range(51, 250), None]
    assert texts["attempts/2/node-0.log"].startswith("Traceback: ")
    assert "submitted from ~/project" in texts["operator.log"]


def test_a_damaged_job_is_named_and_the_logs_remain(tmp_path: Path) -> None:
    run = run_directory(tmp_path)
    (run / "job.json").write_text("{")
    done = doctor(tmp_path, "runs/default/tiny", "--bundle", "out.tar.gz")
    assert done.returncode == 0, done.stderr
    assert "- job.json: cannot be read (Expecting property name" in done.stdout
    assert "operator.log" in texts_of(tmp_path / "out.tar.gz")


def test_a_full_disk_is_named_and_has_no_part_of_the_bundle(small_disk: Path) -> None:
    with suppress(OSError), (small_disk / "full").open("wb") as file:
        file.write(bytes(8 * 1024 * 1024))
    done = doctor(small_disk, "--bundle", "out.tar.gz")
    assert done.stderr.strip().splitlines()[-1] == (
        "--bundle out.tar.gz cannot be written (No space left on device); "
        "name a file on another disk"
    )
    assert done.returncode == 1
    assert not (small_disk / "out.tar.gz").exists()
