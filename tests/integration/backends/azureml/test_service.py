"""The stand-in for Azure ML, asked by the unmodified SDK and azure-identity."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from azureml_service import WORKSPACE, SeenJob, ServiceClient, amlcompute, running_service
from support.azureml.azureml_cases import CASES
from support.launch.launches import is_alive, until

pytest.importorskip("azure.identity", reason="needs the extra azureml")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of marshmallow, by the SDK
    pytest.mark.filterwarnings("ignore:.*experimental"),
]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with running_service(tmp_path_factory.mktemp("service")) as made:
        yield made


@pytest.fixture
def service(started: ServiceClient) -> Iterator[ServiceClient]:
    """The service, without what an earlier test asked of it."""
    started.requests(forget=True)
    yield started
    started.clear_faults()
    started.settings(runs_jobs=False, first_state="NotStarted", stuck=set(), cancel="sigterm")
    started.tokens(lifetime=3600)


@pytest.fixture(scope="module")
def environment(started: ServiceClient) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.environ().items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def ml(environment: None) -> Any:
    """The SDK, which asks each thing once."""
    from azure.ai.ml import MLClient
    from azure.identity import WorkloadIdentityCredential

    _, _, subscription, _, group, *_, workspace = WORKSPACE.split("/")
    credential = WorkloadIdentityCredential(disable_instance_discovery=True)
    return MLClient(
        credential,
        subscription,
        group,
        workspace,
        enable_telemetry=False,
        show_progress=False,
        retry_total=0,
        read_timeout=5,
    )


class Plane:
    """The service asked as it is, with a token of the operator."""

    def __init__(self, service: ServiceClient) -> None:
        self._environ = service.environ()
        self._base = self._environ["AZUREML_DEV_URL_MFE"]
        self._session = self._new_session()
        token = self.exchange().json()["access_token"]
        self._session.headers["Authorization"] = f"Bearer {token}"

    def exchange(self, **changes: str) -> requests.Response:
        form = {
            "grant_type": "client_credentials",
            "client_id": self._environ["AZURE_CLIENT_ID"],
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "client_assertion": Path(self._environ["AZURE_FEDERATED_TOKEN_FILE"]).read_text(),
            "scope": "https://management.azure.com/.default",
        }
        url = f"{self._base}/{self._environ['AZURE_TENANT_ID']}/oauth2/v2.0/token"
        return self._new_session().post(url, data={**form, **changes}, timeout=5)

    def put(self, name: str, properties: dict[str, Any], *, workspace: str = WORKSPACE) -> Any:
        url = f"{self._base}{workspace}/jobs/{name}?api-version=2025-01-01-preview"
        return self._session.put(url, json={"properties": properties}, timeout=20)

    def mlflow(self, verb: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        url = f"{self._base}/mlflow/v2.0{WORKSPACE}/api/2.0/mlflow/{verb}"
        method = "GET" if body is None else "POST"
        return self._session.request(method, url, params=query, json=body, timeout=5)

    def details(self, name: str) -> Any:
        url = f"{self._base}/history/v1.0{WORKSPACE}/runs/{name}/details"
        return self._session.get(url, timeout=5).json()

    def read(self, url: str, **headers: str) -> requests.Response:
        return self._new_session().get(url, headers=headers, timeout=5)

    def _new_session(self) -> requests.Session:
        session = requests.Session()
        session.verify = self._environ["REQUESTS_CA_BUNDLE"]
        session.trust_env = False  # else a bundle of the environment's own would be used
        return session


@pytest.fixture
def plane(service: ServiceClient) -> Plane:
    return Plane(service)


JOB = {"jobType": "Command", "command": "true", "environmentId": "azureml:trainer:1"}


@pytest.fixture
def submit(ml: Any) -> Callable[..., Any]:
    """Submit a golden under a name of its own, with changes."""
    from azure.ai.ml import load_job

    def submit(name: str, case: str = "amlcompute-one-node", **changes: Any) -> Any:
        (job,) = CASES[case].request().objects
        text = yaml.safe_dump({**job, "name": name, **changes})
        return ml.jobs.create_or_update(load_job(io.StringIO(text)))

    return submit


@pytest.mark.parametrize("case", CASES)
def test_each_golden_is_a_job_and_costs_one_request(
    case: str, service: ServiceClient, submit: Callable[..., Any]
) -> None:
    assert submit(f"golden-{case}", case).status == "NotStarted"
    asked = [one.kind for one in service.requests() if one.kind != "token"]
    assert asked == ["job.put"]


def test_a_compute_that_is_not_there_is_refused(
    service: ServiceClient, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import HttpResponseError

    with pytest.raises(HttpResponseError, match="Unknown compute target 'no'"):
        submit("no-compute", compute="azureml:no")
    assert [one.status for one in service.requests("job.put")] == [400]


def test_a_name_is_that_of_one_job_for_ever(
    service: ServiceClient, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import HttpResponseError

    submit("once")
    assert submit("once").name == "once"
    with pytest.raises(HttpResponseError, match="JobPropertyImmutable"):
        submit("once", experiment_name="another")
    assert [one.status for one in service.requests("job.put")] == [201, 200, 400]


def test_states_that_a_test_sets_are_what_the_sdk_gets(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    submit("states")
    for state in ("Queued", "Running", "NotResponding", "Completed"):
        service.set_state("states", state)
        assert ml.jobs.get("states").status == state


def test_computes_sizes_environments_and_datastores_are_told(
    service: ServiceClient, ml: Any
) -> None:
    from azure.core.exceptions import ResourceNotFoundError

    service.compute("small", amlcompute("Standard_NC24ads_A100_v4", max_nodes=1))
    small, aks = ml.compute.get("small"), ml.compute.get("aks")
    assert (small.size, small.max_instances) == ("Standard_NC24ads_A100_v4", 1)
    limits = aks.properties["instanceTypes"]["gpu8"]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8"
    gpus = {one.name: one.gpus for one in ml.compute.list_sizes(location="westeurope")}
    assert gpus["Standard_ND96isr_H100_v5"] == 8
    assert ml.environments.get("trainer", "1").image
    assert ml.datastores.get("rows").name == "rows"
    with pytest.raises(ResourceNotFoundError):
        ml.compute.get("none")


def test_a_workspace_leads_to_its_data_plane(plane: Plane, ml: Any) -> None:
    answer = plane.read(ml.workspaces.get("tuning").discovery_url)
    assert answer.json()["api"] == os.environ["AZUREML_DEV_URL_MFE"]


def test_all_jobs_are_listed_page_by_page(service: ServiceClient, plane: Plane, ml: Any) -> None:
    for number in range(51):
        assert plane.put(f"listed-{number}", JOB).status_code == 201
    listed = [one.name for one in ml.jobs.list()]
    assert listed[:51] == [f"listed-{number}" for number in reversed(range(51))]
    assert sorted(listed) == sorted(one.name for one in service.jobs())
    assert len(service.requests("job.list")) > 1


def test_a_cancel_ends_a_job_and_is_refused_once_it_finalizes(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import HttpResponseError

    submit("cancelled")
    ml.jobs.begin_cancel("cancelled", polling=False)
    assert service.job("cancelled").state == "Canceled"

    service.settings(stuck={"CancelRequested"})
    submit("never-gone")
    ml.jobs.begin_cancel("never-gone", polling=False)
    assert ml.jobs.get("never-gone").status == "CancelRequested"
    service.settings(stuck=set())
    until(lambda: service.job("never-gone").state == "Canceled", timeout=30)

    submit("ending")
    service.set_state("ending", "Finalizing")
    with pytest.raises(HttpResponseError, match="cannot be canceled"):
        ml.jobs.begin_cancel("ending", polling=False)


def test_a_token_that_was_revoked_is_refused_until_there_is_another(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import ClientAuthenticationError

    submit("kept")
    service.tokens(revoke=True)
    with pytest.raises(ClientAuthenticationError):
        ml.jobs.get("kept")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"command": None}, "properties.command is missing", id="missing"),
        pytest.param({"nodes": 2}, "properties.nodes is not known", id="unknown"),
        pytest.param({"status": "Failed"}, "properties.status can only be read", id="read only"),
        pytest.param(
            {"jobType": "Fold"}, "properties.jobType is 'Fold', not one of", id="type of job"
        ),
        pytest.param(
            {"resources": {"instanceCount": "2"}},
            "properties.resources.instanceCount is '2', not int",
            id="type",
        ),
        pytest.param(
            {"queueSettings": {"jobTier": "Cheap"}},
            "properties.queueSettings.jobTier is 'Cheap', not one of",
            id="enum",
        ),
        pytest.param(
            {"inputs": {"data": {"jobInputType": "uri_folder", "mode": "ReadOnlyMount"}}},
            "properties.inputs.data.uri is missing",
            id="in an input",
        ),
    ],
)
def test_a_body_that_is_not_of_the_interface_is_refused_and_recorded(
    changes: dict[str, Any], problem: str, service: ServiceClient, plane: Plane
) -> None:
    assert plane.put("odd", JOB | changes).status_code == 400
    (record,) = service.requests("job.put")
    assert problem in record.problem
    assert "odd" not in {one.name for one in service.jobs()}


def test_who_cannot_prove_who_they_are_gets_nothing(service: ServiceClient, plane: Plane) -> None:
    assert plane.exchange(client_assertion="made up").status_code == 401
    assert plane.exchange(grant_type="password").status_code == 400
    assert plane.put("other", JOB, workspace=f"{WORKSPACE}-2").status_code == 404
    shown = str(service.requests())
    assert Path(service.environ()["AZURE_FEDERATED_TOKEN_FILE"]).read_text() not in shown
    assert "Bearer" not in shown


def test_a_run_has_the_newest_metrics_and_the_tags_that_were_set(
    plane: Plane, submit: Callable[..., Any]
) -> None:
    submit("curves")
    for step in (1, 2):
        point = {"key": "train/loss", "value": 2.0 / step, "timestamp": step, "step": step}
        tag = {"key": "finetune.progress", "value": f"{step}"}
        body = {"run_id": "curves", "metrics": [point], "tags": [tag]}
        assert plane.mlflow("runs/log-batch", body).ok
    long = {"run_id": "curves", "key": "long", "value": "x" * 1001}
    assert plane.mlflow("runs/set-tag", long).status_code == 400
    run = plane.mlflow("runs/get", run_id="curves").json()["run"]
    assert run["info"]["status"] == "SCHEDULED"
    assert run["data"]["metrics"] == [
        {"key": "train/loss", "value": 1.0, "timestamp": 2, "step": 2}
    ]
    tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
    assert (tags["finetune.progress"], tags["finetune.uid"]) == ("2", "uid-1")


def test_log_files_are_read_by_range_from_signed_urls_alone(
    service: ServiceClient, plane: Plane, submit: Callable[..., Any]
) -> None:
    submit("logged")
    service.set_log("logged", "0123456789")
    (url,) = plane.details("logged")["logFiles"].values()
    assert plane.read(url).text == "0123456789"
    part = plane.read(url, Range="bytes=7-")
    assert (part.status_code, part.text) == (206, "789")
    assert part.headers["Content-Range"] == "bytes 7-9/10"
    assert plane.read(url, Range="bytes=10-").status_code == 416
    assert plane.read(url.partition("?")[0]).status_code == 403
    assert plane.read(url, Authorization="Bearer leaked").status_code == 400
    assert "sig" not in service.requests("log.get")[0].query


@pytest.mark.parametrize(
    ("fault", "exists", "error"),
    [
        pytest.param({"status": 429, "retry_after": 7}, False, "HttpResponseError", id="throttled"),
        pytest.param({"status": 503}, False, "HttpResponseError", id="503 before"),
        pytest.param(
            {"status": 503, "is_carried_out": True}, True, "HttpResponseError", id="503 after"
        ),
        pytest.param({"is_lost": True}, False, "ServiceResponseError", id="lost request"),
        pytest.param(
            {"is_lost": True, "is_carried_out": True},
            True,
            "ServiceResponseError",
            id="lost answer",
        ),
    ],
)
def test_a_fault_meets_one_request(
    fault: dict[str, Any],
    exists: bool,
    error: str,
    service: ServiceClient,
    submit: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    from azure.core.exceptions import AzureError

    name = request.node.callspec.id.replace(" ", "-")
    service.fault("job.put", times=1, **fault)
    with pytest.raises(AzureError) as raised:
        submit(name)
    assert type(raised.value).__name__ == error
    assert (name in {one.name for one in service.jobs()}) is exists
    if "retry_after" in fault:
        answer = getattr(raised.value, "response", None)
        assert answer is not None
        assert answer.headers["Retry-After"] == "7"
    assert submit(name).name == name
    assert [one.kind for one in service.requests() if one.kind != "token"] == ["job.put"] * 2


def test_a_fault_can_be_of_one_job(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import HttpResponseError

    submit("spared")
    submit("struck")
    service.fault("job.get", name="struck", status=503)
    assert ml.jobs.get("spared").name == "spared"
    with pytest.raises(HttpResponseError):
        ml.jobs.get("struck")


def test_what_is_delayed_is_carried_out_after_the_client_has_given_up(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    from azure.core.exceptions import ResourceNotFoundError, ServiceResponseError

    service.fault("job.put", delay=float("inf"))
    with pytest.raises(ServiceResponseError):
        submit("late")
    with pytest.raises(ResourceNotFoundError):
        ml.jobs.get("late")
    service.clear_faults()
    until(lambda: "late" in {one.name for one in service.jobs()}, timeout=30)


SCRIPT = """
import json, os, pathlib, signal, sys, time
data, output, told, mode = (one.partition("=")[2] for one in sys.argv[1:])
rank = os.environ.get("RANK", "0")
def leave(*_):
    pathlib.Path(output, "told-" + rank).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(output, "environ-" + rank).write_text(json.dumps(dict(os.environ)))
