"""`finetune-operator`: campaigns for the Lease, leads, and campaigns again once it is lost.

Settings come from the environment (`settings.py`); SIGTERM and SIGINT end the process after it has
released the Lease.
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from finetune_operator import __version__
from finetune_operator.backends.base import Backend
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.ability import Ability
from finetune_operator.kernel.election import Election, LeaseOptions
from finetune_operator.kernel.health import Health, HealthServer
from finetune_operator.kernel.kopf_events import join_threads
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kernel.logs import set_up
from finetune_operator.kernel.settings import Settings, read_settings
from finetune_operator.kube.client import CallCounts, ClientOptions, KubeClient
from finetune_operator.kube.config import load_access
from finetune_operator.kube.http import HttpClient
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.page import Snapshot

log = logging.getLogger(__name__)

_JOIN_SECONDS = 3.0
_SWITCH_SECONDS = 0.001
"""Longest time that kopf's thread waits for the interpreter after each of its system calls.

With Python's 5 ms kopf delivered events of a job up to 27 s late while the event loop was busy with
10,000 other jobs.
"""


def main() -> None:
    """Run the operator until SIGTERM or SIGINT; exit code 1 if it cannot start."""
    try:
        settings = read_settings()
        set_up(settings.log_format, settings.log_level)
        _spare_garbage_collection()
        sys.setswitchinterval(_SWITCH_SECONDS)
        asyncio.run(_operate_until_signal(settings))
    except FineTuneError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _spare_garbage_collection() -> None:
    """Run the cyclic garbage collector rarely, and never on imported modules.

    Objects of the API server are trees, but with the default thresholds the collector takes a
    twelfth of the CPU time of a burst.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _free_term() -> None:
    """Free the caches of an ended term, which are in reference cycles.

    The collector runs so rarely that the memory of several terms would add up.
    """
    await asyncio.sleep(0)  # the event loop drops the cancelled tasks of the term
    gc.collect()


async def _operate_until_signal(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await operate(settings, stop)


async def operate(
    settings: Settings,
    stop: asyncio.Event,
    *,
    backends: Mapping[str, Backend | type[Backend]] | None = None,
    folder: Path | None = None,
) -> None:
    """Run the operator until `stop` is set; attempts run on.

    Args:
        settings: Settings of the operator.
        stop: Set it to end.
        backends: Backends by name; by default the backends of installed packages.
        folder: Base of `file://./x` in a manifest; by default the current folder.

    Raises:
        KubeConfigError: No cluster is configured.
        SettingsError: The health pages cannot be served at the configured address.
    """
    counts = Counts()
    make_term = partial(
        LeaderTerm, settings=settings, backends=backends, folder=folder, counts=counts
    )
    access = await load_access(settings.kubeconfig)
    process = _Process(settings, make_term, counts)
    client = HttpClient(access, process.client_options())
    # Checks, and Events about this replica's pod, do not depend on the Lease.
    own = HttpClient(access, replace(client.options, connections=4, seconds_to_write=None))
    own.calls = client.calls
    async with client, own, process.health_server() as health:
        log.info("started", extra={"version": __version__, "health_port": health.port})
        await process.run(client, Ability(own, settings), stop)
    # The Lease is released first. A thread that outlives the interpreter could crash the process.
    await asyncio.to_thread(join_threads, _JOIN_SECONDS)
    log.info("ended")


class _Process:
    """State that outlives a term: the election, and the content of the health pages."""

    def __init__(
        self, settings: Settings, make_term: Callable[..., LeaderTerm], counts: Counts
    ) -> None:
        self._settings = settings
        self._make_term = make_term
        self._election: Election | None = None
        self._ability: Ability | None = None
        self._term: LeaderTerm | None = None
        self._calls = CallCounts()
        self._counts = counts

    def client_options(self) -> ClientOptions:
        elects = self._settings.leader_election
        return ClientOptions(
            connections=self._settings.connections,
            request_seconds=self._settings.request_seconds,
            seconds_to_write=self._seconds_to_write if elects else None,
            user_agent=f"finetune-operator/{__version__}",
        )

    def health_server(self) -> HealthServer:
        settings = self._settings
        return HealthServer(
            settings.health_host,
            settings.health_port,
            settings.stuck_seconds,
            self._health,
            self._snapshot,
        )

    async def run(self, client: KubeClient, ability: Ability, stop: asyncio.Event) -> None:
        """Lead while this process holds the Lease and the CRDs are current, until `stop` is set."""
        self._calls, self._ability = client.calls, ability
        campaign = self._campaign if self._settings.leader_election else self._work_alone
        await _first_of(ability.run(), campaign(client, ability, stop))

    async def _work_alone(self, client: KubeClient, ability: Ability, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await _first_of(ability.until_current(), stop.wait())
            if not stop.is_set():
                await _first_of(self._lead(client, ability), ability.until_outdated(), stop.wait())
            await _free_term()

    async def _campaign(self, client: KubeClient, ability: Ability, stop: asyncio.Event) -> None:
        options = self._lease_options()
        election = self._election = Election(client, options, ability.recheck)
        while not stop.is_set():
            try:
                await _first_of(ability.until_current(), stop.wait())
                if not stop.is_set():
                    await _first_of(election.acquire(), ability.until_outdated(), stop.wait())
                if election.is_leading:
                    work = (self._lead(client, ability), election.hold())
                    await _first_of(*work, ability.until_outdated(), stop.wait())
            finally:
                await election.release()  # also after an error, so that a standby need not wait
                await _free_term()

    async def _lead(self, client: KubeClient, ability: Ability) -> None:
        gc.collect()  # an earlier term whose last calls had not ended when it was freed
        self._term = self._make_term(client, on_refused=ability.recheck)
        try:
            await self._term.run()
        finally:
            self._term = None

    def _lease_options(self) -> LeaseOptions:
        settings = self._settings
        return LeaseOptions(
            name=settings.lease_name,
            namespace=settings.lease_namespace,
            identity=settings.identity,
            lease_seconds=settings.lease_seconds,
            renew_deadline_seconds=settings.renew_deadline_seconds,
            renew_seconds=settings.renew_seconds,
        )

    def _seconds_to_write(self) -> float:
        return self._election.seconds_left() if self._election else 0.0

    def _health(self) -> Health:
        # A standby is ready: it waits for the Lease, and a rollout must not wait for it.
        health = self._term.health() if self._term else Health(is_ready=True)
        unable = self._complaints()
        counts = self._calls.by_kind.items()
        calls = {" ".join(map(str, kind)): count for kind, count in counts}
        is_ready = health.is_ready and self._ability is not None and not unable
        return replace(health, calls=calls, unable=unable, is_ready=is_ready)

    def _complaints(self) -> tuple[str, ...]:
        """Return why this replica cannot work, whether or not it leads."""
        found = self._ability.complaints if self._ability else ()
        # If the API server refuses access reviews, the refusal of the Lease is the only sign.
        refused = self._election.forbidden if self._election else ""
        return found or ((refused,) if refused else ())

    def _snapshot(self) -> Snapshot:
        shown = self._term.snapshot() if self._term else Snapshot(counts=self._counts)
        return replace(shown, calls=dict(self._calls.by_kind))


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Run all coroutines until the first has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
