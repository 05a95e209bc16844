"""A run on Azure ML and its workspace, through the real plugin for MLflow: curves, tags, a stop."""

import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

from azureml_service import WORKSPACE, SeenJob, ServiceClient, running_service
from finetune_trainer.config import (
    ENV_TRAIN_CONFIG,
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    Heard,
    Phase,
    Progress,
    Termination,
    pack,
)
from support.azureml.azureml_nodes import ENTRY, STAND_IN, start_node
from support.launch.journals import journal_in
from support.launch.launches import train_config, until
from support.launch.tiny_run import write_inputs

pytest.importorskip("azure.identity", reason="needs the extra azureml")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of marshmallow, by the SDK
    pytest.mark.filterwarnings("ignore:.*experimental"),
]

STOP = '{"until":"2026-11-23T16:00:00Z"}'
TROUBLE = "Azure ML does not accept the reports of this run"
OVER = "Azure ML accepts the reports of this run again"
STEPS = 12
WHOLE, UNHEARD, SILENT = "whole", "unheard", "silent"
Submit = Callable[..., str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder, runs_jobs=True) as made:
        write_inputs(made.datastore("rows"))
        yield made


@pytest.fixture(scope="module")
def submit(service: ServiceClient) -> Iterator[Submit]:
    """Submit a run of two ranks, or another command, and return its name."""
    from azure.ai.ml import MLClient, load_job
    from azure.identity import WorkloadIdentityCredential

    def submit(
        name: str,
        nodes: int = 1,
        stand_in: str | None = None,
        command: str | None = None,
        **changes: Any,
    ) -> str:
        job = job_of(name, nodes, stand_in, changes)
        job["command"] = command or job["command"]
        client.jobs.create_or_update(load_job(io.StringIO(yaml.safe_dump(job))))
        return name

    with pytest.MonkeyPatch.context() as patch:
        for name, value in service.environ().items():
            patch.setenv(name, value)
        _, _, subscription, _, group, *_, workspace = WORKSPACE.split("/")
        credential = WorkloadIdentityCredential(disable_instance_discovery=True)
        client = MLClient(credential, subscription, group, workspace, enable_telemetry=False)
        yield submit


@pytest.fixture(scope="module")
def begun(service: ServiceClient, submit: Submit) -> None:
    """Start the runs of three tests together, as most of each is waiting."""
    for name in (UNHEARD, SILENT):
        service.fault("mlflow.*", name=name, delay=float("inf"))
    submit(WHOLE)
    submit(UNHEARD, stand_in="finish")
    submit(SILENT, stand_in="train")