print(pathlib.Path(data, "rows").read_text(), "of", rank, flush=True)
pathlib.Path(output, "started-" + str(os.getpid())).touch()
if mode == "waits":
    os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
sys.exit(int(mode))
"""


class Runs:
    """Jobs that run a script on the stand-in's compute."""

    def __init__(self, service: ServiceClient, submit: Callable[..., Any], folder: Path) -> None:
        self._service, self._submit = service, submit
        self._script = folder / "script.py"
        self._script.write_text(SCRIPT)
        (service.datastore("rows", "support") / "rows").write_text("rows")
        service.settings(runs_jobs=True)

    def start(self, name: str, mode: str, case: str = "amlcompute-one-node") -> Path:
        """Submit it, and return the folder of its output."""
        rows = "azureml://datastores/rows/paths/support"
        output = f"azureml://datastores/kept/paths/{name}"
        mounts = "data=${{inputs.data}} output=${{outputs.output}} told=x"
        self._submit(
            name,
            case,
            command=f"python {self._script} {mounts} mode={mode}",
            inputs={"data": {"type": "uri_folder", "path": rows, "mode": "ro_mount"}},
            outputs={"output": {"type": "uri_folder", "path": output, "mode": "rw_mount"}},
        )
        return self._service.datastore("kept", name)

    def wait(self, name: str, state: str) -> SeenJob:
        """Wait until it has ended, in that state."""
        ends = ("Completed", "Failed", "Canceled")
        until(lambda: self._service.job(name).state in ends, timeout=30)
        job = self._service.job(name)
        assert job.state == state, job
        return job


