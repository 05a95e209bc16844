"""GPUs on the page of a node, by a compiled library in the place of the driver's."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_trainer.config import Progress, TelemetryConfig, gpu_metrics
from finetune_trainer.config.metrics import combinations
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.telemetry.node.start_page import node_page
from finetune_trainer.telemetry.shared import NodePage, Shared
from support.launch.launches import is_alive, train_config, until
from support.telemetry.fake_nvml import FakeNvml, compile_fake_nvml, compiler
from support.telemetry.node_pages import ask, free_ports, page_processes, scrape

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="no C compiler (cc) to make the fake libnvidia-ml.so.1 with"
)
FIRST, SECOND = "GPU-fake-0", "GPU-fake-1"
MOST_SERIES_OF_A_GPU = 120

Page = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return compile_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def happens(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Say what happens to the GPUs, of which processes see two from now on."""
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    fake.set()
    yield fake.set
    fake.set()


class Reader:
    """The part of a page that is about GPUs, which are read often."""

    def __init__(self, patience_seconds: float = 60) -> None:
        self.warnings: list[str] = []
        self._gpus = Gpus(self.warnings.append, seconds=0.05, patience_seconds=patience_seconds)

    def page(self) -> Page:
        """Return what it has now, by GPU, name and label."""
        return by_gpu(self._gpus.render().decode())

    def page_when(self, condition: Callable[[Page], bool]) -> Page:
        """Return the first page for which the condition holds."""
        pages: list[Page] = []

        def holds() -> bool:
            pages.append(self.page())
            return condition(pages[-1])

        until(holds, timeout=60)
        return pages[-1]

    def close(self) -> None:
        self._gpus.process.kill()
        until(lambda: not is_alive(self._gpus.process.pid))


def by_gpu(text: str) -> Page:
    found: Page = {}
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        if (gpu := sample.labels.get("gpu")) is not None:
            rest = (value for name, value in sample.labels.items() if name != "gpu")
            name = sample.name.removeprefix("finetune_gpu_")
            found.setdefault(gpu, {})[" ".join((name, *rest))] = sample.value
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Reader]]:
    started: list[Reader] = []

    def start(**options: float) -> Reader:
        started.append(Reader(**options))
        return started[-1]

    yield start
    for reader in started:
        reader.close()


def both_are_read(page: Page) -> bool:
    return {FIRST, SECOND} <= page.keys()


WHOLE = {
    "process_visible": 1,
    "utilization_ratio": 0.75,
    "memory_bandwidth_utilization_ratio": 0.4,
    "memory_bytes used": 60e9,
    "memory_bytes free": 85899345920 - 60e9 - 0.5e9,
    "memory_bytes reserved": 0.5e9,
    "memory_bytes total": 85899345920,
    "power_watts": 350.5,
    "power_limit_watts": 700,
    "energy_joules_total": 123456789,
    "temperature_celsius core": 61,
    "temperature_celsius memory": 80,
    "clock_hertz sm": 1.98e9,
    "clock_hertz memory": 2.619e9,
    "throttle_seconds_total sw_power_cap": 1.5,
    "throttle_seconds_total sw_thermal": 2.5,
    "throttle_seconds_total hw_thermal": 2.5,
    "throttle_seconds_total hw_power_brake": 2.5,
    "throttle_seconds_total sync_boost": 1.5,
    "ecc_errors_total corrected": 7,
    "ecc_errors_total uncorrected": 2,
    "row_remap correctable": 3,
    "row_remap uncorrectable": 1,
    "row_remap_pending": 1,
    "row_remap_failed": 0,
    **{f"recovery_action {one}": float(one == "none") for one in gpu_metrics.RECOVERY_ACTIONS},
    "nvlink_bytes_total tx": 4096 * 1024,
    "nvlink_bytes_total rx": 2048 * 1024,
    "nvlink_errors_total replay": 11,
    "nvlink_errors_total recovery": 12,
    "nvlink_errors_total crc": 13,
    "nvlink_up_links": 17,
    "pcie_bytes_total tx": 1000001,
    "pcie_bytes_total rx": 2000002,
    "pcie_errors_total replay": 5,
    "pcie_errors_total correctable": 21,
    "pcie_errors_total non_fatal": 22,
    "pcie_errors_total fatal": 23,
    "pcie_link_generation": 5,
    "pcie_link_width": 16,
}


