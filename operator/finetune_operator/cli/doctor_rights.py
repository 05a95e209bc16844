"""`ftctl doctor --cluster`: check the caller's permissions with access reviews."""

import asyncio
from dataclasses import dataclass

from finetune_operator.cli.cluster_probe import Probe
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
    """A permission of a user of jobs.

    Attributes:
        use: Purpose of the permission.
        is_needed: Whether no job can be created without it.
    """

    verb: str
    resource: Resource
    use: str
    is_needed: bool = False
    subresource: str = ""

    @property
    def kind(self) -> str:
        """The kind in the syntax of `kubectl`, such as `pods/log`."""
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


async def check_rights(probe: Probe) -> None:
    """Check the user's name, the namespace, and the permissions that users of jobs need."""
    await _check_user(probe)
    await _check_namespace(probe)
    await asyncio.gather(*(_check_right(probe, one) for one in RIGHTS))
    probe.findings.sort(key=lambda one: _order(one.name))


def _order(name: str) -> int:
    names = [_title(one) for one in RIGHTS]
    return names.index(name) if name in names else -1


async def _check_user(probe: Probe) -> None:
    try:
        name = await probe.ask(_TOPIC, "user", own_name(probe.client))
    except NotFoundError:
        return
    if name is not None:
        probe.user = name
        probe.ok(_TOPIC, "user", name)


async def _check_namespace(probe: Probe) -> None:
    name = f"namespace {probe.namespace}"
    try:
        await probe.ask(_TOPIC, name, probe.client.get(NAMESPACES, probe.namespace))
    except NotFoundError:
        remedy = f"kubectl create namespace {probe.namespace}"
        probe.wrong(_TOPIC, name, "does not exist", remedy)


async def _check_right(probe: Probe, right: Right) -> None:
    title = _title(right)
    namespace = probe.namespace if right.resource.namespaced else None
    review = review_access(
        probe.client, right.verb, right.resource, namespace, subresource=right.subresource
    )
    status = await probe.ask(_TOPIC, title, review)
    if status is None:
        return
    if status["allowed"]:
        probe.ok(_TOPIC, title, right.use)
        return
    if why := status.get("evaluationError"):
        probe.unknown(_TOPIC, title, str(why))
        return
    place = f" in {probe.namespace}" if right.resource.namespaced else ""
    note = probe.wrong if right.is_needed else probe.absent
    note(_TOPIC, title, f"is not allowed{place}; needed {right.use}", _grant(probe, right))


def _grant(probe: Probe, right: Right) -> str:
    """Return the command for an administrator, with an existing ClusterRole or a new one."""
    account = probe.user.removeprefix("system:serviceaccount:")
    flag = "user" if account == probe.user else "serviceaccount"
    subject = f"--{flag}={account or 'USER'}"
    if not right.resource.namespaced:
        name = "finetune-profiles"
        rights = f"--verb=get,list,watch --resource={right.resource}"
        bind = f"kubectl create clusterrolebinding {name} --clusterrole={name} {subject}"
        return f"kubectl create clusterrole {name} {rights}; {bind}"
    bind = f"kubectl -n {probe.namespace} create rolebinding finetune-users"
    return f"{bind} --clusterrole=edit {subject}"


def _title(right: Right) -> str:
    return f"{right.verb} {right.kind}"
