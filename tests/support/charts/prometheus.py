"""A real Prometheus on this machine, with the chart's rules and relabelings.

Debian's package `prometheus` brings it; without it, tests say why they are skipped.
"""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from monitoring.groups import rule_file
from monitoring.windows import Windows, duration
from support.charts.helm_chart import of_kind, rendered
from support.launch.launches import until
from support.telemetry.node_pages import free_ports

PROGRAM = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None, reason="prometheus is not on the PATH (Debian's package prometheus)"
)

Labels = dict[str, str]


@dataclass(frozen=True)
class Target:
    """A page that is scraped.

    Attributes:
        address: host and port.
        labels: those that service discovery would give it.
        endpoint: of a monitor of the chart: what it says of the scrape.
    """

    name: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    endpoint: Mapping[str, Any] = field(default_factory=dict)

    def to_config(self) -> dict[str, Any]:
        """Return what the Prometheus Operator makes of such an endpoint."""
        rules = [
            {
                "source_labels": list(one["sourceLabels"]),
                "target_label": one["targetLabel"],
            }
            for one in self.endpoint.get("relabelings", ())
        ]
        return {
            "job_name": self.name,
            "metrics_path": self.endpoint.get("path", "/metrics"),
            "honor_labels": self.endpoint.get("honorLabels", False),
            "relabel_configs": rules,
            "static_configs": [{"targets": [self.address], "labels": dict(self.labels)}],
        }


@dataclass(frozen=True)
class Alert:
    """One that fires: its labels, its name among them, and all that it says."""

    labels: Labels
    text: str


def scraped_by(kind: str) -> dict[str, Any]:
    """Return what a monitor of the chart says of a scrape."""
    (made,) = of_kind(rendered(monitoring={"monitors": {"create": True}}), kind)
    listed = made["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    return dict(listed[0])


def filled(expr: str, variables: Mapping[str, str], windows: Windows) -> str:
    """Return a panel's query with the values that a user chooses."""
    for name, value in {"__rate_interval": duration(windows.rate), **variables}.items():
        expr = expr.replace(f"${name}", value)
    return expr


class Prometheus:
    """One that runs; a context manager.

    Args:
        folder: for its configuration and its data.
        targets: what it scrapes, as often as it evaluates the rules.
        windows: of the rules.
    """

    def __init__(self, folder: Path, targets: Sequence[Target], windows: Windows) -> None:
        self._url = f"http://127.0.0.1:{free_ports(1)}"
        self._folder = folder
        interval = duration(windows.interval)
        (folder / "rules.yaml").write_text(yaml.safe_dump(rule_file(windows)))
        configuration = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [one.to_config() for one in targets],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        log = (self._folder / "prometheus.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                [
                    PROGRAM,
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    "--storage.tsdb.retention.time=10y",  # also of series that a test recorded
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        until(self._is_ready, 60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, expr: str, at: float | None = None) -> list[tuple[Labels, float]]:
        """Return the series of an answer, by their labels, now or at a time."""
        moment = {} if at is None else {"time": f"{at}"}
        result = self._get("query", {"query": expr, **moment})["result"]
        if result and not isinstance(result[0], dict):  # a scalar: time and value
            return [({}, float(result[1]))]
        return [(one["metric"], float(one["value"][1])) for one in result]

    def ask_range(
        self, expr: str, begin: float, end: float, step: float
    ) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """Return the series of a response with a point for each step between two times."""
        between = {"start": f"{begin}", "end": f"{end}", "step": f"{step}"}
        return [
            (one["metric"], [(time, float(value)) for time, value in one["values"]])
            for one in self._get("query_range", {"query": expr, **between})["result"]
        ]

    def firing(self) -> list[Alert]:
        """Return the alerts that fire."""
        return [
            Alert(one["labels"], " ".join(one["annotations"].values()))
            for one in self._get("alerts", {})["alerts"]
            if one["state"] == "firing"
        ]

    def _get(self, what: str, query: Mapping[str, str]) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)["data"]
        return found
