"""Jobs of two nodes train in real pods; what a user sees of them meanwhile and afterwards."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.port_forward import PodRequest, PodResponse, send_to_pod
from finetune_operator.kube.resources import Object
from monitoring.windows import Windows
from support.charts.prometheus import Prometheus, Target, needs_prometheus
from support.cluster.operators import condition, wait_until
from support.cluster.real_jobs import NAMESPACE, Jobs, profile
from support.cluster.real_volume import Volume
from support.telemetry.node_pages import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 200


@pytest.fixture(scope="module")
def ddp(jobs: Jobs) -> Object:
    """A job that trained with DDP on two nodes, and is Complete."""
    jobs.apply("ddp", strategy={"type": "ddp"}, training={"maxSteps": STEPS})
    jobs.wait("ddp", "Complete")
    jobs.kubectl("wait", "ftj/ddp", "--for=condition=Complete", "--timeout=1s")
    return jobs.get("ddp")


@pytest.fixture(scope="module")
def fsdp(jobs: Jobs) -> Object:
    """The same with FSDP and every parameter, rank 0 being found through a Service's selector."""
    jobs.cluster.apply(profile(jobs.cluster.given, "by-service", rankZeroName="service"))
    jobs.apply(
        "fsdp",
        "by-service",
        strategy={"type": "fsdp"},
        method={"type": "full"},
        training={"maxSteps": 20},
    )
    return jobs.wait("fsdp", "Complete")


