"""The page of a training node: its responses, in any state of its ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from finetune_trainer.config import Phase, ProfileReport, Progress, TelemetryConfig
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.node.start_page import node_page
from finetune_trainer.telemetry.shared import NodePage, Shared
from support.launch.launches import (
    Launch,
    clean_environment,
    free_port,
    is_alive,
    train_config,
    until,
)
from support.telemetry.node_pages import ask, folder_of, free_ports, page_processes, scrape

AGE = "finetune_train_last_seen_age_seconds"


def step(number: int) -> StepReport:
    return StepReport(
        step=number,
        epoch=number / 10,
        loss=2.0,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=100,
        samples=4,
        seconds=0.5,
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., NodePage]]:
    """Serve the pages of nodes, each with two ranks from the given one on."""
    with ExitStack() as stack:

        def serve(
            first_rank: int = 0,
            port: int | None = None,
            num_ranks: int = 2,
            host: str = "127.0.0.1",
        ) -> NodePage:
            port = free_ports(1) if port is None else port
            config = TelemetryConfig(metrics_port=port, metrics_host=host)
            return stack.enter_context(node_page(config, first_rank, num_ranks))

        yield serve


@pytest.fixture
def page(serve: Callable[..., NodePage]) -> NodePage:
    return serve()


@pytest.fixture
def telemetry(tmp_path: Path, page: NodePage) -> Iterator[Telemetry]:
    config = train_config(tmp_path)
    opened = Telemetry(config, rank=0, world_size=2, shared=Shared(page, 0))
    yield opened
    opened.close()


def test_the_metrics_page_is_what_prometheus_reads(page: NodePage, telemetry: Telemetry) -> None:
    telemetry.step(step(1))
    assert telemetry.progress.metrics_url == page.url
    response = ask(page.url, "GET", "/metrics")
    assert (response.status, response.headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert "# TYPE finetune_train_tokens_total counter" in response.text
    assert scrape(page.url)["finetune_train_global_step", "0"] == 1


def test_progress_is_served_as_rank_0_has_it(page: NodePage, telemetry: Telemetry) -> None:
    telemetry.phase(Phase.TRAINING)
    telemetry.step(step(3))
    response = ask(page.url, "GET", "/progress")
    assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
    assert Progress.model_validate_json(response.text) == telemetry.progress


def test_a_posted_checkpoint_is_requested_from_the_loop(
    page: NodePage, telemetry: Telemetry
) -> None:
    response = ask(page.url, "POST", "/checkpoint", b"{}")
    assert response.status == 202
    assert "next step boundary" in json.loads(response.text)["message"]
    assert telemetry.take_save_request()
    assert not telemetry.take_save_request()


def test_one_profile_at_a_time_is_requested_from_the_loop(
    page: NodePage, telemetry: Telemetry
) -> None:
    requests = telemetry.profile_requests
    assert requests.take() == 0
    assert ask(page.url, "POST", "/profile", b'{"steps": 10}').status == 202
    assert ask(page.url, "POST", "/profile").status == 409  # not begun
    assert requests.take() == 10
    assert requests.take() == 0
    assert ask(page.url, "POST", "/profile").status == 409  # being recorded
    written = ProfileReport(first_step=3, last_step=12, path="run/profiles/a")
    telemetry.profiled(written)
    text = ask(page.url, "GET", "/progress").text
    assert Progress.model_validate_json(text).profile == written
    assert ask(page.url, "POST", "/profile", b"{}").status == 202
    assert requests.take() == 3


@pytest.mark.parametrize(
    "body",
    [
        b'{"steps": 0}',
        b'{"steps": 11}',
        b'{"steps": "3"}',
        b'{"steps": true}',
        b'{"steps": 2.5}',
        b'{"steps": null}',
        b'{"step": 3}',
        b"[3]",
        b"3",
        b"steps=3",
        b"\xff",
    ],
)
def test_a_wrong_request_for_a_profile_is_refused(
    page: NodePage, telemetry: Telemetry, body: bytes
) -> None:
    response = ask(page.url, "POST", "/profile", body)
    assert (response.status, "1 to 10" in response.text) == (400, True)
    assert telemetry.profile_requests.take() == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/profile", 405),
        ("GET", "/checkpoint", 405),
        ("POST", "/metrics", 405),
        ("POST", "/progress", 405),
        ("POST", "/elsewhere", 404),
        ("DELETE", "/checkpoint", 405),
        ("PUT", "/elsewhere", 404),
    ],
)
def test_anything_else_is_refused_without_effect(
    page: NodePage, telemetry: Telemetry, method: str, path: str, status: int
) -> None:
    assert ask(page.url, method, path).status == status
    assert not telemetry.take_save_request()


def test_a_large_body_is_refused_unread(page: NodePage, telemetry: Telemetry) -> None:
    assert ask(page.url, "POST", "/checkpoint", b"x" * 1025).status == 413
    assert not telemetry.take_save_request()


def test_a_checkpoint_or_profile_cannot_be_requested_over_the_network(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # sends no packet; chooses this machine's own address
        except OSError as error:
            pytest.skip(f"this machine has only loopback addresses: {error}")
        address = route.getsockname()[0]
    config = TelemetryConfig(metrics_port=free_ports(1), metrics_host="0.0.0.0")
    with node_page(config, 0, 1) as page, ExitStack() as stack:
        telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=Shared(page, 0))
        stack.callback(telemetry.close)
        telemetry.step(step(3))
        url = f"http://{address}:{config.metrics_port}/metrics"
        for path in ("/checkpoint", "/profile"):
            response = ask(url, "POST", path, b"{}")
            assert response.status == 403
            assert "inside the pod" in json.loads(response.text)["message"]
        assert telemetry.profile_requests.take() == 0
        assert ask(url, "GET", "/progress").status == 200
        assert not telemetry.take_save_request()
        assert ask(page.url, "POST", "/checkpoint", b"{}").status == 202
        assert telemetry.take_save_request()


def test_a_silent_client_does_not_block_others(page: NodePage) -> None:
    assert page.url is not None
    url = urlsplit(page.url)
    with socket.create_connection((url.hostname, url.port)):
        assert scrape(page.url) == {}


def test_before_rank_0_has_begun_its_page_asks_for_a_retry(page: NodePage) -> None:
    for method, path in (("GET", "/progress"), ("POST", "/checkpoint")):
        response = ask(page.url, method, path)
        assert response.status == 503
        assert "rank 0 has not reported" in json.loads(response.text)["message"]


def test_another_node_has_its_own_ranks_and_sends_to_the_node_of_rank_0(
    serve: Callable[..., NodePage],
) -> None:
    second = serve(first_rank=2)
    Shared(second, 3)
    assert scrape(second.url)["finetune_train_steps_total", "3"] == 0
    for method, path in (("GET", "/progress"), ("POST", "/checkpoint")):
        response = ask(second.url, method, path)
        assert response.status == 404
        assert "rank 0 is on another node" in json.loads(response.text)["message"]


def test_a_taken_port_is_a_warning_of_the_first_rank_and_the_next_one_serves(
    tmp_path: Path, serve: Callable[..., NodePage], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(2)
    with socket.create_server(("0.0.0.0", port)):
        page = serve(port=port, host="0.0.0.0")
    first, second = (
        Telemetry(train_config(tmp_path), rank=rank, world_size=2, shared=Shared(page, rank))
        for rank in (0, 1)
    )
    first.close()
    second.close()
    assert first.progress.metrics_url == f"http://127.0.0.1:{port + 1}/metrics"
    assert ("finetune_train_steps_total", "1") in scrape(page.url)
    (warning,) = first.progress.warnings
    assert warning == (
        f"spec.observability.metricsPort {port} on 0.0.0.0 cannot be used "
        f"(Address already in use); serving on {port + 1} instead"
    )
    assert warning in capsys.readouterr().err
    assert second.progress.warnings == ()


def test_twenty_taken_ports_are_a_warning_and_training_continues(
    tmp_path: Path, serve: Callable[..., NodePage]
) -> None:
    first = free_ports(20)
    with ExitStack() as stack:
        for port in range(first, first + 20):
            stack.enter_context(socket.create_server(("0.0.0.0", port)))
        page = serve(port=first, host="0.0.0.0")
    shared = Shared(page, 0)
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=shared)
    telemetry.step(step(1))
    telemetry.close()
    assert telemetry.progress.metrics_url is None
    assert telemetry.progress.warnings == (
        f"spec.observability.metricsPort {first} to {first + 19} on 0.0.0.0 cannot be used "
        "(Address already in use); no metrics are served; choose another port",
    )


def test_on_this_machine_any_free_port_serves_without_a_warning(
    tmp_path: Path, serve: Callable[..., NodePage]
) -> None:
    first = free_ports(22)
    with ExitStack() as stack:
        for port in range(first, first + 21):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        page = serve(port=first)
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=2, shared=Shared(page, 0))
    telemetry.close()
    assert telemetry.progress.metrics_url == f"http://127.0.0.1:{first + 21}/metrics"
    assert telemetry.progress.warnings == ()


def test_port_0_serves_nothing(serve: Callable[..., NodePage]) -> None:
    assert serve(port=0) == NodePage()


def test_when_a_page_ends_its_port_and_its_folder_are_free() -> None:
    port = free_ports(1)
    with node_page(TelemetryConfig(metrics_port=port), 0, 1) as page:
        Shared(page, 0)
        assert page.folder is not None
        assert Path(page.folder).exists()
    assert not Path(page.folder).exists()
    socket.create_server(("127.0.0.1", port)).close()
    assert page_processes(os.getpid()) == []


def test_its_process_is_small_has_no_torch_and_hears_no_signal_to_stop(page: NodePage) -> None:
    scrape(page.url)
    (process,) = page_processes(os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    scrape(page.url)
    assert process.memory_info().rss < 40 * 2**20
    assert not [one.path for one in process.memory_maps() if "/torch/" in one.path]


def test_a_page_that_is_killed_comes_back_with_what_it_knew(page: NodePage, tmp_path: Path) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=Shared(page, 0))
    telemetry.step(step(1))
    telemetry.step(step(2))
    telemetry.close()
    before = scrape(page.url)
    (process,) = page_processes(os.getpid())
    process.kill()
    after = scrape(page.url)  # whoever asks meanwhile waits for the next process
    assert [one.pid for one in page_processes(os.getpid())] != [process.pid]
    steps = ("finetune_train_steps_total", "0")
    assert after[steps] == before[steps] == 2


# Reports a step, and tells when on this machine's monotonic clock that was.
BE_A_RANK = """
import ctypes, sys, time
from pathlib import Path
from finetune_trainer.config import TrainConfig
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.shared import NodePage, Shared
config, page, rank, act = sys.argv[1:]
shared = Shared(NodePage.model_validate_json(page), int(rank))
telemetry = Telemetry(
    TrainConfig.model_validate_json(config), rank=int(rank), world_size=4, shared=shared
)
step = StepReport(
    step=1, epoch=0, loss=1, grad_norm=1, learning_rate=1, tokens=1, samples=1, seconds=1
)
telemetry.alive()
before = time.monotonic()
telemetry.step(step)
print(before, time.monotonic(), file=sys.stderr, flush=True)
while act == "run":
    telemetry.step(step)
    time.sleep(0.01)
