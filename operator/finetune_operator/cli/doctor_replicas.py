"""`ftctl doctor --cluster`: the operator's Deployments, who leads, and what it serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from finetune_operator import __version__
from finetune_operator.cli.asking import Asking
from finetune_operator.cli.doctor_account import Account, check_account
from finetune_operator.cli.doctor_pods import CHART, Owner, trouble_of
from finetune_operator.cli.top_rows import count_in, told_in
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
    """One Deployment of the operator, as far as it can be read.

    Attributes:
        is_behind: Not all of its replicas are of its last change and can be used.
        namespaces: Those it serves; empty for all.
        lease: Name of the Lease that its leader holds; empty where it holds none.
        account: Name of its service account.
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
        """NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"

    def serves(self, namespace: str) -> bool:
        """Say whether jobs of a namespace are its own."""
        return not self.namespaces or namespace in self.namespaces

    def shuts_out(self, other: "Deployed") -> bool:
        """Say whether another one for other namespaces waits for the Lease that this one holds."""
        if not (self.lease and self.namespaces and other.namespaces):
            return False
        is_same = (self.namespace, self.lease) == (other.namespace, other.lease)
        return is_same and set(self.namespaces).isdisjoint(other.namespaces)


async def check_operator(asking: Asking) -> None:
    """Note each Deployment's replicas and Lease, and whether exactly one serves the namespace."""
    found = await _deployments(asking)
    if found is None:
        return
    operators = [read(one) for one in found]
    if not operators:
        asking.wrong(_TOPIC, "Deployment", "no operator is in the cluster", INSTALL)
        return
    for number, (one, deployment) in enumerate(zip(operators, found, strict=True)):
        first = await _check_replicas(asking, one, deployment)
        if before := next((other for other in operators[:number] if other.shuts_out(one)), None):
            text = f"is that of {before.title}, too, so that only one of both works"
            asking.wrong(_TOPIC, f"Lease of {one.title}", text, _lease_of_its_own(one))
        elif one.lease:
            await _check_lease(asking, one, first)
    _check_served(asking, operators)
    for one in operators:
        if one.serves(asking.namespace):
            account = Account(one.namespace, one.account, one.name, one.release, one.namespaces)
            await check_account(asking, _TOPIC, account)


async def _deployments(asking: Asking) -> list[Object] | None:
    """Return those that the caller may see; None where there are none, and may be elsewhere."""
    try:
        every = await asking.client.list(DEPLOYMENTS, label_selector=SELECTOR)
        return every.items
    except ForbiddenError:
        text = f"you may not list those of all namespaces; asked in {_HOME} and {asking.namespace}"
        asking.unknown(_TOPIC, "Deployments", text)
    found: list[Object] = []
    for namespace in dict.fromkeys((_HOME, asking.namespace)):
        listed = await asking.list(
            _TOPIC, f"Deployments of {namespace}", DEPLOYMENTS, namespace, label_selector=SELECTOR
        )
        found += listed or ()
    return found or None


def read(deployment: Object) -> Deployed:
    """Return what a Deployment of the operator says."""
    metadata, pod = deployment["metadata"], told_in(deployment, "spec", "template")
    (container, *_) = told_in(pod, "spec", "containers")
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
        told_in(metadata, "annotations", "meta.helm.sh/release-name") or "",
        labels.get("app.kubernetes.io/version", ""),
        wanted,
        count_in(deployment, "status", "readyReplicas") or 0,
        updated < wanted or bool(count_in(deployment, "status", "unavailableReplicas")),
        tuple(one.strip() for one in settings.get("NAMESPACES", "").split(",") if one.strip()),
        settings.get("LEASE_NAME", "finetune-operator") if elects else "",
        told_in(pod, "spec", "serviceAccountName") or "default",
        told_in(deployment, "spec", "selector", "matchLabels") or {},
    )


async def _check_replicas(asking: Asking, one: Deployed, deployment: Object) -> str:
    """Note how many are ready; return the command that comes first where none is."""
    version = f"version {one.version or 'unknown'}"
    if one.version != __version__:
        version += f" (this ftctl is {__version__})"
    text = f"{one.ready} of {one.wanted} replicas ready, {version}"
    if one.wanted == 0:
        remedy = f"kubectl -n {one.namespace} scale deployment/{one.name} --replicas=2"
        asking.wrong(_TOPIC, one.title, text, remedy)
        return remedy
    if one.ready < one.wanted or one.is_behind:
        if one.ready >= one.wanted:
            text += ", which are not yet those of its last change"
        owner = Owner(one.namespace, one.name, one.release, _selector(one))
        pods = await asking.list(
            _TOPIC, f"pods of {one.title}", PODS, one.namespace, label_selector=owner.selector
        )
        found = trouble_of(owner, deployment, pods or ())
        why = f"; {found.why}" if found.why else ""
        asking.wrong(_TOPIC, one.title, f"{text}{why}", found.remedy)
        return "" if one.ready else found.remedy
    asking.ok(_TOPIC, one.title, text)
    return ""