def job_of(
    name: str, nodes: int, stand_in: str | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a job that reads the datastore `rows`, and writes into its folder `NAME`."""
    config = train_config(
        Path("/none"),
        **{
            "job": {"name": name, "uid": name},
            "world": {"nnodes": nodes, "nproc_per_node": 2 // nodes},
            "model": {"path": "mount://rows/model"},
            "data": {
                "train": {"path": "mount://rows/train.jsonl"},
                "eval": {"path": "mount://rows/eval.jsonl"},
                "max_seq_len": 64,
                "cache_dir": "mount://scratch/cache",
            },
            "method": {"type": "lora", "lora": {"r": 4}},
            "output": {"format": "adapter", "dir": "mount://output/adapter"},
            "training": {"max_steps": STEPS, "eval_every_steps": STEPS // 2},
            "checkpoint": {"dir": "mount://output/checkpoints", "every_steps": 4},
            "run_dir": "mount://output/run",
            "termination_path": "mount://scratch/termination.json",
            "listing_lag_seconds": 0,
            **changes,
        },
    )
    entry = ["-P", STAND_IN] if stand_in else [*ENTRY]
    placed = ["rows=${{inputs.rows}}", "output=${{outputs.output}}"]
    job: dict[str, Any] = {
        "type": "command",
        "name": name,
        "command": " ".join(
            ["python", *map(shlex.quote, entry), *placed, *([stand_in] if stand_in else [])]
        ),
        "environment": "azureml:trainer:1",
        "compute": "azureml:cpu-cluster",
        "environment_variables": {
            ENV_TRAIN_CONFIG: pack(config),
            "PYTHONPATH": str(Path(STAND_IN).parents[2]),
        },
        "inputs": {
            "rows": {"type": "uri_folder", "path": "azureml://datastores/rows/paths/"},
        },
        "outputs": {
            "output": {
                "type": "uri_folder",
                "path": f"azureml://datastores/rows/paths/{name}",
                "mode": "rw_mount",
            },
        },
        "resources": {"instance_count": nodes},
    }
    if nodes > 1:
        job["distribution"] = {"type": "pytorch", "process_count_per_instance": 1}
    return job


def ended(service: ServiceClient, name: str) -> SeenJob:
    """Return a job that has ended."""
    until(lambda: service.job(name).state in ("Completed", "Failed", "Canceled"))
    return service.job(name)


def last_words(job: SeenJob) -> list[Termination]:
    """Return the last line of each node's log."""
    return [Termination.model_validate_json(log.splitlines()[-1]) for log in job.logs.values()]


def journal(service: ServiceClient, name: str) -> list[dict[str, Any]]:
    """Return what rank 0 of a run has written so far."""
    return journal_in(service.datastore("rows", name) / "run")


def steps(service: ServiceClient, name: str) -> int:
    """Return how many steps a run has made so far."""
    return max((one["step"] for one in journal(service, name) if one["event"] == "step"), default=0)


def own_requests(service: ServiceClient, name: str) -> list[str]:
    """Return the kinds of the requests that a run has made itself."""
    own = ("mlflow.", "run.")
    return [one.kind for one in service.requests() if one.name == name and one.kind.startswith(own)]


def is_connected(process: psutil.Process, service: ServiceClient) -> bool:
    """Whether a process has a connection to the service now."""
    port = urlsplit(service.environ()["AZUREML_DEV_URL_MFE"]).port
    remote = [one.raddr for one in process.net_connections("tcp")]
    return port in {address.port for address in remote if address}


@pytest.mark.full
@pytest.mark.usefixtures("begun")
def test_the_workspace_has_the_curves_of_a_run_and_its_last_progress(
    service: ServiceClient,
) -> None:
    job = ended(service, WHOLE)
    assert job.state == "Completed", job.logs
    told = journal(service, WHOLE)
    names = {
        "train/loss": ("step", "loss"),
        "train/grad_norm": ("step", "grad_norm"),
        "train/learning_rate": ("step", "learning_rate"),
        "train/tokens_per_second": ("step", "tokens_per_second"),
        "eval/loss": ("evaluated", "loss"),
    }
    expected = {
        (curve, one["step"], one[field], int(one["time"] * 1000))
        for curve, (event, field) in names.items()
        for one in told
        if one["event"] == event
    }
    assert len(expected) == 4 * STEPS + 3
    drawn = [(one["key"], one["step"], one["value"], one["timestamp"]) for one in job.points]
    assert sorted(drawn) == sorted(expected)
    progress = Progress.model_validate_json(job.tags[PROGRESS_TAG])
    assert (progress.phase, progress.step) == (Phase.DONE, STEPS)
    assert progress.checkpoint is not None
    path = service.datastore("rows", WHOLE) / "checkpoints" / progress.checkpoint.path
    assert (path / "manifest.json").exists()
    assert Heard.model_validate_json(job.tags[HEARD_TAG]).starts == 1
    assert set(own_requests(service, WHOLE)) == {"mlflow.runs.get", "mlflow.runs.log-batch"}
    (said,) = last_words(job)
    assert said.failure_class == "Completed"
    log = job.logs["user_logs/std_log.txt"].lower()
    assert not any(word in log for word in ("mlflow", "azure ml", "retry"))


@pytest.mark.full
def test_the_stop_tag_ends_all_ranks_of_both_nodes_with_a_checkpoint(
    service: ServiceClient, submit: Submit
) -> None:
    name = submit("stopped", nodes=2, training={"max_steps": 100_000})
    until(lambda: PROGRESS_TAG in service.job(name).tags or service.job(name).state == "Failed")
    until(lambda: steps(service, name) > 4 or service.job(name).state == "Failed")
    service.log_batch(name, tags={STOP_TAG: STOP})
    job = ended(service, name)
    first, second = last_words(job)
    assert (first.exit_code, second.exit_code) == (75, 75), job.logs
    assert first.message == f"stopped by SIGTERM after step {first.step}"
    assert second.message == f"stopped by another rank after step {first.step}"
    assert first.checkpoint is not None
    assert first.checkpoint.step == first.step
    progress = Progress.model_validate_json(job.tags[PROGRESS_TAG])
    assert (progress.phase, progress.step) == (Phase.STOPPING, first.step)
    assert progress.checkpoint is not None
    assert progress.checkpoint.step == first.step


@pytest.mark.full
@pytest.mark.usefixtures("begun")
def test_a_service_that_is_silent_to_the_end_keeps_no_run_from_its_end(
    service: ServiceClient,
) -> None:
    job = ended(service, UNHEARD)
    (said,) = last_words(job)
    assert (job.state, said.failure_class) == ("Completed", "Completed")


@pytest.mark.full
@pytest.mark.usefixtures("begun")
def test_a_silent_service_costs_no_step_and_is_told_once(service: ServiceClient) -> None:
    name, log = SILENT, "user_logs/std_log.txt"
    until(lambda: TROUBLE in service.job(name).logs.get(log, ""))
    before, asked = steps(service, name), len(own_requests(service, name))
    run = service.datastore("rows", name) / "run"
    ranks = [psutil.Process(int((run / f"pid-{rank}").read_text())) for rank in (0, 1)]
    supervisor = ranks[0].parent()
    assert supervisor is not None
    until(lambda: is_connected(supervisor, service))
    until(lambda: steps(service, name) > before + 200)
    assert len(own_requests(service, name)) - asked < 20  # steps ask for nothing
    assert not any(is_connected(rank, service) for rank in ranks)
    service.clear_faults()  # also that of the other run, which has ended
    until(lambda: OVER in service.job(name).logs[log])
    service.log_batch(name, tags={STOP_TAG: STOP})
    job = ended(service, name)
    (said,) = last_words(job)
    assert said.exit_code == 75
    assert [job.logs[log].count(sentence) for sentence in (TROUBLE, OVER)] == [1, 1]
    assert Progress.model_validate_json(job.tags[PROGRESS_TAG]).step == said.step


@pytest.mark.full
def test_the_plugin_renews_the_token_and_tells_a_refusal_from_a_busy_service(
    service: ServiceClient, submit: Submit
) -> None:
    service.settings(run_token=60)
    service.fault("mlflow.runs.log-batch", name="asking", status=503, times=2)
    asks = """
import logging
from finetune_trainer.launch.azureml.mlflow_run import MLflowRun, RefusedError
run = MLflowRun()
for library in ("azure.core", "azureml.mlflow", "mlflow.tracking", "urllib3.connectionpool"):
    logging.getLogger(library).warning("not into the log of the run")
for value in ("busy", "x" * 2000, "fine"):
    try:
        run.report((), {"a-tag": value})
    except RefusedError:
        print("refused")
    except Exception:
        print("busy")
"""
    job = ended(service, submit("asking", command=f"python -c {shlex.quote(asks)}"))
    assert job.logs["user_logs/std_log.txt"].split() == ["busy", "refused"]
    assert job.tags["a-tag"] == "fine"
    assert Counter(own_requests(service, "asking")) == {
        "run.token": 1,
        "mlflow.runs.log-batch": 4,  # one retry, of the first
    }
    service.settings(run_token=3600)


@pytest.mark.full
def test_a_run_without_the_plugin_says_what_is_missing_and_trains(tmp_path: Path) -> None:
    # Python imports sitecustomize at start; a module that is None there cannot be imported.
    hidden = 'import sys\n\nsys.modules.update({"azureml.mlflow": None, "mlflow": None})\n'
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environ = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(STAND_IN).parents[2])]),
        "MLFLOW_TRACKING_URI": f"azureml://127.0.0.1:9/mlflow/v2.0{WORKSPACE}",
        "MLFLOW_TRACKING_TOKEN": "a.b.c",
        "MLFLOW_RUN_ID": "a-run",
    }
    node = start_node(train_config(tmp_path), {}, environ, stand_in="finish")
    assert node.wait() == 0, node.stderr
    assert node.stderr.count("warning: azureml-mlflow cannot be imported") == 1
    assert "install finetune-operator[trainer,mlflow] in the environment of the job" in node.stderr
    assert node.last_words.failure_class == "Completed"
