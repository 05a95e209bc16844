"""Leader election by a Lease: one replica leads, the others wait.

The election of kubernetes.aio is not used: it cannot create the Lease, ends on a refused
connection, continues to lead while the API server hangs, and does not release the Lease. All times
are of the event loop's clock. They are never compared with times of another replica: a standby only
watches whether the renewal time in the Lease changes.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from finetune_operator.kube.api_errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
)
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import LEASES, Object

log = logging.getLogger(__name__)

_STANDBY_SECONDS = 1.0
"""Interval at which a standby reads the Lease, and so the longest delay of a takeover after expiry.
"""


@dataclass(frozen=True)
class LeaseOptions:
    """Name, holder and durations of a Lease; see `Settings` for the times.

    Attributes:
        identity: Name of this holder. A process that starts with the name of the current holder
            leads at once.
    """

    name: str
    namespace: str
    identity: str
    lease_seconds: float = 15.0
    renew_deadline_seconds: float = 10.0
    renew_seconds: float = 2.0


class Election:
    """Campaigns for one Lease; call its methods on one event loop.

    Args:
        client: Sends the requests.
        options: The Lease.
        on_forbidden: Called when the API server begins to refuse the Lease.

    Attributes:
        holder: Holder of the Lease when it was last read.
        forbidden: Message of the API server while it refuses the Lease; else empty.
    """

    def __init__(
        self,
        client: KubeClient,
        options: LeaseOptions,
        on_forbidden: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._options = options
        self._on_forbidden = on_forbidden
        self._loop = asyncio.get_running_loop()
        self._leads_until = float("-inf")
        self._seen: tuple[str, str] | None = None  # holder and renewal of another replica
        self._seen_at = 0.0  # when these were first read
        self.holder = ""
        self.forbidden = ""

    @property
    def is_leading(self) -> bool:
        """Whether this process may write now."""
        return self.seconds_left() > 0

    def seconds_left(self) -> float:
        """Return how long this process may write if no further renewal succeeds."""
        return self._leads_until - self._loop.time()

    async def acquire(self) -> None:
        """Return when this process leads; retries indefinitely after any error."""
        while True:
            began = self._loop.time()
            wait = await self._try()
            if wait is None:
                self._leads_until = began + self._options.renew_deadline_seconds
                log.info("leading", extra={"identity": self._options.identity})
                return
            await asyncio.sleep(wait)

    async def hold(self) -> None:
        """Renew the Lease; return once no renewal has succeeded for the renew deadline."""
        while True:
            await asyncio.sleep(min(self._options.renew_seconds, max(0.0, self.seconds_left())))
            if not self.is_leading:
                log.warning("lost the lease", extra={"identity": self._options.identity})
                return
            began = self._loop.time()
            wait = await self._try(self.seconds_left())
            if wait is None:
                self._leads_until = began + self._options.renew_deadline_seconds
            elif self.holder not in ("", self._options.identity):
                self._leads_until = float("-inf")

    async def release(self) -> None:
        """Release the Lease so that a standby need not wait for its expiry; call it when idle."""
        if not self.is_leading:
            return
        self._leads_until = float("-inf")
        try:
            async with asyncio.timeout(self._options.renew_seconds):
                lease = await self._client.get(LEASES, self._options.name, self._options.namespace)
                if lease["spec"].get("holderIdentity") != self._options.identity:
                    return
                spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._client.replace(LEASES, {**lease, "spec": spec}, self._options.namespace)
        except (ApiError, TimeoutError) as error:
            log.warning("could not release the lease", extra={"error": str(error)})
            return
        log.info("released the lease", extra={"identity": self._options.identity})

    async def _try(self, longest_seconds: float = math.inf) -> float | None:
        """Try once to become or stay the leader; return None, or the wait before the next try.

        The timeout is half of the renew deadline, so a hanging API server leaves time to retry.
        """
        try:
            seconds = min(longest_seconds, self._options.renew_deadline_seconds / 2)
            async with asyncio.timeout(seconds):
                wait = await self._acquire_or_renew()
        except (AlreadyExistsError, ConflictError):
            wait = _STANDBY_SECONDS  # another replica was faster
        except ForbiddenError as error:
            self._forbid(str(error))
            return _STANDBY_SECONDS
        except (ApiError, TimeoutError) as error:
            message = str(error) or "no response before the timeout"
            log.warning("the lease cannot be renewed", extra={"error": message})
            return _STANDBY_SECONDS
        self.forbidden = ""
        return wait

    def _forbid(self, message: str) -> None:
        if not self.forbidden:
            log.warning("the lease is forbidden", extra={"error": message})
            self._on_forbidden()
        self.forbidden = message

    async def _acquire_or_renew(self) -> float | None:
        options = self._options
        try:
            lease = await self._client.get(LEASES, options.name, options.namespace)
        except NotFoundError:
            lease = {"metadata": {"name": options.name}, "spec": self._spec({})}
            await self._client.create(LEASES, lease, options.namespace)
            self.holder = options.identity
            return None
        wait = self._seconds_held_by_another(lease)
        if wait > 0:
            return min(wait, _STANDBY_SECONDS)
        await self._client.replace(
            LEASES, {**lease, "spec": self._spec(lease["spec"])}, options.namespace
        )
        self.holder = options.identity
        return None

    def _seconds_held_by_another(self, lease: Object) -> float:
        """Return how long another replica holds the Lease, from its last renewal that we read."""
        spec = lease.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        if self.holder in ("", self._options.identity):
            return 0.0
        seen = (self.holder, str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._loop.time()
        lasts = float(spec.get("leaseDurationSeconds") or self._options.lease_seconds)
        return self._seen_at + lasts - self._loop.time()

    def _spec(self, old: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = old.get("holderIdentity") == self._options.identity
        changes = int(old.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._options.identity,
            "leaseDurationSeconds": max(1, round(self._options.lease_seconds)),
            "acquireTime": old.get("acquireTime") if is_ours else now,
            "renewTime": now,
            "leaseTransitions": changes if is_ours or not old else changes + 1,
        }