@pytest.fixture
def runs(service: ServiceClient, submit: Callable[..., Any], tmp_path: Path) -> Runs:
    return Runs(service, submit, tmp_path)


def pids(output: Path) -> list[int]:
    """Return the processes that have begun to work."""
    return [int(one.name.partition("-")[2]) for one in output.glob("started-*")]


def test_a_command_runs_with_its_mounts_and_the_variables_of_a_single_node(runs: Runs) -> None:
    output = runs.start("script", "0")
    job = runs.wait("script", "Completed")
    assert job.logs == {"user_logs/std_log.txt": "rows of 0\n"}
    environ = json.loads((output / "environ-0").read_text())
    assert {"AZUREML_RUN_ID", "MLFLOW_TRACKING_TOKEN", "MLFLOW_EXPERIMENT_ID"} <= environ.keys()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR"} & environ.keys()
    assert environ["MLFLOW_RUN_ID"] == "script"


def test_each_node_is_a_process_that_knows_where_they_meet(runs: Runs) -> None:
    output = runs.start("nodes", "0", "amlcompute-two-nodes")
    job = runs.wait("nodes", "Completed")
    assert job.logs == {
        f"user_logs/std_log_process_{rank}.txt": f"rows of {rank}\n" for rank in (0, 1)
    }
    environs = [json.loads((output / f"environ-{rank}").read_text()) for rank in (0, 1)]
    assert [one["NODE_RANK"] for one in environs] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in environs} == {"2"}
    assert len({one["MASTER_PORT"] for one in environs}) == 1