def load(model: Path, adapter: Path | None = None) -> Any:
    """Load what was exported, as transformers and peft do it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    return made if adapter is None else PeftModel.from_pretrained(made, adapter)


def test_two_nodes_with_ddp_leave_an_adapter_on_the_volume(
    ddp: Object, volume: Volume, tmp_path: Path
) -> None:
    import torch

    assert ddp["status"]["artifacts"] == ["pvc://models/output/ddp"]
    adapter = volume.get("output/ddp", tmp_path / "adapter")
    made = load(volume.get("model", tmp_path / "model"), adapter)
    words = json.loads((adapter / "adapter_config.json").read_text())
    assert words["base_model_name_or_path"] == "tests/tiny"
    learned = [value for name, value in made.named_parameters() if "lora_B" in name]
    assert learned
    assert all(float(torch.linalg.vector_norm(one)) > 0 for one in learned)


def test_the_status_of_a_finished_job_tells_how_it_went(ddp: Object) -> None:
    status = ddp["status"]
    assert (status["phase"], status["attempt"]) == ("Succeeded", 1)
    assert status["nodes"] == {"desired": 2, "ready": 0, "worldSize": 2}
    assert (status["plan"]["strategy"], status["plan"]["precision"]) == ("ddp", "fp32")
    progress, last = status["progress"], status["checkpoint"]["last"]
    assert (progress["step"], progress["totalSteps"], progress["etaSeconds"]) == (STEPS, STEPS, 0)
    assert 0 < progress["loss"] < 6.0  # a guess among 768 tokens costs 6.6
    assert (last["step"], last["worldSize"]) == (STEPS, 2)
    assert last["uri"].startswith(f"pvc://models/checkpoints/ddp/step-{STEPS}.0-1-1-")
    (attempt,) = status["attempts"]
    assert (attempt["failureClass"], attempt["exitCode"]) == ("Completed", 0)
    says = {one["type"]: one["status"] for one in status["conditions"]}
    assert says == {
        "Accepted": "True",
        "Admitted": "True",
        "ResourcesReady": "False",
        "Running": "False",
        "CheckpointReady": "True",
        "Complete": "True",
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
    }


def test_events_and_columns_tell_it_in_short(ddp: Object, jobs: Jobs) -> None:
    jobs.wait_for_event("ddp", "Completed")
    assert jobs.events("ddp") == ["AttemptCreated", "Training", "Completed"]
    head, row = jobs.kubectl("get", "ftj", "ddp").splitlines()
    columns = "NAME PHASE REASON STEP STEPS LOSS NODES RESTARTS ETA-SECONDS AGE"
    assert " ".join(head.split()) == columns
    name, phase, reason, step, steps, _, nodes, restarts, *_ = row.split()
    assert (name, phase, reason) == ("ddp", "Succeeded", "Completed")
    assert (step, steps) == (str(STEPS), str(STEPS))
    assert (nodes, restarts) == ("0", "0")


def test_two_nodes_with_fsdp_find_each_other_through_a_service_with_a_selector(
    fsdp: Object, volume: Volume, jobs: Jobs, tmp_path: Path
) -> None:
    assert fsdp["status"]["plan"]["strategy"] == "fsdp"
    (service,) = (one for one in jobs.children("fsdp") if one["kind"] == "Service")
    assert service["spec"]["selector"]["batch.kubernetes.io/job-completion-index"] == "0"
    made = load(volume.get("output/fsdp", tmp_path / "model"))
    assert made.num_parameters() > 100_000


@pytest.fixture(scope="module")
def training(jobs: Jobs) -> Object:
    """A job of two nodes that trains and does not come to an end by itself."""
    jobs.apply("trains")
    return jobs.wait("trains", "Running")


def test_a_running_job_says_so_and_counts_its_checkpoints(training: Object, jobs: Jobs) -> None:
    assert condition(training, "ResourcesReady")["status"] == "True"
    assert training["status"]["nodes"] == {"desired": 2, "ready": 2, "worldSize": 2}
    wait_until(lambda: jobs.get("trains")["status"].get("checkpoint", {}).get("last"), 90)


def test_a_request_through_a_port_forward_comes_from_localhost_in_the_pod(
    training: Object, jobs: Jobs
) -> None:
    pod, _ = jobs.pods("trains", 1)

    def send(port: int) -> PodResponse:
        name, request = pod["metadata"]["name"], PodRequest("POST", "/checkpoint")
        return jobs.api.run(send_to_pod(jobs.api.client, NAMESPACE, name, port, request))

    assert send(9400).status == HTTPStatus.ACCEPTED  # the page refuses other addresses with 403
    with pytest.raises(UnavailableError, match=r"port 9401 of pod .* connection refused"):
        send(9401)


def test_a_profile_of_a_running_job_is_recorded_on_the_volume(
    training: Object, jobs: Jobs, volume: Volume
) -> None:
    done = jobs.cluster.ftctl("profile", "trains", "-n", NAMESPACE, "--steps", "1")
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip().rpartition("/")[2]
    assert name.startswith("attempt-1-steps-")
    assert volume.has(f"checkpoints/trains/run/profiles/{name}/rank-0.json.gz")


@contextmanager
def killed(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Kill a process at the end of the block."""
    with process:
        try:
            yield
        finally:
            process.kill()


def wait_for_series(jobs: Jobs, name: str, folder: Path, *queries: str) -> None:
    """Scrape the pods of a job with a Prometheus until each query gives a series per rank."""
    port = free_ports(1)
    address = f"127.0.0.1:{port}"
    pages = [
        f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:9400/proxy/metrics"
        for pod in jobs.pods(name, 1)
    ]
    targets = [Target(f"pod-{at}", address, {}, {"path": one}) for at, one in enumerate(pages)]
    with (
        killed(jobs.cluster.start("kubectl", "proxy", f"--port={port}")),
        Prometheus(folder, targets, Windows().divided(30)) as prometheus,
    ):
        wait_until(lambda: all(len(prometheus.ask(one)) == 2 for one in queries), 60)


@needs_prometheus
def test_the_metrics_of_each_rank_are_in_prometheus(
    training: Object, jobs: Jobs, tmp_path: Path
) -> None:
    wait_for_series(
        jobs,
        "trains",
        tmp_path,
        "sum by (rank) (finetune_train_steps_total) > 0",
        "sum by (rank) (finetune_comm_collectives_total) > 0",
    )