async def _check_lease(asking: Asking, one: Deployed, first: str) -> None:
    """Note who leads; `first` is the command that comes first where no replica runs."""
    name = f"Lease {one.namespace}/{one.lease}"
    remedy = first or f"kubectl -n {one.namespace} logs deployment/{one.name} --tail=20"
    try:
        lease = await asking.ask(_TOPIC, name, asking.client.get(LEASES, one.lease, one.namespace))
        if lease is not None and not _is_fresh(lease):
            lease = await _renewed(asking, one, lease) or lease
    except NotFoundError:
        asking.wrong(_TOPIC, name, "is not there: no replica has ever led", remedy)
        return
    if lease is None:
        return
    holder = told_in(lease, "spec", "holderIdentity")
    if not holder:
        asking.wrong(_TOPIC, name, "is held by nobody", remedy)
    elif _is_fresh(lease):
        asking.ok(_TOPIC, name, f"is held by {holder}")
    else:
        last = told_in(lease, "spec", "renewTime")
        asking.wrong(_TOPIC, name, f"was not renewed by {holder} since {last}", remedy)


async def _renewed(asking: Asking, one: Deployed, lease: Object) -> Object | None:
    """Return the Lease once it is renewed: clocks differ, and so a late one may be alive."""
    loop = asyncio.get_running_loop()
    end, before = loop.time() + _RENEWAL_SECONDS, told_in(lease, "spec", "renewTime")
    while loop.time() < end:
        await asyncio.sleep(_LOOK_SECONDS)
        found = await asking.client.get(LEASES, one.lease, one.namespace)
        if told_in(found, "spec", "renewTime") != before:
            now = datetime.now(UTC).isoformat()
            return {**found, "spec": {**found["spec"], "renewTime": now}}
    return None


def _is_fresh(lease: Object) -> bool:
    told, lasts = (
        told_in(lease, "spec", "renewTime"),
        count_in(lease, "spec", "leaseDurationSeconds"),
    )
    if not told or not lasts:
        return False
    return abs(datetime.now(UTC) - datetime.fromisoformat(told)) < timedelta(seconds=lasts)


def _serving_as_well(one: Deployed, namespace: str) -> str:
    """Return the command that has an operator serve a namespace besides its own.

    What came without helm lacks the roles there, which are told once it serves the namespace.
    """
    listed = ",".join([*one.namespaces, namespace])
    if one.release:
        return (
            f"helm upgrade {one.release} {CHART} -n {one.namespace} "
            f"--reset-then-reuse-values --set 'settings.namespaces={{{listed}}}'"
        )
    variable = f"FINETUNE_OPERATOR_NAMESPACES={listed}"
    return f"kubectl -n {one.namespace} set env deployment/{one.name} {variable}"


def _lease_of_its_own(one: Deployed) -> str:
    name = f"{one.name}-2" if one.name == one.lease else one.name
    if one.release:
        return (
            f"helm upgrade {one.release} {CHART} -n {one.namespace} "
            f"--reset-then-reuse-values --set settings.leaseName={name}"
        )
    variable = f"FINETUNE_OPERATOR_LEASE_NAME={name}"
    return f"kubectl -n {one.namespace} set env deployment/{one.name} {variable}"


def _check_served(asking: Asking, operators: Sequence[Deployed]) -> None:
    namespace = asking.namespace
    serving = [one for one in operators if one.serves(namespace)]
    name = f"namespace {namespace}"
    if len(serving) == 1:
        asking.ok(_TOPIC, name, f"is served by {serving[0].title}")
    elif not serving:
        one = operators[0]
        remedy = _serving_as_well(one, namespace)
        text = f"is served by no operator; {one.title} serves {', '.join(one.namespaces)}"
        asking.wrong(_TOPIC, name, text, remedy)
    else:
        *_, last = serving
        remedy = f"kubectl -n {last.namespace} delete deployment {last.name}"
        if last.release:
            remedy = f"helm uninstall {last.release} -n {last.namespace}"
        titles = " and ".join(one.title for one in serving)
        asking.wrong(_TOPIC, name, f"is served by {titles}, which undo each other's work", remedy)


def _selector(one: Deployed) -> str:
    return ",".join(f"{key}={value}" for key, value in one.labels.items())
