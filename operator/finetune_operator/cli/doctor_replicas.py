"""`ftctl doctor --cluster`: check the operator's Deployments, Leases and served namespaces."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from finetune_operator import __version__
from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.doctor_account import Account, check_account
from finetune_operator.cli.doctor_pods import CHART, Owner, trouble_of
from finetune_operator.cli.top_rows import count_in, get_in
from finetune_operator.kube.api_errors import ForbiddenError, NotFoundError
from finetune_operator.kube.resources import LEASES, PODS, Object, Resource

INSTALL = (
    f"helm install finetune-operator {CHART} -n finetune-operator --create-namespace "
    "--set image.repository=IMAGE"
)
SELECTOR = "app.kubernetes.io/name=finetune-operator"
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
_TOPIC = "operator"
_HOME = "finetune-operator"  # namespace in the documentation
_RENEWAL_SECONDS = 4.0  # a leader renews every two
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Deployed:
    """A Deployment of the operator.

    Attributes:
        is_behind: Whether some replicas are unavailable or not yet updated.
        namespaces: Namespaces that the operator serves; empty for all.
        lease: Name of the Lease of its leader; empty without leader election.
        account: Name of the service account.
    """

    namespace: str
    name: str
    release: str
    version: str
    wanted: int
    ready: int
    is_behind: bool
    namespaces: tuple[str, ...]
    lease: str
    account: str
    labels: dict[str, str]

    @property
    def title(self) -> str:
        """`NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}"

    def serves(self, namespace: str) -> bool:
        """Whether the operator serves a namespace."""
        return not self.namespaces or namespace in self.namespaces

    def shares_lease_with(self, other: "Deployed") -> bool:
        """Whether another Deployment, for other namespaces, waits for the same Lease."""
        if not (self.lease and self.namespaces and other.namespaces):
            return False
        is_same = (self.namespace, self.lease) == (other.namespace, other.lease)
        return is_same and set(self.namespaces).isdisjoint(other.namespaces)


async def check_operator(probe: Probe) -> None:
    """Check replicas and Lease of each Deployment, and that exactly one serves the namespace."""
    found = await _deployments(probe)
    if found is None:
        return
    operators = [read(one) for one in found]
    if not operators:
        probe.wrong(_TOPIC, "Deployment", "no operator is in the cluster", INSTALL)
        return
    for number, (one, deployment) in enumerate(zip(operators, found, strict=True)):
        first = await _check_replicas(probe, one, deployment)
        if before := next(
            (other for other in operators[:number] if other.shares_lease_with(one)), None
        ):
            text = f"is shared with {before.title}, so only one Deployment works"
            probe.wrong(_TOPIC, f"Lease of {one.title}", text, _own_lease_command(one))
        elif one.lease:
            await _check_lease(probe, one, first)
    _check_served(probe, operators)
    for one in operators:
        if one.serves(probe.namespace):
            account = Account(one.namespace, one.account, one.name, one.release, one.namespaces)
            await check_account(probe, _TOPIC, account)


async def _deployments(probe: Probe) -> list[Object] | None:
    """Return the Deployments that the caller may see; None if others may exist elsewhere."""
    try:
        every = await probe.client.list(DEPLOYMENTS, label_selector=SELECTOR)
        return every.items
    except ForbiddenError:
        text = f"you may not list all namespaces; checked {_HOME} and {probe.namespace}"
        probe.unknown(_TOPIC, "Deployments", text)
    found: list[Object] = []
    for namespace in dict.fromkeys((_HOME, probe.namespace)):
        listed = await probe.list(
            _TOPIC, f"Deployments of {namespace}", DEPLOYMENTS, namespace, label_selector=SELECTOR
        )
        found += listed or ()
    return found or None


def read(deployment: Object) -> Deployed:
    """Parse a Deployment of the operator."""
    metadata, pod = deployment["metadata"], get_in(deployment, "spec", "template")
    (container, *_) = get_in(pod, "spec", "containers")
    given = {one["name"]: str(one.get("value", "")) for one in container.get("env") or ()}
    settings = {
        name.removeprefix("FINETUNE_OPERATOR_"): value
        for name, value in given.items()
        if name.startswith("FINETUNE_OPERATOR_")
    }
    elects = settings.get("LEADER_ELECTION", "true").lower() == "true"
    labels = metadata.get("labels") or {}
    wanted = count_in(deployment, "spec", "replicas") or 0
    updated = count_in(deployment, "status", "updatedReplicas") or 0
    return Deployed(
        metadata["namespace"],
        metadata["name"],
        get_in(metadata, "annotations", "meta.helm.sh/release-name") or "",
        labels.get("app.kubernetes.io/version", ""),
        wanted,
        count_in(deployment, "status", "readyReplicas") or 0,
        updated < wanted or bool(count_in(deployment, "status", "unavailableReplicas")),
        tuple(one.strip() for one in settings.get("NAMESPACES", "").split(",") if one.strip()),
        settings.get("LEASE_NAME", "finetune-operator") if elects else "",
        get_in(pod, "spec", "serviceAccountName") or "default",
        get_in(deployment, "spec", "selector", "matchLabels") or {},
    )


async def _check_replicas(probe: Probe, one: Deployed, deployment: Object) -> str:
    """Check the replicas; return the command to run first if none is ready."""
    version = f"version {one.version or 'unknown'}"
    if one.version != __version__:
        version += f" (this ftctl is {__version__})"
    text = f"{one.ready} of {one.wanted} replicas ready, {version}"
    if one.wanted == 0:
        remedy = f"kubectl -n {one.namespace} scale deployment/{one.name} --replicas=2"
        probe.wrong(_TOPIC, one.title, text, remedy)
        return remedy
    if one.ready < one.wanted or one.is_behind:
        if one.ready >= one.wanted:
            text += ", but not all are updated and available"
        labels = ",".join(f"{key}={value}" for key, value in one.labels.items())
        owner = Owner(one.namespace, one.name, one.release, labels)
        pods = await probe.list(
            _TOPIC, f"pods of {one.title}", PODS, one.namespace, label_selector=owner.selector
        )
        found = trouble_of(owner, deployment, pods or ())
        why = f"; {found.why}" if found.why else ""
        probe.wrong(_TOPIC, one.title, f"{text}{why}", found.remedy)
        return "" if one.ready else found.remedy
    probe.ok(_TOPIC, one.title, text)
    return ""


async def _check_lease(probe: Probe, one: Deployed, first: str) -> None:
    """Check the Lease; `first` is the command to run first if no replica runs."""
    name = f"Lease {one.namespace}/{one.lease}"
    remedy = first or f"kubectl -n {one.namespace} logs deployment/{one.name} --tail=20"
    try:
        lease = await probe.ask(_TOPIC, name, probe.client.get(LEASES, one.lease, one.namespace))
        if lease is not None and not _is_fresh(lease):
            lease = await _renewed(probe, one, lease) or lease
    except NotFoundError:
        probe.wrong(_TOPIC, name, "does not exist: no replica has ever led", remedy)
        return
    if lease is None:
        return
    holder = get_in(lease, "spec", "holderIdentity")
    if not holder:
        probe.wrong(_TOPIC, name, "has no holder", remedy)
    elif _is_fresh(lease):
        probe.ok(_TOPIC, name, f"is held by {holder}")
    else:
        last = get_in(lease, "spec", "renewTime")
        probe.wrong(_TOPIC, name, f"was not renewed by {holder} since {last}", remedy)


async def _renewed(probe: Probe, one: Deployed, lease: Object) -> Object | None:
    """Wait until a Lease is renewed; under clock skew, an expired Lease may have a live leader."""
    loop = asyncio.get_running_loop()
    end, before = loop.time() + _RENEWAL_SECONDS, get_in(lease, "spec", "renewTime")
    while loop.time() < end:
        await asyncio.sleep(_LOOK_SECONDS)
        found = await probe.client.get(LEASES, one.lease, one.namespace)
        if get_in(found, "spec", "renewTime") != before:
            now = datetime.now(UTC).isoformat()
            return {**found, "spec": {**found["spec"], "renewTime": now}}
    return None


def _is_fresh(lease: Object) -> bool:
    renewed, lasts = (
        get_in(lease, "spec", "renewTime"),
        count_in(lease, "spec", "leaseDurationSeconds"),
    )
    if not renewed or not lasts:
        return False
    return abs(datetime.now(UTC) - datetime.fromisoformat(renewed)) < timedelta(seconds=lasts)


def _serve_command(one: Deployed, namespace: str) -> str:
    """Return the command that has an operator serve an additional namespace.

    An operator installed without helm also lacks the roles there, which the next check reports.
    """
    listed = ",".join([*one.namespaces, namespace])
    if one.release:
        return (
            f"helm upgrade {one.release} {CHART} -n {one.namespace} "
            f"--reset-then-reuse-values --set 'settings.namespaces={{{listed}}}'"
        )
    variable = f"FINETUNE_OPERATOR_NAMESPACES={listed}"
    return f"kubectl -n {one.namespace} set env deployment/{one.name} {variable}"


def _own_lease_command(one: Deployed) -> str:
    name = f"{one.name}-2" if one.name == one.lease else one.name
    if one.release:
        return (
            f"helm upgrade {one.release} {CHART} -n {one.namespace} "
            f"--reset-then-reuse-values --set settings.leaseName={name}"
        )
    variable = f"FINETUNE_OPERATOR_LEASE_NAME={name}"
    return f"kubectl -n {one.namespace} set env deployment/{one.name} {variable}"


def _check_served(probe: Probe, operators: Sequence[Deployed]) -> None:
    namespace = probe.namespace
    serving = [one for one in operators if one.serves(namespace)]
    name = f"namespace {namespace}"
    if len(serving) == 1:
        probe.ok(_TOPIC, name, f"is served by {serving[0].title}")
    elif not serving:
        one = operators[0]
        remedy = _serve_command(one, namespace)
        text = f"is served by no operator; {one.title} serves {', '.join(one.namespaces)}"
        probe.wrong(_TOPIC, name, text, remedy)
    else:
        *_, last = serving
        remedy = f"kubectl -n {last.namespace} delete deployment {last.name}"
        if last.release:
            remedy = f"helm uninstall {last.release} -n {last.namespace}"
        titles = " and ".join(one.title for one in serving)
        probe.wrong(_TOPIC, name, f"is served by {titles}, which undo each other's changes", remedy)
