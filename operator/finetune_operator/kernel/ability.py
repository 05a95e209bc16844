"""Checks that this replica can work: its account's permissions and the cluster's CRDs.

Each replica checks itself, because a standby that may not use the Lease could not take over. A
round of checks runs at the start, after a refused request and at each resync interval, and every
few seconds while a permission is missing. The last result stays valid while the API server does not
respond.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from finetune_operator.kernel.definitions import NAMES, check_definition
from finetune_operator.kernel.events import COMPONENT
from finetune_operator.kernel.rights import Right, Rights, command_for
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import (
    CRDS,
    EVENTS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    LEASES,
    Object,
)

log = logging.getLogger(__name__)

_SOON_SECONDS = 3.0
"""Time between two rounds while a permission is missing, or before the first response."""

_ROUND_SECONDS = 10.0
"""Timeout for a whole round; without it a hanging API server would go unreported."""

_REPEAT_SECONDS = 600.0
"""Time after which missing permissions are reported again, because Events expire after an hour."""

_UNKNOWN = "the API server has not reviewed the rights of this replica yet"


class Ability:
    """Finds and reports what prevents this replica from working.

    Args:
        client: Sends the checks and posts Events about this replica's pod; must work without the
            Lease.
        settings: Settings of the process.

    Attributes:
        faults: Problems, each a sentence with the command that fixes it; None before the first
            round has completed.
        is_outdated: Whether a CustomResourceDefinition is older than this operator, which must not
            write then.
    """

    def __init__(self, client: KubeClient, settings: Settings) -> None:
        self.faults: tuple[str, ...] | None = None
        self.is_outdated = False
        self._client = client
        self._settings = settings
        self._rights = Rights(client)
        self._requested = asyncio.Event()
        self._changed = asyncio.Event()
        self._silence = ""
        self._loop = asyncio.get_running_loop()
        self._reported_at = self._loop.time()

    @property
    def is_able(self) -> bool:
        """Whether the last round found no problem."""
        return self.faults == ()

    @property
    def complaints(self) -> tuple[str, ...]:
        """Sentences that explain why this replica is not Ready."""
        return (f"{_UNKNOWN}{self._silence}",) if self.faults is None else self.faults

    def recheck(self) -> None:
        """Start another round: the API server has refused a request."""
        self._requested.set()

    async def run(self) -> None:
        """Repeat the checks until cancelled."""
        while True:
            self._requested.clear()
            await self._round()
            wait = self._settings.resync_seconds * random.uniform(0.8, 1.0)
            if self._silence or not self.is_able:
                wait = min(wait, _SOON_SECONDS)
            try:
                async with asyncio.timeout(wait):
                    await self._requested.wait()
            except TimeoutError:
                continue

    async def until_current(self) -> None:
        """Return once the CustomResourceDefinitions are known to be no older than the operator."""
        await self._until(lambda: self.faults is not None and not self.is_outdated)

    async def until_outdated(self) -> None:
        """Return once a CustomResourceDefinition is older than the operator."""
        await self._until(lambda: self.is_outdated)

    async def _until(self, check: Callable[[], bool]) -> None:
        while not check():
            await self._changed.wait()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(_ROUND_SECONDS):
                faults = await self._check()
        except (ApiError, TimeoutError) as error:
            message = str(error) or "no response before the timeout"
            if not self._silence:
                log.warning("rights cannot be reviewed", extra={"error": message})
            self._silence = f" ({message})"
            return
        self._silence = ""
        before, self.faults = self.faults, faults
        self._changed.set()
        self._changed = asyncio.Event()
        is_late = self._loop.time() - self._reported_at > _REPEAT_SECONDS
        if faults != before or (faults and is_late):
            await self._report(faults)

    async def _check(self) -> tuple[str, ...]:
        definitions = await asyncio.gather(*(self._check_definition(name) for name in NAMES))
        rights = await asyncio.gather(
            self._missing_for_lease(), self._missing_for_jobs(), self._missing_for_profiles()
        )
        self.is_outdated = any(is_older for _, is_older in definitions)
        sentences = [fault for fault, _ in definitions]
        missing = [right for some in rights for right in some]
        account = await self._rights.account() if missing else ""
        sentences += [_sentence(account, right) for right in missing]
        return tuple(filter(None, sentences))

    async def _check_definition(self, name: str) -> tuple[str, bool]:
        """Return the problem of a CRD as a sentence, and whether it is older than this operator."""
        try:
            problem = await check_definition(self._client, name)
        except ForbiddenError:
            right = Right(CRDS, ("get",), name=name)
            return _sentence(await self._rights.account(), right), False
        return (
            (f"{problem.message}; fix it with: {problem.remedy}", problem.is_older)
            if problem
            else ("", False)
        )

    async def _missing_for_lease(self) -> list[Right]:
        settings = self._settings
        if not settings.leader_election:
            return []
        name, namespace = settings.lease_name, settings.lease_namespace
        use = await self._rights.missing(Right(LEASES, ("get", "update"), namespace, name))
        create = await self._rights.missing(Right(LEASES, ("create",), namespace))
        if use is None and create is not None and await self._has_lease():
            create = None
        return [right for right in (use, create) if right]

    async def _has_lease(self) -> bool:
        settings = self._settings
        try:
            await self._client.get(LEASES, settings.lease_name, settings.lease_namespace)
        except NotFoundError:
            return False
        return True

    async def _missing_for_jobs(self) -> list[Right]:
        """Return the missing permission if FineTuneJobs cannot be listed in any namespace.

        If only some namespaces are refused, the operator serves the others.
        """
        first = None
        for place in self._settings.namespaces or (None,):
            missing = await self._rights.missing(Right(FINE_TUNE_JOBS, ("list", "watch"), place))
            if missing is None:
                return []
            first = first or missing
        return [first] if first else []

    async def _missing_for_profiles(self) -> list[Right]:
        missing = await self._rights.missing(Right(FINE_TUNE_PROFILES, ("list", "watch")))
        return [missing] if missing else []

    async def _report(self, faults: tuple[str, ...]) -> None:
        self._reported_at = self._loop.time()
        if not faults:
            log.info("able to work")
        for fault in faults:
            log.warning("not ready", extra={"fault": fault})
            await self._post(fault)

    async def _post(self, fault: str) -> None:
        """Post an Event about this replica's pod, which `kubectl describe pod` shows."""
        settings = self._settings
        if not settings.pod_uid:
            return
        try:
            await self._client.create(EVENTS, _event(settings, fault), settings.lease_namespace)
        except ApiError as error:
            log.warning("event not posted", extra={"error": str(error)})


def _sentence(account: str, right: Right) -> str:
    who = account or "the operator's account"
    return f"{who} may not {right}; fix it with: {command_for(right, account)}"


def _event(settings: Settings, fault: str) -> Object:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"name": f"{settings.pod_name}.{time.time_ns():x}"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": settings.pod_name,
            "namespace": settings.lease_namespace,
            "uid": settings.pod_uid,
        },
        "type": "Warning",
        "reason": "NotReady",
        "message": fault[:1024],
        "source": {"component": COMPONENT, "host": settings.identity},
        "reportingComponent": COMPONENT,
        "reportingInstance": settings.identity,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
