"""Poll Azure Scheduled Events, the metadata service's notice that this machine will be removed.

Started by `rank` in one process per node. A spot node gets at least 30 s notice
(learn.microsoft.com/azure/virtual-machines/linux/scheduled-events).
"""

import json
import threading
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin
from urllib.request import ProxyHandler, Request, build_opener

from finetune_trainer.control import StopSignal

SECONDS_BETWEEN_POLLS = 1.0
_TIMEOUT_SECONDS = 2.0
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_REMOVALS = ("Preempt", "Terminate")


def watch_scheduled_events(url: str, stop: StopSignal, log: Callable[..., None]) -> None:
    """Poll `url` every second from a thread; an event that removes this machine requests a stop.

    `log` receives one `message` if the service cannot be reached or its response is truncated.
    """
    arguments = (url, stop, log)
    threading.Thread(target=_watch, args=arguments, name="scheduled-events", daemon=True).start()


def _watch(url: str, stop: StopSignal, log: Callable[..., None]) -> None:
    machine, has_failed = None, False
    while not stop.requested:
        try:
            machine = machine or _get(urljoin(url, _NAME))
            for event in json.loads(_get(url))["Events"]:
                if event["EventType"] in _REMOVALS and machine in event["Resources"]:
                    stop.request(f"an Azure {event['EventType']} event", _notice_seconds(event))
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            if not has_failed:
                log(message=f"Scheduled Events cannot be read from {url} ({error}); retrying")
            has_failed = True
        time.sleep(SECONDS_BETWEEN_POLLS)


def _get(url: str) -> str:
    """Query the service, which refuses proxies and requests without this header."""
    request = Request(url, headers={"Metadata": "true"})
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as response:
        return str(response.read().decode())


def _notice_seconds(event: dict[str, Any]) -> float:
    """Return the time until the event; infinite if it has begun, because its end is unknown."""
    begins = event.get("NotBefore")
    return parsedate_to_datetime(begins).timestamp() - time.time() if begins else float("inf")
