"""Azure Scheduled Events: asks the metadata service whether this machine is about to be removed.

Started by `rank` in one process of each node. A spot node is warned at least 30 s ahead
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

SECONDS_BETWEEN_LOOKS = 1.0
_TIMEOUT_SECONDS = 2.0
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_LEAVES = ("Preempt", "Terminate")


def watch_scheduled_events(url: str, stop: StopSignal, log: Callable[..., None]) -> None:
    """Ask `url` every second from a thread; an event that takes this machine requests a stop.

    `log` receives a `message`, once, when the service cannot be asked or its answer is cut off.
    """
    arguments = (url, stop, log)
    threading.Thread(target=_watch, args=arguments, name="scheduled-events", daemon=True).start()


def _watch(url: str, stop: StopSignal, log: Callable[..., None]) -> None:
    machine, is_told = None, False
    while not stop.requested:
        try:
            machine = machine or _get(urljoin(url, _NAME))
            for event in json.loads(_get(url))["Events"]:
                if event["EventType"] in _LEAVES and machine in event["Resources"]:
                    stop.request(f"an Azure {event['EventType']} event", _notice_seconds(event))
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            if not is_told:
                log(message=f"Scheduled Events cannot be read from {url} ({error}); asking on")
            is_told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _get(url: str) -> str:
    """Ask the service; it refuses what comes through a proxy or without this header."""
    request = Request(url, headers={"Metadata": "true"})
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode())


def _notice_seconds(event: dict[str, Any]) -> float:
    """Return the time until the event; infinite where it has begun, as nobody knows its end."""
    begins = event.get("NotBefore")
    return parsedate_to_datetime(begins).timestamp() - time.time() if begins else float("inf")
