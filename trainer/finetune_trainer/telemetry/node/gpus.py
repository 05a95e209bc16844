"""Show the GPUs of this node on its page, by recent readings of the `nvml` process.

This process makes no driver calls. If the driver does not respond, the page lacks the GPU metrics
but is still served, and no code here waits for `nvml` to end.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from finetune_trainer.config import gpu_metrics
from finetune_trainer.config.metrics import Metric, MetricType

_SCRIPT = Path(__file__).with_name("nvml.py")
_SECONDS = 5.0
_PATIENCE_SECONDS = 20.0  # opening the driver of eight GPUs may take ten
_PREFIX = "finetune_gpu_"

Values = Sequence[tuple[str, Sequence[str], float]]
"""Series of a GPU: suffix of the metric's name, label values after the GPU, value."""


@dataclass(frozen=True)
class Reading:
    """Reading of one GPU, with its time on this machine's monotonic clock.

    Attributes:
        is_lost: Whether the driver has lost the GPU and reports only its last errors.
    """

    is_lost: bool
    values: Values
    at: float


class Gpus(Collector):
    """Starts the process that reads the GPUs and renders its newest readings."""

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        seconds: float = _SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """Start to read every `seconds` seconds.

        Args:
            warn: Receives each problem once, from a thread.
            seconds: Interval between readings.
            patience_seconds: A driver call that takes longer is a problem, and older readings are
                not shown.
        """
        self._warn = warn
        self._warned: set[str] = set()
        self._patience_seconds = patience_seconds
        self._readings: dict[str, Reading] = {}
        self._asked: str | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        words = (os.getpid(), seconds, gpu_metrics.MOST_XIDS)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        Thread(target=self._listen, name="gpus", daemon=True).start()

    def render(self) -> bytes:
        """Return the GPU part of the page in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with a value on at least one GPU, in the catalogue's order."""
        series = self._series()
        for metric in gpu_metrics.OF_GPU:
            make = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
            family = make(metric.name, metric.help, labels=metric.label_names)
            for uuid, values in series.items():
                for labels, value in values.get(metric.name, ()):
                    for found, number in _series_of(metric, labels, value):
                        family.add_metric((uuid, *found), number)
            if family.samples:
                yield family

    def _series(self) -> dict[str, dict[str, list[tuple[Sequence[str], float]]]]:
        """Return the current values by GPU and metric name."""
        oldest, asked = time.monotonic() - self._patience_seconds, self._asked
        found: dict[str, dict[str, list[tuple[Sequence[str], float]]]] = {}
        for uuid, reading in sorted(self._readings.copy().items()):
            named = found[uuid] = {}
            is_fresh = reading.at >= oldest
            if is_fresh or uuid == asked:
                is_visible = is_fresh and not reading.is_lost
                named[gpu_metrics.VISIBLE.name] = [((), float(is_visible))]
            for name, labels, value in reading.values if is_fresh else ():
                named.setdefault(_PREFIX + name, []).append((labels, value))
        return found

    def _listen(self) -> None:
        assert self.process.stdout is not None, "it was started with a pipe"
        with self.process.stdout as pipe:
            self._read_all(pipe.fileno())
        code = self.process.wait()  # returns soon: the process has closed its pipe
        if code or not self._warned:
            self._warn_once(f"the process that reads the GPUs has ended with code {code}")

    def _read_all(self, pipe: int) -> None:
        """Read messages until the process has ended."""
        rest = b""
        while True:
            if not select.select([pipe], [], [], self._patience_seconds)[0]:
                about = f" for {self._asked}" if self._asked else ""
                self._warn_once(
                    f"the GPU driver has not responded{about} for {self._patience_seconds:g} s; "
                    "metrics of GPUs are missing until it does"
                )
                select.select([pipe], [], [])
            if not (read := os.read(pipe, 65536)):
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._handle_message(json.loads(line))

    def _handle_message(self, message: dict[str, object]) -> None:
        match message:
            case {"problem": str(sentence)}:
                self._warn_once(f"{sentence}; training continues without these metrics of GPUs")
            case {"asking": str(uuid)}:
                self._asked = uuid
            case {"read": str(uuid), "isLost": bool(is_lost), "values": list(values)}:
                self._readings[uuid] = Reading(is_lost, values, time.monotonic())
                self._asked = None

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)


def _series_of(
    metric: Metric, labels: Sequence[str], value: float
) -> Iterator[tuple[Sequence[str], float]]:
    """Yield the series of one value; the recovery action becomes one series per action."""
    if metric is gpu_metrics.RECOVERY_ACTION:
        if 0 <= value < len(gpu_metrics.RECOVERY_ACTIONS):
            for number, action in enumerate(gpu_metrics.RECOVERY_ACTIONS):
                yield (action,), float(number == value)
    else:
        yield labels, value
