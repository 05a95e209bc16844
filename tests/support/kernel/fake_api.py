"""An API server in memory, behind the client's own verbs: as much of it as the kernel asks for.

No process, no network: for virtual time and for crashes at chosen writes. What it claims of a real
server, `tests/integration/kernel/test_process.py` shows on one.
"""

import asyncio
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

import orjson

from finetune_operator.kube.api_errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
)
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.client import Call, KubeClient, Listing, Propagation, WatchEvent
from finetune_operator.kube.resources import KUEUE_GROUP, PODS, Object, Resource
from finetune_operator.kube.watch import Trim
from finetune_operator.reconcile.conditions import rfc3339

T = TypeVar("T")
BeforeCall = Callable[[str, Resource, str], None]


class FakeApi(KubeClient):
    """One cluster; several clients may be made of it with `client`.

    Attributes:
        before: Called before each request with verb, resource and name; what it raises is the
            answer, and nothing has happened.
        after: Called after each write; what it raises is the answer, and it has happened.
        refused: Kinds that may not be listed or watched in a place, with the verbs; a watch that
            runs goes on.
        is_hung: Requests are never answered.
        log_lines: What is in the log of each pod, by its name.
        answer_lag: Returns how long the answer to a write takes, after it has happened.
        watch_lag: Returns how long a watch waits before it tells of the next change.
        now: The server's clock.
        make_uid: Returns the uid of the next object.
        groups: API groups that are served.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: BeforeCall = lambda verb, resource, name: None
        self.after: BeforeCall = lambda verb, resource, name: None
        self.refused: dict[tuple[Resource, str | None], Sequence[str]] = {}
        self.is_hung = False
        self.log_lines: dict[str, list[str]] = {}
        self.answer_lag: Callable[[], float] = lambda: 0.0
        self.watch_lag: Callable[[], float] = lambda: 0.0
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.make_uid: Callable[[], str] = lambda: str(uuid.uuid4())
        self.groups = {KUEUE_GROUP}
        self.oldest_version = 0
        self._version = 0
        self._objects: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._log: list[tuple[int, str, WatchEvent]] = []
        self._changed = asyncio.Event()

    async def exchange(self, call: Call) -> Object:
        raise AssertionError("every verb is answered by itself, and nothing is sent")

    def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        raise AssertionError("watches and logs are answered by themselves")

    def objects(self, resource: Resource) -> list[Object]:
        """Return all objects of a kind, by name."""
        stored = self._objects[resource.plural]
        return [copied(stored[key]) for key in sorted(stored)]

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        await self._enter("get", resource, name)
        return copied(self._found(resource, name, namespace))

    async def serves(self, group: str) -> bool:
        await self._enter("get", Resource(group, "", "discovery", ""), "")
        return group in self.groups

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        trim: Trim | None = None,
    ) -> Listing:
        await self._enter("list", resource, "")
        self._authorize("list", resource, namespace)
        found = [
            trim(one) if trim else one
            for one in self.objects(resource)
            if namespace in (None, one["metadata"].get("namespace"))
            and _matches(one, label_selector)
            and _has_field(one, field_selector)
        ]
        return Listing(found, str(self._version))

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        name = body["metadata"]["name"]
        await self._enter("create", resource, name)
        key = Key(namespace or "", name)
        if key in self._objects[resource.plural]:
            raise AlreadyExistsError(409, "AlreadyExists", f"{resource} {name} already exists")
        made = copied(dict(body))
        made["metadata"] |= {"namespace": namespace or "", "uid": self.make_uid()}
        made["metadata"] |= {"generation": 1, "creationTimestamp": rfc3339(self.now())}
        return await self._answer(self._leave("create", resource, "ADDED", made))

    async def replace(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        name = body["metadata"]["name"]
        await self._enter("update", resource, name)
        self._check(self._found(resource, name, namespace), body)
        return await self._answer(self._leave("update", resource, "MODIFIED", copied(dict(body))))

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any],
        *,
        subresource: Literal["status"] | None = None,
    ) -> Object:
        await self._enter("patch", resource, name)
        there = self._found(resource, name, namespace)
        self._check(there, patch)
        made = copied(there)
        _merge(
            made,
            {
                key: value
                for key, value in patch.items()
                if key == "metadata" or (key == "status") == (subresource == "status")
            },
        )
        if made.get("spec") != there.get("spec"):
            made["metadata"]["generation"] += 1
        if made == there:
            return made
        is_released = "deletionTimestamp" in made["metadata"]
        if is_released and not made["metadata"].get("finalizers"):
            return await self._answer(self._leave("patch", resource, "DELETED", made))
        return await self._answer(self._leave("patch", resource, "MODIFIED", made))

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_seconds: float | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        await self._enter("delete", resource, name)
        there = self._found(resource, name, namespace)
        self._check(there, {"metadata": {"uid": uid} if uid else {}})
        if there["metadata"].get("finalizers"):
            made = copied(there)
            marks, end = made["metadata"], self.now() + timedelta(seconds=grace_seconds or 0)
            # A later deletion can only shorten it.
            if "deletionTimestamp" not in marks or rfc3339(end) < marks["deletionTimestamp"]:
                marks["deletionTimestamp"] = rfc3339(end)
                marks["deletionGracePeriodSeconds"] = int(grace_seconds or 0)
            await self._answer(self._leave("delete", resource, "MODIFIED", made))
            return
        try:
            made = self._leave("delete", resource, "DELETED", there)
        finally:
            self._collect(there["metadata"]["uid"])  # whether or not anybody hears of it
        await self._answer(made)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 300,
    ) -> AsyncIterator[WatchEvent]:
        await self._enter("watch", resource, "")
        self._authorize("watch", resource, namespace)
        at = int(resource_version)
        end = asyncio.get_running_loop().time() + timeout_seconds
        while True:
            self._changed.clear()
            self.before("event", resource, "")
            if at < self.oldest_version:
                raise GoneError(410, "Expired", "too old resource version")
            since = bisect_right(self._log, at, key=lambda entry: entry[0])
            news = [entry for entry in self._log[since:] if entry[1] == resource.plural]
            for version, _, event in news:
                at = version
                await asyncio.sleep(self.watch_lag())
                self.before("event", resource, "")
                is_there = namespace in (None, event.object["metadata"].get("namespace"))
                if is_there and _matches(event.object, label_selector):
                    yield WatchEvent(event.type, copied(event.object))
            if news:
                continue
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def log(
        self,
        name: str,
        namespace: str,
        *,
        container: str | None = None,
        tail: int | None = None,
        max_bytes: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        await self._enter("get", PODS, name)
        self._found(PODS, name, namespace)
        for line in self.log_lines.get(name, [])[-(tail or 0) :]:
            yield line

    def break_watches(self) -> None:
        """Wake every watch, so that `before` may end it."""
        self._changed.set()

    def forget_history(self) -> None:
        """Make every resourceVersion so far too old to watch from."""
        self.oldest_version = self._version

    def load(self, resource: Resource, stored: Object) -> None:
        """Store an object of another cluster with its status and uid."""
        self._leave("", resource, "ADDED", copied(stored))

    def remove(self, resource: Resource, name: str, namespace: str) -> None:
        """Take an object away, as somebody else would."""
        self._leave("", resource, "DELETED", self._found(resource, name, namespace))

    def _authorize(self, verb: str, resource: Resource, place: str | None) -> None:
        if verb in self.refused.get((resource, place), ()):
            said = f"{resource} is forbidden: cannot {verb} in {place or 'the cluster'}"
            raise ForbiddenError(403, "Forbidden", said)

    async def _enter(self, verb: str, resource: Resource, name: str) -> None:
        while self.is_hung:
            await asyncio.sleep(3600)
        self.before(verb, resource, name)
        await asyncio.sleep(0)

    async def _answer(self, made: Object) -> Object:
        """Return the answer to a write; watches may have told of it before."""
        await asyncio.sleep(self.answer_lag())
        return made

    def _leave(self, verb: str, resource: Resource, kind: str, made: Object) -> Object:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        key = key_of(made)
        if kind == "DELETED":
            self._objects[resource.plural].pop(key)
        else:
            self._objects[resource.plural][key] = made
        event = WatchEvent(kind, copied(made))
        self._log.append((self._version, resource.plural, event))
        self._changed.set()
        if verb:
            self.calls.add(verb, resource.plural, 200)
            self.after(verb, resource, key.name)
        return copied(made)

    def _found(self, resource: Resource, name: str, namespace: str | None) -> Object:
        there = self._objects[resource.plural].get(Key(namespace or "", name))
        if there is None:
            raise NotFoundError(404, "NotFound", f'{resource} "{name}" not found')
        return there

    def _check(self, there: Object, wanted: Mapping[str, Any]) -> None:
        for field in ("uid", "resourceVersion"):
            value = wanted.get("metadata", {}).get(field)
            if value is not None and value != there["metadata"][field]:
                raise ConflictError(409, "Conflict", f"{field} is not {value}")

    def _collect(self, uid: str) -> None:
        for plural, stored in list(self._objects.items()):
            for one in list(stored.values()):
                owners = one["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == uid for owner in owners):
                    self._leave("", Resource("", "", plural, ""), "DELETED", one)
                    self._collect(one["metadata"]["uid"])


def copied(made: T) -> T:
    """Return a copy, made as a server makes it, by way of JSON; `deepcopy` takes far longer."""
    copy: T = orjson.loads(orjson.dumps(made))
    return copy


def _matches(made: Object, selector: str | None) -> bool:
    labels = made["metadata"].get("labels") or {}
    terms = (one.partition("=") for one in (selector or "").split(",") if one)
    return all(
        key in labels and (not is_equal or labels[key] == value) for key, is_equal, value in terms
    )


def _has_field(made: Object, selector: str | None) -> bool:
    for one in (selector or "").split(",") if selector else ():
        path, _, value = one.partition("=")
        found: Any = made
        for field in path.split("."):
            found = found.get(field, {})
        if found != value:
            return False
    return True


def _merge(target: Object, patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping):
            inner = target.setdefault(key, {})
            _merge(inner, value)
        else:
            target[key] = copied(value)