@needs_prometheus
def test_two_ranks_with_nccl_have_gpu_and_collective_metrics_in_prometheus(
    jobs: Jobs, tmp_path: Path
) -> None:
    nodes = jobs.cluster.list("nodes", "--selector=nvidia.com/gpu.present=true")
    if sum(int(one["status"]["allocatable"].get("nvidia.com/gpu", 0)) for one in nodes) < 2:
        pytest.skip("needs two GPUs: no node has the label nvidia.com/gpu.present with enough GPUs")
    jobs.apply("nccl", topology={"nodes": 2, "gpusPerNode": 1})
    jobs.wait("nccl", "Running")
    wait_for_series(
        jobs,
        "nccl",
        tmp_path,
        'finetune_train_info{backend="nccl",transport!=""}',
        "sum by (rank) (finetune_train_steps_total) > 0",
        "sum by (rank) (finetune_comm_collectives_total) > 0",
        "finetune_gpu_utilization_ratio",
    )
    wait_until(lambda: jobs.get("nccl")["status"]["progress"].get("transport"), 60, "transport")


def test_its_pods_are_a_user_who_writes_to_volumes_alone_and_knows_only_the_attempts_key(
    training: Object, jobs: Jobs
) -> None:
    pod, _ = jobs.pods("trains", 1)
    volumes = {kind for one in pod["spec"]["volumes"] for kind in one if kind != "name"}
    assert volumes == {"downwardAPI", "emptyDir", "persistentVolumeClaim"}  # no token
    (container,) = pod["spec"]["containers"]
    assert {kind for one in container["env"] for kind in one.get("valueFrom", ())} == {"fieldRef"}
    program = (
        "import json, os, pathlib\n"
        "def write(folder):\n"
        "    try:\n"
        "        pathlib.Path(folder, 'x').write_text('')\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "status = pathlib.Path('/proc/1/status').read_text().split('\\n')\n"
        "caps = next(one for one in status if one.startswith('CapEff')).split()[1]\n"
        "print(json.dumps([os.getuid(), *map(write, ('/', '/etc/finetune', '/tmp')), int(caps, 16),"
        " os.path.exists('/run/secrets/kubernetes.io'), sorted(os.environ)]))"
    )
    said = jobs.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", program)
    user, root, config, tmp, capabilities, has_token, names = json.loads(said)
    assert (user, root, config, tmp, capabilities, has_token) == (1000, 30, 30, None, 0, False)
    secrets = [name for name in names if "TOKEN" in name or "SECRET" in name or "KEY" in name]
    assert secrets == ["FINETUNE_RDZV_KEY"]


def test_a_job_that_is_deleted_while_its_log_is_followed_leaves_nothing(
    training: Object, jobs: Jobs
) -> None:
    where = ("trains", "-n", NAMESPACE, "--rank", "1")
    _, pod = jobs.pods("trains", 1)
    say = "open('/proc/1/fd/1', 'w').write('said by the main process\\n')"
    jobs.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", say)
    so_far = jobs.cluster.ftctl("logs", *where)
    assert "said by the main process\n" in so_far.stdout, so_far.stderr
    children = jobs.children("trains")
    kinds = {one["kind"] for one in children}
    assert kinds == {"Job", "Pod", "NetworkPolicy", "Service", "EndpointSlice"}
    with jobs.cluster.start_ftctl("logs", *where, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        jobs.delete("trains")
        assert "Preempted: " in following.stdout.read()
    assert following.returncode == 0
    assert jobs.api.job(NAMESPACE, "trains") is None
    gone = {training["metadata"]["uid"], *(one["metadata"]["uid"] for one in children)}
    for one in jobs.everything():
        owners = one["metadata"].get("ownerReferences", [])
        assert not gone & {one["metadata"]["uid"], *(owner["uid"] for owner in owners)}
