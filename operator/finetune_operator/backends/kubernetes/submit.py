"""Create the children of an attempt once, without changing objects of others.

Called by `KubernetesBackend.submit`. Names follow from job and attempt, so after a crash the same
calls find the created objects. If a name is taken, only an object that the job owns is adopted.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from finetune_operator.backends.base import Handle, Request
from finetune_operator.backends.kubernetes.attempt_key import with_key
from finetune_operator.backends.kubernetes.attempt_profiles import digest_of
from finetune_operator.backends.kubernetes.child_names import AttemptName, is_owned, owner_of
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.predecessors import make_way
from finetune_operator.errors import AlreadyOwnedError, NotCreatedError
from finetune_operator.kube.api_errors import AlreadyExistsError, ConflictError, NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)

CHILD_KINDS = {one.kind: one for one in (JOBS, SERVICES, NETWORK_POLICIES, ENDPOINT_SLICES)}
"""The children of an attempt, by kind."""


async def submit(request: Request, children: Children) -> Handle:
    """Create the missing objects of `request` and return the batch Job's handle.

    Raises:
        AlreadyOwnedError: A name is taken by an object that the job does not own, or there are
            orphaned pods.
        NotCreatedError: Another attempt or its pods may still run.
        ApiError: The API server refuses or does not respond.
    """
    name = AttemptName.parse(request.name)
    there = await children.batch_job(name)
    if there is None or not is_owned(there, request.job_uid):
        await make_way(children, name, request.job_uid)
        # A cache may be late: the creation shows whether a foreign object is in the way.
        *once, batch_job = request.objects
        client, is_later = children.cluster.client, name.number > 1
        _, created = await asyncio.gather(
            _delete_old(children, name, request.job_uid),
            asyncio.gather(
                *(create_or_adopt(client, one, request.job_uid, is_there=is_later) for one in once)
            ),
        )
        for wanted, one in zip(once, created, strict=True):
            children.note_child_response(CHILD_KINDS[wanted["kind"]], one)
        there = await create_or_adopt(client, with_key(batch_job), request.job_uid)
        children.note_response(there)
    return handle_of(name, there)


def handle_of(name: AttemptName, batch_job: Object) -> Handle:
    """Return the handle of a batch Job's attempt."""
    metadata = batch_job["metadata"]
    digest = digest_of(batch_job)
    return Handle(kind=JOBS.kind, name=str(name), uid=metadata["uid"], digest=digest)


async def create_or_adopt(
    client: KubeClient,
    wanted: Mapping[str, Any],
    job_uid: str,
    *,
    there: Object | None = None,
    is_there: bool = False,
) -> Object:
    """Create an object, or return the existing one if the job of `job_uid` owns it.

    Args:
        client: Sends the requests.
        wanted: The object.
        job_uid: Uid of the job that must own it.
        there: The existing object, if known.
        is_there: Whether it probably exists, so that it is read before any write.

    Raises:
        AlreadyOwnedError: The object has another owner.
        NotCreatedError: The object is being deleted, with an earlier job of the same name.
        ApiError: As `KubeClient.create`.
    """
    resource, metadata = CHILD_KINDS[wanted["kind"]], wanted["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    if there is None and is_there:
        there = await _find(client, resource, name, namespace)
    if there is None:
        try:
            return await client.create(resource, wanted, namespace)
        except AlreadyExistsError:
            there = await _find(client, resource, name, namespace)
    if there is None:
        raise NotCreatedError(f"{resource.kind} {namespace}/{name} was deleted just now")
    owner, ours = owner_of(there), owner_of(wanted)
    if owner.get("uid") == job_uid:
        return there
    if (owner.get("kind"), owner.get("name")) == (ours["kind"], ours["name"]):
        raise NotCreatedError(
            f"{resource.kind} {namespace}/{name} is still owned by a deleted job of the same name; "
            "waiting for its deletion"
        )
    raise AlreadyOwnedError(in_the_way(resource, f"{namespace}/{name}", owner))


async def _find(client: KubeClient, resource: Resource, name: str, namespace: str) -> Object | None:
    try:
        return await client.get(resource, name, namespace)
    except NotFoundError:
        return None


def in_the_way(resource: Resource, name: str, owner: Mapping[str, str]) -> str:
    """Return the sentence about a foreign object under a name of the operator."""
    belongs = "has no owner"
    if owner:
        belongs = f"belongs to {owner['kind']} {owner['name']} (uid {owner['uid']})"
    return (
        f"{resource.kind} {name} is in the way: it exists and {belongs}; delete it, or give this "
        "job another name"
    )


async def _delete_old(children: Children, name: AttemptName, job_uid: str) -> None:
    """Delete the batch Job of the second to last attempt; the last one's logs stay readable.

    Called before the new batch Job is created, because it is not called again once that exists.
    """
    old = AttemptName(name.namespace, name.job, name.number - 2)
    there = await children.batch_job(old) if old.number > 0 else None
    if there is None or not is_owned(there, job_uid):
        return
    try:
        uid = there["metadata"]["uid"]
        await children.cluster.client.delete(JOBS, old.batch_job, old.namespace, uid=uid)
    except (ConflictError, NotFoundError):
        return  # it is already deleted