def test_a_gpu_has_every_declared_series_in_its_unit(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    found = start().page_when(both_are_read)
    assert found[FIRST] == pytest.approx(WHOLE)
    assert found[SECOND]["utilization_ratio"] == 0.76
    assert found[SECOND]["recovery_action gpu_reset"] == 1
    declared = {
        " ".join((one.name.removeprefix("finetune_gpu_"), *values))
        for one in gpu_metrics.OF_GPU
        for values in combinations(one.labels[1:])
    }
    assert found[FIRST].keys() == declared


def test_what_the_driver_does_not_count_is_sampled(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    def is_sampled(page: Page) -> bool:
        return page.get(SECOND, {}).get("throttle_seconds_total hw_thermal", 0) > 0

    second = start().page_when(is_sampled)[SECOND]
    assert second["throttle_seconds_total sw_power_cap"] > 0
    assert second["throttle_seconds_total sync_boost"] == 0


def test_an_error_is_counted_with_its_time_and_a_storm_of_them_has_few_series(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    reader, before = start(), time.time()
    happens("xid")
    found = reader.page_when(lambda page: "xid_errors_total 79" in page.get(SECOND, {}))
    assert found[SECOND]["xid_errors_total 79"] == 1
    assert before <= found[SECOND]["xid_last_timestamp_seconds 79"] <= time.time()
    assert not [key for key in found[FIRST] if key.startswith("xid")]
    happens("storm")
    found = reader.page_when(lambda page: "xid_errors_total 1030" in page[SECOND])
    numbers = [key for key in found[SECOND] if key.startswith("xid_errors_total")]
    assert len(numbers) == gpu_metrics.MOST_XIDS
    assert "xid_errors_total 79" not in numbers
    assert len(found[SECOND]) <= MOST_SERIES_OF_A_GPU
    assert reader.warnings == []


def test_functions_that_a_driver_lacks_leave_out_their_series_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Reader]
) -> None:
    bare = compile_fake_nvml(tmp_path, is_bare=True)
    for name, value in bare.environ.items():
        monkeypatch.setenv(name, value)
    reader = start()
    assert reader.page_when(both_are_read)[FIRST] == pytest.approx(
        {
            "process_visible": 1,
            "utilization_ratio": 0.75,
            "memory_bandwidth_utilization_ratio": 0.4,
            "power_watts": 350.5,
        }
    )
    assert reader.warnings == [
        f"the driver does not report the errors of {gpu} (Function Not Found); training continues "
        "without these metrics of GPUs"
        for gpu in (FIRST, SECOND)
    ]


def test_a_lost_gpu_is_not_visible_and_the_others_are_read_on(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    reader = start()
    reader.page_when(both_are_read)
    happens("xid lost")
    found = reader.page_when(
        lambda page: (
            page[SECOND].keys()
            == {"process_visible", "xid_errors_total 79", "xid_last_timestamp_seconds 79"}
        )
    )
    assert found[SECOND]["process_visible"] == 0
    assert found[SECOND]["xid_errors_total 79"] == 1  # it came while no name could be asked for
    assert reader.page()[FIRST] == pytest.approx(WHOLE)
    until(lambda: reader.warnings != [])
    assert reader.warnings == [
        f"the driver has lost {SECOND}; drain and restart its node; training continues without "
        "these metrics of GPUs"
    ]
    happens()
    found = reader.page_when(lambda page: page[SECOND]["process_visible"] == 1)
    assert found[SECOND]["xid_errors_total 79"] == 1


def test_a_gpu_that_is_lost_from_the_start_is_a_warning_and_is_shown_once_it_is_back(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    happens("lost")
    reader = start()
    assert reader.page_when(lambda page: FIRST in page).keys() == {FIRST}
    assert reader.warnings == [
        "the driver does not show GPU 1 of this node (GPU is lost); training continues without "
        "these metrics of GPUs"
    ]
    happens()
    reader.page_when(both_are_read)


def test_a_call_that_does_not_return_hides_old_numbers_and_names_the_gpu_until_it_does(
    happens: Callable[..., None], start: Callable[..., Reader]
) -> None:
    reader = start(patience_seconds=1)
    reader.page_when(both_are_read)
    happens("hang")
    reader.page_when(lambda page: page == {SECOND: {"process_visible": 0}})
    sentence = (
        f"the GPU driver has not responded for {SECOND} for 1 s; metrics of GPUs are missing until "
        "it does"
    )
    until(lambda: sentence in reader.warnings)
    happens()
    found = reader.page_when(
        lambda page: both_are_read(page) and page[SECOND]["process_visible"] == 1
    )
    assert found[FIRST] == pytest.approx(WHOLE)
    assert reader.warnings.count(sentence) == 1


def serve(num_ranks: int = 2) -> AbstractContextManager[NodePage]:
    config = TelemetryConfig(metrics_port=free_ports(1))
    return node_page(config, 0, num_ranks, reads_gpus=True)


def test_a_page_answers_and_ends_while_the_driver_does_not(
    happens: Callable[..., None],
) -> None:
    happens("hang")
    with serve() as page:
        (process,) = page_processes(os.getpid())
        Shared(page, 0)
        until(lambda: FIRST in by_gpu(ask(page.url, "GET", "/metrics").text))
        assert ("finetune_train_steps_total", "0") in scrape(page.url)
        (reader,) = process.children()
        assert process.memory_info().rss < 40 * 2**20
    assert not process.is_running()
    until(lambda: not is_alive(reader.pid))


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        pytest.param("none", "NVML Shared Library Not Found", id="no library"),
        pytest.param("fake", "Driver Not Loaded", id="no driver"),
    ],
)
def test_without_nvml_there_is_one_warning_in_the_progress_and_training_goes_on(
    tmp_path: Path,
    happens: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
    reason: str,
) -> None:
    happens("no-driver")
    if library == "none":
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    now = 0.0
    with serve() as page:
        ranks = [
            Telemetry(
                train_config(tmp_path),
                rank=rank,
                world_size=2,
                shared=Shared(page, rank),
                clock=lambda: now,
            )
            for rank in (0, 1)
        ]

        def is_told() -> bool:
            nonlocal now
            now += 1
            for rank in ranks:
                rank.step(step())
            return ranks[0].progress.warnings != ()

        until(is_told)
        for _ in range(3):
            is_told()
        assert ranks[0].progress.warnings == (
            f"NVML cannot be used ({reason}); training continues without these metrics of GPUs",
        )
        assert ranks[1].progress.warnings == ()
        served = Progress.model_validate_json(ask(page.url, "GET", "/progress").text)
        assert served.warnings == ranks[0].progress.warnings
        assert scrape(page.url)["finetune_train_steps_total", "0"] >= 4
        assert by_gpu(ask(page.url, "GET", "/metrics").text) == {}
        for rank in ranks:
            rank.close()


def step() -> StepReport:
    return StepReport(
        step=1,
        epoch=0,
        loss=2.0,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=100,
        samples=4,
        seconds=0.5,
    )
