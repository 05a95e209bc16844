"""The page of a training node, as those read it who ask over HTTP."""

import errno
import http.client
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from socket import create_server
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

MODULE = "finetune_trainer.telemetry.node"

Series = dict[tuple[str, ...], float]
"""By name and the values of its labels, in the order of the labels' names."""


@dataclass(frozen=True)
class Answer:
    """What a page answered."""

    status: int
    headers: Message
    text: str


def ask(url: str | None, method: str, path: str, body: bytes | None = None) -> Answer:
    """Send one request to the server of a page, whose /metrics is at `url`."""
    assert url is not None, "there is no page"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())
    finally:
        connection.close()


def progress_of(address: str) -> str | None:
    """Return the progress on the page at host and port; None while rank 0 has not reported."""
    try:
        response = ask(f"http://{address}/metrics", "GET", "/progress")
    except (ConnectionRefusedError, TimeoutError):
        return None
    return response.text if response.status == 200 else None


def read_series(text: str) -> Series:
    """Return what a page's text has, as Prometheus reads it."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str | None) -> Series:
    """Return what the page has now."""
    answer = ask(url, "GET", "/metrics")
    assert answer.status == 200, answer.text
    return read_series(answer.text)


def page_processes(pid: int) -> list[psutil.Process]:
    """Return the processes below `pid` that serve a page."""
    below = psutil.Process(pid).children(recursive=True)
    return [one for one in below if MODULE in _command(one)]


def _command(process: psutil.Process) -> list[str]:
    """Return its command; empty for one that has just ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def folder_of(process: psutil.Process) -> Path:
    """Return where the ranks of a page leave what it shows."""
    arguments = process.cmdline()
    return Path(arguments[arguments.index(MODULE) + 1])


def free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that are free now, by chance.

    Other tests look for some at the same time, and the kernel gives those from 32768 to anybody.
    """
    while True:
        first = 20_000 + secrets.randbelow(12_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(create_server(("127.0.0.1", port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return first
