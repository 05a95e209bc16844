"""Restore children of a running attempt that others delete or change, with a growing backoff.

`LiveAttempts.observe` calls it each time. While no child has changed it only compares versions. It
restores children only from an intact annotation on the batch Job, which records how they were
created.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from finetune_operator.backends.kubernetes import kept
from finetune_operator.backends.kubernetes.attempt_profiles import digest_of, kept_texts
from finetune_operator.backends.kubernetes.child_names import AttemptName, child_name, owner_of
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.submit import in_the_way
from finetune_operator.errors import AlreadyOwnedError, BackendError
from finetune_operator.kube.api_errors import ApiError, NotFoundError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.compact import expand
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object, Resource

log = logging.getLogger(__name__)

_REPORTED_FROM = 3  # restores in a row; fewer are probably a mistake of a user, and repaired
_LONGEST_SECONDS = 300.0
_QUIET_SECONDS = 60.0
_State = tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The state of an attempt's children.

    Attributes:
        message: One sentence for people; empty if no child is disturbed.
        again_seconds: When a check is due, or the message changes; None for never.
    """

    message: str = ""
    again_seconds: float | None = None


@dataclass
class _Child:
    """How often in a row a child was restored; times are of the event loop.

    Attributes:
        is_owed: Whether it was deleted or changed and is still to be restored.
        error: Why the last restore failed.
    """

    times: int = 0
    last: float = 0.0
    is_owed: bool = False
    error: str = ""

    @property
    def due(self) -> float:
        """When it may be restored again."""
        return self.last + min(2.0**self.times, _LONGEST_SECONDS) if self.times else self.last

    @property
    def over(self) -> float:
        """When the count restarts from 0, if the child stays unchanged until then."""
        return self.due + _QUIET_SECONDS


@dataclass
class _Attempt:
    """Children of an attempt, and their last undisturbed state.

    Attributes:
        kept: The texts that its batch Job stores, and the digest in the job's status.
        is_right: Whether texts and digest agree.
        good: Rank 0's address and the children's versions in the last undisturbed state.
    """

    kept: tuple[str, ...] = ()
    is_right: bool = False
    good: _State | None = None
    children: dict[Resource, _Child] = field(default_factory=dict)