def test_an_exit_code_fails_the_job_as_azure_ml_says_it(runs: Runs) -> None:
    runs.start("code", "3")
    assert "exited with status code 3" in runs.wait("code", "Failed").error


def test_an_input_that_is_not_there_fails_the_job(
    service: ServiceClient, runs: Runs, submit: Callable[..., Any]
) -> None:
    submit("no-model", "registered-models")
    assert "StreamAccess.NotFound" in runs.wait("no-model", "Failed").error


@pytest.mark.parametrize(("cancel", "is_told"), [("sigterm", True), ("sigkill", False)])
def test_a_cancel_ends_every_process(
    cancel: str, is_told: bool, service: ServiceClient, ml: Any, runs: Runs
) -> None:
    service.settings(cancel=cancel)
    output = runs.start(f"by-{cancel}", "waits")
    until(lambda: bool(pids(output)), timeout=30)
    ml.jobs.begin_cancel(f"by-{cancel}", polling=False)
    runs.wait(f"by-{cancel}", "Canceled")
    assert not any(is_alive(pid) for pid in pids(output))
    assert (output / "told-0").exists() is is_told


def test_a_job_stays_in_its_states_as_long_as_a_test_says(
    service: ServiceClient, ml: Any, runs: Runs
) -> None:
    service.settings(stuck={"Preparing"}, stays={"Queued": 0.2})
    runs.start("slow", "0")
    until(lambda: service.job("slow").state == "Preparing", timeout=30)
    service.settings(stuck={"Finalizing"})
    until(lambda: service.job("slow").state == "Finalizing", timeout=30)
    service.settings(stuck=set(), stays={})
    runs.wait("slow", "Completed")


