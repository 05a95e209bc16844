"""`ftctl top` and `ftctl profile` on a run of two nodes of this machine.

The ranks are shown from the run's folder, and through an API server.
"""

import gzip
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from aiohttp import web

from finetune_operator.kube.resources import FINE_TUNE_JOBS, PODS, Object
from finetune_trainer.config import TelemetryConfig
from finetune_trainer.telemetry.node.start_page import node_page
from finetune_trainer.telemetry.shared import Shared
from support.api.builders import manifest
from support.cluster.operators import Api
from support.cluster.played_pods import own_address
from support.cluster.proxies import AnswerProxy
from support.launch.launches import until
from support.launch.tiny_run import write_inputs
from support.local.local_runs import kill_what_runs_below
from support.telemetry.node_pages import free_ports

FTCTL = [sys.executable, "-m", "finetune_operator"]


def environment(folder: Path, kubeconfig: str | Path = "/nowhere") -> dict[str, str]:
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "KUBECONFIG": str(kubeconfig)}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def top(folder: Path, *words: str, kubeconfig: str | Path = "/nowhere") -> Any:
    """Return what `ftctl top --once -o json` prints in a folder."""
    done = subprocess.run(
        [*FTCTL, "top", *words, "--once", "-o", "json"],
        cwd=folder,
        env=environment(folder, kubeconfig),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which a job of two nodes with a process each trains until it is stopped.

    Other programs have taken the first ports for its pages.
    """
    folder = write_inputs(tmp_path_factory.mktemp("project"))
    port = free_ports(23)
    made = manifest(
        training={"maxSteps": 1_000_000, "maxSeqLength": 64},
        checkpoint__every_steps=1_000_000,
        topology={"nodes": 2, "processesPerNode": 1},
        observability__metrics_port=port,
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(made))
    with ExitStack() as stack, (folder / "run.log").open("w") as log:
        for taken in range(port, port + 21):
            stack.enter_context(socket.create_server(("127.0.0.1", taken)))
        run = subprocess.Popen(
            [*FTCTL, "run", "job.yaml"], cwd=folder, env=environment(folder), stdout=log, stderr=log
        )
        try:
            until(lambda: run.poll() is not None or " step " in (folder / "run.log").read_text())
            assert run.poll() is None, (folder / "run.log").read_text()
            for process in psutil.Process(run.pid).children(recursive=True):
                process.nice(19)  # other tests need the cores
            yield folder
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60)
            kill_what_runs_below(folder)


def check_ranks(told: Any) -> None:
    """Check the ranks of a job that trains."""
    first, second = told["ranks"]
    assert [one["node"] for one in (first, second)] == ["node-0", "node-1"]
    for number, rank in enumerate((first, second)):
        assert rank["rank"] == number
        assert rank["step"] > 0
        assert 0 < rank["stepSeconds"] < 60
        assert sum(rank["phaseRatios"].values()) == pytest.approx(1)
        assert rank["phase"] in rank["phaseRatios"]
        assert 0 <= rank["waitingRatio"] <= 1
        assert rank["memoryBytes"]["host_rss"] > 2**20
        assert (rank["gpu"], rank["gpuUtilizationRatio"]) == (None, None)


@pytest.mark.full
def test_a_job_of_this_machine_is_shown_with_the_ranks_of_all_its_nodes(running: Path) -> None:
    told = top(running, "tiny")
    assert told["job"]["phase"] == "Training"
    assert told["job"]["reason"] == "Training"
    assert told["job"]["ageSeconds"] > 0
    assert told["job"]["totalSteps"] == 1_000_000
    check_ranks(told)
    assert told["notes"] == []
    (job,) = top(running)["jobs"]
    assert (job["name"], job["phase"]) == ("tiny", "Training")
    assert job["runDirectory"] == "runs/default/tiny"
    assert job["step"] >= told["job"]["step"]


def profile(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FTCTL, "profile", *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.full
def test_a_profile_of_the_next_steps_is_recorded_and_its_path_printed(running: Path) -> None:
    done = profile(running, "job.yaml", "--steps", "2")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == running / "runs" / "default" / "tiny" / "profiles"
    with gzip.open(folder / "rank-0.json.gz", "rt") as file:
        found = {one["name"] for one in json.load(file)["traceEvents"] if "name" in one}
    steps = sorted(int(name.partition("#")[2]) for name in found if "ProfilerStep#" in name)
    assert folder.name == f"attempt-1-steps-{steps[0]}-{steps[1]}"
    again = profile(running, "tiny", "--steps", "1")
    assert again.returncode == 0, again.stderr
    assert again.stdout != done.stdout
    assert profile(running, "tiny", "--steps", "11").returncode == 2


@pytest.mark.full
def test_a_profile_needs_a_run_that_trains(running: Path, tmp_path: Path) -> None:
    stored = tmp_path / "runs" / "default" / "tiny"
    stored.mkdir(parents=True)
    (stored / "job.json").write_bytes((running / "runs/default/tiny/job.json").read_bytes())
    done = profile(tmp_path, "tiny")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no running job; start it with ftctl run" in done.stderr


@pytest.mark.full
def test_it_is_drawn_anew_on_a_terminal_until_ctrl_c(running: Path) -> None:
    control, terminal = pty.openpty()
    live = subprocess.Popen(
        [*FTCTL, "top", "job.yaml"],
        cwd=running,
        env=environment(running) | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    text, end = b"", time.monotonic() + 60
    try:
        while text.count(b"STEP TIME") < 3:
            assert time.monotonic() < end, text.decode(errors="replace")
            text += read_some(control)
        live.send_signal(signal.SIGINT)
        while live.poll() is None:
            text += read_some(control)
    finally:
        live.kill()
        live.wait()
        os.close(control)
    assert live.returncode == 130
    assert re.search(rb"node-1 +\w+ +[0-9]+ +[0-9.]+ m?s +[0-9]+ %", text), text
    assert b"Traceback" not in text


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536) if select.select([descriptor], [], [], 0.1)[0] else b""
    except OSError:  # nobody has the other end any more
        return b""


def test_a_job_that_an_operator_runs_on_this_machine_is_found_by_its_status(
    running: Path, api: Api
) -> None:
    with api.namespace("top") as namespace:
        local = "file://./model"
        api.apply(namespace, backend={"type": "local"}, model__source=local, dataset__source=local)
        url = f"file://{running}/runs/default/tiny"
        ref = {"kind": "ProcessGroup", "name": "attempts/1", "url": url}
        set_status(api, namespace, {"attempt": 1, "phase": "Running", "backendRef": ref})
        told = top(running, "tiny", "-n", namespace, kubeconfig=api.kubeconfig)
        assert told["job"]["namespace"] == namespace
        check_ranks(told)
        (job,) = top(running, "-n", namespace, kubeconfig=api.kubeconfig)["jobs"]
        assert (job["name"], job["phase"]) == ("tiny", "Running")


def set_status(api: Api, namespace: str, status: Object) -> None:
    patch = {"status": status}
    api.run(api.client.patch(FINE_TUNE_JOBS, "tiny", namespace, patch, subresource="status"))


class PodProxy(AnswerProxy):
    """Does what an API server does with requests to pods, which the embedded one does not.

    Attributes:
        is_allowed: Whether who asks may.
    """

    is_allowed = True

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        before, is_to_pod, page = request.raw_path.partition("/proxy/")
        if not is_to_pod:
            return await super()._answer(request, body)
        pod_path, _, port = before.replace("%3A", ":").rpartition(":")
        if not self.is_allowed:
            said = {"kind": "Status", "code": 403, "message": 'pods "x" is forbidden'}
            return web.json_response(said, status=403)
        headers = await self._headers(request.headers)
        async with self._session.get(self._access.host + pod_path, headers=headers) as answer:
            address = (await answer.json()).get("status", {}).get("podIP")
        if address is None:
            said = {"kind": "Status", "code": 503, "message": "address not allowed"}
            return web.json_response(said, status=503)
        async with self._session.get(f"http://{address}:{port}/{page}") as answer:
            return web.Response(status=answer.status, body=await answer.read())


@contextmanager
def pods(api: Api, port: int) -> Iterator[str]:
    """Have a job of three nodes with two ranks each: one runs, one has no address, one waits."""
    with api.namespace("top") as namespace:
        made = api.apply(
            namespace,
            backend={"type": "kubernetes", "kubernetes": {"profile": "none"}},
            topology={"nodes": 3, "processesPerNode": 2, "gpusPerNode": 0},
            training__global_batch_size=12,
            observability__metrics_port=port,
            checkpoint__uri="pvc://c/x",
            output__uri="pvc://c/y",
        )
        nodes = {"desired": 3, "ready": 1, "worldSize": 6}
        set_status(api, namespace, {"attempt": 3, "phase": "Running", "nodes": nodes})
        for index in range(3):
            labels = {
                "finetune.dev/job-uid": made["metadata"]["uid"],
                "finetune.dev/attempt": "3",
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            pod: Object = {
                "metadata": {"name": f"tiny-3-{index}", "labels": labels},
                "spec": {
                    "nodeName": f"node-of-{index}",
                    "automountServiceAccountToken": False,
                    "containers": [{"name": "trainer", "image": "none"}],
                },
            }
            api.run(api.client.create(PODS, pod, namespace))
        runs = {"phase": "Running", "podIP": own_address(), "podIPs": [{"ip": own_address()}]}
        for index, status in enumerate([runs, {"phase": "Running"}]):
            api.run(
                api.client.patch(
                    PODS, f"tiny-3-{index}", namespace, {"status": status}, subresource="status"
                )
            )
        yield namespace


@pytest.mark.full
def test_the_ranks_of_a_job_are_read_from_its_pods_with_the_rights_of_who_asks(
    api: Api, cluster: Any, tmp_path: Path
) -> None:
    port = free_ports(1)
    config = TelemetryConfig(metrics_port=port, metrics_host=own_address())
    with (
        node_page(config, 0, 2) as page,
        pods(api, port) as namespace,
        PodProxy(api.kubeconfig, tmp_path) as proxy,
    ):
        for rank in (0, 1):
            Shared(page, rank)
        is_real = cluster.faults is None
        kubeconfig = api.kubeconfig if is_real else proxy.kubeconfig
        told = top(tmp_path, "tiny", "-n", namespace, kubeconfig=kubeconfig)
        assert [(one["rank"], one["node"], one["ageSeconds"] is None) for one in told["ranks"]] == [
            (0, "node-of-0", False),
            (1, "node-of-0", False),
            (2, "node-of-1", True),
            (3, "node-of-1", True),
            (4, "node-of-2", True),
            (5, "node-of-2", True),
        ]
        waits, silent = told["notes"]
        assert waits == "pod tiny-3-2 is Pending"
        assert silent.startswith("the page of pod tiny-3-1 cannot be read")
        if not is_real:
            proxy.is_allowed = False
            told = top(tmp_path, "tiny", "-n", namespace, kubeconfig=kubeconfig)
            _, note = told["notes"]
            assert note.endswith(f"request permission to get pods/proxy in {namespace}")
            assert [one["ageSeconds"] for one in told["ranks"]] == [None] * 6


def test_a_folder_without_jobs_says_so(tmp_path: Path) -> None:
    (note,) = top(tmp_path)["notes"]
    assert note.startswith("no job below ")