class Upkeep:
    """Restores the children of all running attempts; its memory is not saved."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        self._attempts.pop(uid, None)

    async def keep(
        self, children: Children, name: AttemptName, batch_job: Object, digest: str, address: str
    ) -> Report:
        """Restore the children that differ from their recorded form.

        `digest` is the digest in the job's status. `address` is the published address of rank 0's
        pod.

        Raises:
            NotLeadingError: This process may not write.
        """
        if not kept.has_annotation(batch_job) or not digest:
            return Report()  # of an earlier version
        mine = self._attempts.setdefault(batch_job["metadata"]["uid"], _Attempt())
        if mine.kept != (texts := (*kept_texts(batch_job), digest)):
            mine.kept, mine.is_right = texts, digest_of(batch_job) == digest
        if not mine.is_right:
            return Report(
                f"the record of Job {name} about its Service, EndpointSlice and "
                "NetworkPolicy was changed, so these are not restored when deleted or changed"
            )
        if mine.good != (state := _state(children, name, address)):
            is_good = True
            for resource, child in kept.wanted(batch_job, name, address).items():
                about = mine.children.setdefault(resource, _Child())
                is_good &= await _check(children, resource, child, about)
            # While a restore waits for its response, a child that was checked may be deleted.
            mine.good = state if is_good else None
        return _report(name, mine.children)


def _state(children: Children, name: AttemptName, address: str) -> _State:
    """Return rank 0's address and the versions, which show whether a child was changed.

    The version is `absent` for a deleted child, and `unknown` before its kind was listed.
    """
    versions = []
    for resource in kept.KINDS:
        found, is_known = children.kept(resource, name), children.cluster.cache(resource).is_synced
        version = found["metadata"]["resourceVersion"] if found else "absent"
        versions.append(version if is_known else "unknown")
    return (address, *versions)


async def _check(children: Children, resource: Resource, child: Object, about: _Child) -> bool:
    """Restore a child if it has changed and a restore is due.

    Returns:
        Whether the child neither had to be restored nor is still to be restored.
    """
    name, namespace = child["metadata"]["name"], child["metadata"]["namespace"]
    cache = children.cluster.cache(resource)
    there = cache.get(Key(namespace, name))
    about.is_owed = cache.is_synced and (there is None or bool(kept.change(expand(there), child)))
    now = asyncio.get_running_loop().time()
    if now > about.over:
        about.times = 0
    if not about.is_owed or now < about.due:
        return not about.is_owed
    try:
        what = await _restore(children, resource, child)
    except (ApiError, BackendError) as error:
        about.times, about.last, about.error = about.times + 1, now, str(error)
        extra = {"child": f"{resource} {namespace}/{name}", "error": str(error)}
        log.warning("child not restored", extra=extra)
        return False
    about.is_owed, about.error = False, ""
    if what:
        about.times, about.last = about.times + 1, now
        extra = {"child": f"{resource} {namespace}/{name}", "was": what, "times": str(about.times)}
        log.warning("child restored", extra=extra)
    return not what


async def _restore(children: Children, resource: Resource, child: Object) -> str:
    """Restore a child; return `deleted` or `changed`, or an empty string for an unchanged child.

    The child is read first, and so is its job, because caches may be late, and the garbage
    collector deletes the children of a deleted job.
    """
    client, metadata = children.cluster.client, child["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    (ours,) = metadata["ownerReferences"]
    if not await _is_alive(children, ours, namespace):
        return ""
    try:
        there = await client.get(resource, name, namespace)
    except NotFoundError:
        response = await client.create(resource, kept.to_create(child), namespace)
        children.note_child_response(resource, response)
        return "deleted"
    owner, labels = owner_of(there), there["metadata"].get("labels") or {}
    is_ours = owner.get("uid") == ours["uid"]
    if not is_ours and (owner or labels.get(JOB_UID_LABEL) != ours["uid"]):
        raise AlreadyOwnedError(in_the_way(resource, f"{namespace}/{name}", owner))
    change = kept.change(there, child)
    if change and "deletionTimestamp" not in there["metadata"]:
        change["metadata"] = {**change.get("metadata", {}), "uid": there["metadata"]["uid"]}
        response = await client.patch(resource, name, namespace, change)
        children.note_child_response(resource, response)
        return "changed"
    children.note_child_response(resource, there)
    return ""


async def _is_alive(children: Children, owner: Object, namespace: str) -> bool:
    """Return whether the job exists and is not being deleted."""
    try:
        job = await children.cluster.client.get(FINE_TUNE_JOBS, owner["name"], namespace)
    except NotFoundError:
        return False
    metadata = job["metadata"]
    return metadata["uid"] == owner["uid"] and "deletionTimestamp" not in metadata


def _report(name: AttemptName, found: dict[Resource, _Child]) -> Report:
    if not any(one.times or one.is_owed for one in found.values()):
        return Report()
    now = asyncio.get_running_loop().time()
    sentences, waits = [], []
    for resource, one in found.items():
        what = f"{resource.kind} {name.namespace}/{child_name(name.job)}"
        is_reported = one.times >= _REPORTED_FROM and now <= one.over
        if one.is_owed:
            waits.append(max(0.0, one.due - now))
        elif is_reported:
            waits.append(one.over - now)
        if is_reported and one.is_owed and one.error:
            sentences.append(f"{what} was deleted or changed and cannot be restored: {one.error}")
        elif is_reported:
            sentences.append(
                f"{what} is repeatedly deleted or changed, and restored with a growing delay; "
                f"`kubectl get {resource.plural} {child_name(name.job)} -n {name.namespace} "
                "--show-managed-fields -o yaml` shows who changes it"
            )
    return Report("; ".join(sentences), min(waits, default=None))
