"""`ftctl doctor --cluster`: what the caller may do, as the API server says itself."""

import asyncio
from dataclasses import dataclass

from finetune_operator.cli.asking import Asking
from finetune_operator.kernel.rights import own_name, review_access
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.resources import (
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    NAMESPACES,
    PODS,
    Resource,
)

_TOPIC = "your rights"


@dataclass(frozen=True)
class Right:
    """Something that a user of jobs may do.

    Attributes:
        use: What it is for.
        is_needed: Without it no job can be made.
    """

    verb: str
    resource: Resource
    use: str
    is_needed: bool = False
    subresource: str = ""

    @property
    def kind(self) -> str:
        """As `kubectl` names it: `pods/log`."""
        return f"{self.resource}/{self.subresource}" if self.subresource else str(self.resource)


RIGHTS = (
    Right("create", FINE_TUNE_JOBS, "to make jobs", True),
    Right("get", FINE_TUNE_JOBS, "to see jobs", True),
    Right("list", FINE_TUNE_PROFILES, "to see which profiles there are", True),
    Right("patch", FINE_TUNE_JOBS, "to suspend jobs"),
    Right("delete", FINE_TUNE_JOBS, "to delete jobs"),
    Right("list", PODS, "for ftctl logs and top"),
    Right("get", PODS, "for ftctl logs", subresource="log"),
    Right("get", PODS, "for the ranks in ftctl top", subresource="proxy"),
)


async def check_rights(asking: Asking) -> None:
    """Note who asks, and each right that users of jobs have."""
    await _check_who(asking)
    await _check_namespace(asking)
    await asyncio.gather(*(_check_right(asking, one) for one in RIGHTS))
    asking.findings.sort(key=lambda one: _order(one.name))


def _order(name: str) -> int:
    names = [_title(one) for one in RIGHTS]
    return names.index(name) if name in names else -1


async def _check_who(asking: Asking) -> None:
    try:
        name = await asking.ask(_TOPIC, "user", own_name(asking.client))
    except NotFoundError:
        return
    if name is not None:
        asking.who = name
        asking.ok(_TOPIC, "user", name)


async def _check_namespace(asking: Asking) -> None:
    name = f"namespace {asking.namespace}"
    try:
        await asking.ask(_TOPIC, name, asking.client.get(NAMESPACES, asking.namespace))
    except NotFoundError:
        remedy = f"kubectl create namespace {asking.namespace}"
        asking.wrong(_TOPIC, name, "does not exist", remedy)


async def _check_right(asking: Asking, right: Right) -> None:
    title = _title(right)
    namespace = asking.namespace if right.resource.namespaced else None
    review = review_access(
        asking.client, right.verb, right.resource, namespace, subresource=right.subresource
    )
    status = await asking.ask(_TOPIC, title, review)
    if status is None:
        return
    if status["allowed"]:
        asking.ok(_TOPIC, title, right.use)
        return
    if why := status.get("evaluationError"):
        asking.unknown(_TOPIC, title, str(why))
        return
    place = f" in {asking.namespace}" if right.resource.namespaced else ""
    note = asking.wrong if right.is_needed else asking.absent
    note(_TOPIC, title, f"is not allowed{place}; needed {right.use}", _grant(asking, right))


def _grant(asking: Asking, right: Right) -> str:
    """Return what an administrator runs: a role of the cluster's that has it, or one of its own."""
    account = asking.who.removeprefix("system:serviceaccount:")
    flag = "user" if account == asking.who else "serviceaccount"
    subject = f"--{flag}={account or 'USER'}"
    if not right.resource.namespaced:
        name = "finetune-profiles"
        rights = f"--verb=get,list,watch --resource={right.resource}"
        bind = f"kubectl create clusterrolebinding {name} --clusterrole={name} {subject}"
        return f"kubectl create clusterrole {name} {rights}; {bind}"
    bind = f"kubectl -n {asking.namespace} create rolebinding finetune-users"
    return f"{bind} --clusterrole=edit {subject}"


def _title(right: Right) -> str:
    return f"{right.verb} {right.kind}"
