"""The outlets of telemetry as others see them: over HTTP, in TensorBoard, on disk."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disks import fill
from finetune_trainer.config import Phase, Progress, TrainConfig
from finetune_trainer.telemetry import StepReport, Telemetry
from launches import clean_environment, train_config, until


def free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that are free now."""
    for first in range(21000, 60000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports on this machine")


def config_with_port(folder: Path, port: int) -> TrainConfig:
    return train_config(folder, telemetry={"metrics_port": port})


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    opened = Telemetry(config_with_port(tmp_path, free_ports(1)), rank=0, world_size=2)
    yield opened
    opened.close()


def ask(
    telemetry: Telemetry, method: str, path: str, body: bytes | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    """Return status, headers and text of one request to the exporter."""
    url = telemetry.progress.metrics_url
    assert url is not None
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


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


def test_the_metrics_page_is_what_prometheus_reads(telemetry: Telemetry) -> None:
    telemetry.step(step(1))
    status, headers, text = ask(telemetry, "GET", "/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["finetune_train_global_step"].samples[0].value == 1
    assert families["finetune_train_tokens"].type == "counter"


def test_progress_is_served_as_it_is_now(telemetry: Telemetry) -> None:
    telemetry.phase(Phase.TRAINING)
    telemetry.step(step(3))
    status, headers, text = ask(telemetry, "GET", "/progress")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert Progress.model_validate_json(text) == telemetry.progress


def test_a_posted_checkpoint_is_requested_from_the_loop(telemetry: Telemetry) -> None:
    status, _, text = ask(telemetry, "POST", "/checkpoint", b"{}")
    assert status == 202
    assert "next step boundary" in json.loads(text)["message"]
    assert telemetry.take_save_request()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/checkpoint", 405),
        ("POST", "/metrics", 405),
        ("POST", "/progress", 405),
        ("POST", "/elsewhere", 404),
        ("DELETE", "/checkpoint", 405),
        ("PUT", "/elsewhere", 404),
    ],
)
def test_anything_else_is_refused_and_changes_nothing(
    telemetry: Telemetry, method: str, path: str, status: int
) -> None:
    assert ask(telemetry, method, path)[0] == status
    assert not telemetry.take_save_request()


def test_a_large_body_is_refused_unread(telemetry: Telemetry) -> None:
    assert ask(telemetry, "POST", "/checkpoint", b"x" * 1025)[0] == 413
    assert not telemetry.take_save_request()


def test_a_client_that_says_nothing_blocks_nobody(telemetry: Telemetry) -> None:
    assert telemetry.progress.metrics_url is not None
    url = urlsplit(telemetry.progress.metrics_url)
    with socket.create_connection((url.hostname, url.port)):
        assert ask(telemetry, "GET", "/metrics")[0] == 200


def test_a_taken_port_is_a_warning_and_the_next_one_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)):
        telemetry = Telemetry(config_with_port(tmp_path, port), rank=0, world_size=1)
        try:
            assert telemetry.progress.metrics_url == f"http://127.0.0.1:{port + 1}/metrics"
            assert ask(telemetry, "GET", "/metrics")[0] == 200
        finally:
            telemetry.close()
    (warning,) = telemetry.progress.warnings
    assert f"spec.observability.metricsPort {port} on 127.0.0.1 cannot be used" in warning
    assert warning in capsys.readouterr().err


def test_twenty_taken_ports_are_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    first = free_ports(20)
    with ExitStack() as stack:
        for port in range(first, first + 20):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        telemetry = Telemetry(config_with_port(tmp_path, first), rank=0, world_size=1)
        telemetry.step(step(1))
        telemetry.close()
    assert telemetry.progress.metrics_url is None
    assert telemetry.progress.warnings[0] == (
        f"spec.observability.metricsPort {first} to {first + 19} on 127.0.0.1 cannot be used "
        "(Address already in use); no metrics are served; choose another port"
    )


def test_port_0_serves_nothing(tmp_path: Path) -> None:
    telemetry = Telemetry(config_with_port(tmp_path, 0), rank=0, world_size=1)
    telemetry.close()
    assert (telemetry.progress.metrics_url, telemetry.progress.warnings) == (None, ())


def test_the_port_is_free_again_after_closing(telemetry: Telemetry) -> None:
    port = urlsplit(telemetry.progress.metrics_url).port
    telemetry.close()
    assert port is not None
    socket.create_server(("127.0.0.1", port)).close()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return step and value of each point, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return [(event.step, event.value) for event in shown.Scalars(tag)]


def wait_for_the_next_second() -> None:
    """Event files are ordered by the second they were made in; real attempts lie further apart."""
    began = int(time.time())
    while int(time.time()) == began:
        pass


def test_tensorboard_shows_one_curve_over_a_resume(tmp_path: Path) -> None:
    config = config_with_port(tmp_path, 0)
    first = Telemetry(config, rank=0, world_size=1)
    first.evaluated(0, 3.0, 1.0)
    for number in range(1, 6):
        first.step(step(number))
    first.close()
    wait_for_the_next_second()
    second = Telemetry(config, rank=0, world_size=1)
    second.resumed(3)
    for number in range(4, 7):
        second.step(step(number))
    second.close()
    folder = tmp_path / "run" / "tensorboard"
    assert [point for point, _ in scalars(folder, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert scalars(folder, "eval/loss") == [(0, 3.0)]
    for tag in ("train/grad_norm", "train/learning_rate", "train/tokens_per_second"):
        assert len(scalars(folder, tag)) == 6


def test_a_disk_that_is_full_for_a_while_ends_no_training(small_disk: Path) -> None:
    telemetry = Telemetry(config_with_port(small_disk, 0), rank=0, world_size=1)
    telemetry.step(step(1))
    filler = fill(small_disk)
    for number in range(2, 400):
        telemetry.step(step(number))
        telemetry.phase(Phase.TRAINING)
    [warning] = telemetry.progress.warnings
    assert warning.startswith(f"{small_disk}/run cannot be written (No space left on device)")
    assert Progress.read(small_disk / "run" / "progress.json").step == 1
    filler.unlink()
    wait_for_the_next_second()
    telemetry.phase(Phase.EVALUATING)
    telemetry.step(step(400))
    telemetry.close()
    assert Progress.read(small_disk / "run" / "progress.json").step == 400
    journal = (small_disk / "run" / "logs" / "rank-0.jsonl").read_text().splitlines()
    told = [json.loads(line).get("step") for line in journal]
    assert (told[-1], told.count(1)) == (400, 1)
    assert [point for point, _ in scalars(small_disk / "run/tensorboard", "train/loss")][-1] == 400


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from finetune_trainer.config import Phase, TrainConfig
from finetune_trainer.telemetry import Telemetry
telemetry = Telemetry(TrainConfig.read(Path(sys.argv[1])), rank=0, world_size=1)
for number in range(10**9):
    telemetry.warn(f"{number} " + "x" * 500)
"""


def test_progress_is_never_seen_half_written_even_when_the_writer_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(train_config(tmp_path).to_json())
    progress = tmp_path / "run" / "progress.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(path)],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    seen = set()

    def has_raced_long_enough() -> bool:
        for _ in range(100):
            seen.add(Progress.read(progress).warnings[-1:])
        return len(seen) > 50

    try:
        until(progress.exists)
        until(has_raced_long_enough)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    Progress.read(progress)
    # The next attempt starts on whatever was left.
    Telemetry(train_config(tmp_path), rank=0, world_size=1).close()
    assert Progress.read(progress).phase is Phase.STARTING