if act == "hold the GIL":
    ctypes.PyDLL(None).sleep(600)
time.sleep(600)
"""


class Ranks:
    """Four ranks of one node, of which only the first continues."""

    def __init__(self, folder: Path, page: NodePage) -> None:
        self.acts = ("run", "hold the GIL", "be stopped", "die")
        config = train_config(folder).to_json()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", BE_A_RANK, config, page.to_json(), str(rank), act],
                env=clean_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, act in enumerate(self.acts)
        ]
        self.last_report = [self._times(process) for process in self.processes]
        os.kill(self.processes[2].pid, signal.SIGSTOP)
        self.processes[3].kill()
        self.processes[3].wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

    def _times(self, process: "subprocess.Popen[str]") -> tuple[float, float]:
        assert process.stderr is not None
        before, after = process.stderr.readline().split()
        return float(before), float(after)


@pytest.fixture
def ranks(tmp_path: Path, serve: Callable[..., NodePage]) -> Iterator[tuple[Ranks, NodePage]]:
    page = serve(num_ranks=4)
    started = Ranks(tmp_path, page)
    yield started, page
    started.close()


def test_the_page_answers_with_the_right_ages_while_ranks_run_hold_the_gil_are_stopped_or_dead(
    ranks: tuple[Ranks, NodePage],
) -> None:
    started, page = ranks
    asked = time.monotonic()
    found = scrape(page.url)
    answered = time.monotonic()
    for rank in (1, 2, 3):
        before, after = started.last_report[rank]
        assert asked - after <= found[AGE, str(rank)] <= answered - before, started.acts[rank]
    assert [found["finetune_train_steps_total", str(rank)] for rank in (1, 2, 3)] == [1, 1, 1]

    def only_rank_0_is_heard_of() -> bool:
        newer = scrape(page.url)
        *ages, of_rank_0 = (newer[AGE, str(rank)] for rank in (3, 2, 1, 0))
        return min(ages) > 1 > of_rank_0

    until(only_rank_0_is_heard_of)
    memory = [("finetune_train_memory_bytes", "host_rss", str(rank)) for rank in range(4)]
    assert [key in scrape(page.url) for key in memory] == [True, True, True, False]


@dataclass
class Run:
    """A main process that was started, and the page of its node."""

    main: Launch
    url: str

    @property
    def pid(self) -> int:
        return self.main.process.pid

    def count(self) -> float:
        """Return how many steps rank 0 has counted."""
        return scrape(self.url)["finetune_train_steps_total", "0"]

    def progress(self) -> Progress:
        return Progress.model_validate_json(ask(self.url, "GET", "/progress").text)

    def page_process(self) -> psutil.Process:
        (found,) = page_processes(self.pid)
        return found

    def stop(self) -> None:
        """End it as a cluster does, and see that it ends well."""
        self.main.process.terminate()
        assert self.main.wait() == 75, self.main.stderr


@pytest.fixture
def run(start: Callable[..., Launch], tmp_path: Path) -> Callable[..., Run]:
    """Start a main process on ranks that make steps until they are told to stop."""

    def run(port: int | None = None, environ: dict[str, str] | None = None, **changes: Any) -> Run:
        port = free_ports(1) if port is None else port
        config = train_config(tmp_path, telemetry={"metrics_port": port}, **changes)
        return Run(start(config, "train", environ), f"http://127.0.0.1:{port}/metrics")

    return run


def test_every_rank_of_a_node_is_on_the_page_of_its_supervisor(run: Callable[..., Run]) -> None:
    one = run()
    one.main.pids_of_ranks()
    found = scrape(one.url)
    assert all(found["finetune_train_steps_total", rank] >= 1 for rank in "01")
    assert one.progress().step >= 1
    one.stop()
    progress = one.main.termination.progress
    assert progress is not None
    assert progress.metrics_url == one.url


def test_a_page_ends_with_its_supervisor_even_when_that_is_killed(run: Callable[..., Run]) -> None:
    one = run()
    one.main.pids_of_ranks()
    page = one.page_process()
    folder = folder_of(page)
    assert folder.exists()
    one.main.process.kill()
    until(lambda: not is_alive(page.pid), timeout=30)
    until(lambda: not folder.exists(), timeout=30)
    assert one.main.wait() == -signal.SIGKILL


@pytest.mark.full
def test_counters_continue_over_a_restart_in_place_and_the_page_responds_throughout(
    run: Callable[..., Run],
) -> None:
    one = run(world={"restarts_in_place": 1})
    first, _ = one.main.pids_of_ranks()
    page = one.page_process()
    counts = [one.count()]
    while counts[-1] <= 20:
        counts.append(one.count())
    os.kill(first, signal.SIGKILL)
    while (progress := one.progress()).restarts_in_place == 0 or progress.step <= 5:
        counts.append(one.count())
    assert counts == sorted(counts)
    assert one.count() > 25
    assert one.page_process().pid == page.pid
    one.stop()


def test_each_node_has_a_page_with_its_own_ranks(run: Callable[..., Run], tmp_path: Path) -> None:
    first, store = free_ports(2), str(free_port())
    nodes = []
    for node in (0, 1):  # both on this machine, so the second has to go to the next port
        place = {"FINETUNE_NODE_RANK": str(node), "FINETUNE_RDZV_ENDPOINT": f"127.0.0.1:{store}"}
        nodes.append(run(first, place, world={"nnodes": 2, "nproc_per_node": 1}))
        until(lambda: bool(page_processes(nodes[-1].pid)))
    nodes[0].main.wait_for_step(0)
    nodes[0].main.wait_for_step(1)
    urls = (nodes[0].url, f"http://127.0.0.1:{first + 1}/metrics")
    ranks = [{key[-1] for key in scrape(url) if key[0] == AGE} for url in urls]
    assert ranks == [{"0"}, {"1"}]
    assert [ask(url, "GET", "/progress").status for url in urls] == [200, 404]
    assert [one for one in nodes[1].main.events(1) if one["event"] == "warning"] == []
    for one in nodes:
        one.stop()


@pytest.mark.full
def test_ranks_of_another_launcher_share_the_page_that_the_first_of_them_serves(
    run: Callable[..., Run],
) -> None:
    port, store = free_ports(1), str(free_port())
    ranks = []
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store}
        ranks.append(run(port, place | address))
    for one in ranks:
        one.main.pids_of_ranks()
    found = scrape(ranks[0].url)
    assert all(found["finetune_train_steps_total", rank] >= 1 for rank in "01")
    page = ranks[0].page_process()
    folder = folder_of(page)
    assert page_processes(ranks[1].pid) == []
    ranks[0].main.process.kill()
    until(lambda: not is_alive(page.pid), timeout=30)
    until(lambda: not folder.exists(), timeout=30)
    assert [one.main.wait() != 0 for one in ranks] == [True, True]