def test_a_token_is_good_as_long_as_it_says(
    service: ServiceClient, ml: Any, submit: Callable[..., Any]
) -> None:
    service.tokens(lifetime=1)
    submit("short")
    until(lambda: bool(ml.jobs.get("short")) and len(service.requests("token")) > 1, timeout=30)
    assert {one.status for one in service.requests()} <= {200, 201}


def test_a_preemption_fails_a_job_or_starts_it_again(service: ServiceClient, runs: Runs) -> None:
    output = runs.start("preempted", "waits")
    until(lambda: len(pids(output)) == 1, timeout=30)
    service.preempt("preempted", "requeued")
    until(lambda: len(pids(output)) == 2, timeout=30)
    assert service.job("preempted").starts == 2
    service.preempt("preempted", "failed")
    assert "PreemptionError" in runs.wait("preempted", "Failed").error
    assert not any(is_alive(pid) for pid in pids(output))
    assert not (output / "told-0").exists()


def test_processes_of_jobs_end_with_the_service(tmp_path: Path) -> None:
    with running_service(tmp_path, runs_jobs=True) as service:
        folder = service.datastore("kept", "pids")
        command = f"sleep 600 & echo $! > {folder}/child; echo $$ > {folder}/main; sleep 600"
        Plane(service).put("left", JOB | {"command": command})
        until((folder / "main").exists, timeout=30)
        until(lambda: bool((folder / "main").read_text()), timeout=30)
    pids = [int((folder / name).read_text()) for name in ("child", "main")]
    until(lambda: not any(is_alive(pid) for pid in [*pids, service.pid]), timeout=30)


REPORT = """
import os, time
from mlflow.entities import Metric, RunTag
from mlflow.tracking import MlflowClient
client, run = MlflowClient(), os.environ["MLFLOW_RUN_ID"]
curve = [Metric("train/loss", 1.5, int(time.time() * 1000), 3)]
client.log_batch(run, curve, [], [RunTag("finetune.progress", "{}")])
print(client.get_run(run).data.tags["finetune.uid"])
"""


def test_the_unmodified_plugin_reports_with_nothing_but_the_variables(
    service: ServiceClient, runs: Runs, submit: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    variables = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    command = f"python {script}"
    submit("reports", command=command, environment_variables=variables)
    job = runs.wait("reports", "Completed")
    assert [(one["key"], one["value"], one["step"]) for one in job.points] == [
        ("train/loss", 1.5, 3)
    ]
    assert job.tags["finetune.progress"] == "{}"
    assert job.logs["user_logs/std_log.txt"].splitlines()[-1] == "uid-1"
    asked = [one.kind for one in service.requests() if one.client == "reports"]
    assert asked == ["mlflow.runs.log-batch", "mlflow.runs.get"]


def test_started_by_hand_it_prints_what_to_export_and_runs_until_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "azureml_service", "--folder", str(tmp_path)]
    tests = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": tests}, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        exported = [process.stdout.readline().split("=")[0] for _ in range(6)]
        process.terminate()
    assert process.returncode == 0
    assert "export AZURE_AUTHORITY_HOST" in exported
    assert "export AZUREML_DEV_URL_MFE" in exported
