"""Checks that the cluster's CustomResourceDefinitions are at least as new as the operator needs.

With older definitions the API server would silently drop fields of a written status.
"""

from dataclasses import dataclass

from finetune_operator import __version__
from finetune_operator.api.crd_revision import REVISIONS, revision, revision_of
from finetune_operator.api.v1alpha1 import VERSION
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import CRDS, Object

NAMES = tuple(REVISIONS)
_HELM = "meta.helm.sh/release"
APPLY = "ftctl crd | kubectl apply --server-side --force-conflicts -f -"


@dataclass(frozen=True)
class CrdProblem:
    """A CustomResourceDefinition that the operator cannot work with.

    Attributes:
        message: Sentence about the problem.
        remedy: The command that fixes it.
        is_older: Whether the CRD exists and is older than this operator.
    """

    message: str
    remedy: str
    is_older: bool = False


async def check_definition(client: KubeClient, name: str) -> CrdProblem | None:
    """Read a CRD and return its problem, if it has one.

    Raises:
        ForbiddenError: The CRD may not be read.
        ApiError: The API server has not responded.
    """
    try:
        return judge(await client.get(CRDS, name))
    except NotFoundError:
        message = f"the cluster has no CustomResourceDefinition {name}"
        return CrdProblem(f"{message}, which version {__version__} needs", APPLY)


def judge(definition: Object) -> CrdProblem | None:
    """Return the problem of a CRD of the cluster, if it has one."""
    name = definition["metadata"]["name"]
    crd = f"the CustomResourceDefinition {name}"
    found, needed = revision_of(definition), revision(name)
    if found < needed:
        labels = definition["metadata"].get("labels") or {}
        version = labels.get("app.kubernetes.io/version", "unknown")
        older = f"{crd} has revision {found} (version {version})"
        needs = f"this operator (version {__version__}) needs revision {needed}"
        return CrdProblem(f"{older}, and {needs}", _remedy(definition), is_older=True)
    if not is_served(definition):
        not_served = (
            f"{crd} does not serve {VERSION}, which this operator (version {__version__}) needs"
        )
        return CrdProblem(not_served, _remedy(definition))
    conditions = (definition.get("status") or {}).get("conditions") or ()
    if not any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in conditions
    ):
        why = "; ".join(
            condition["message"] for condition in conditions if condition["status"] != "True"
        )
        return CrdProblem(
            f"{crd} is not served ({why or 'not yet'})", f"kubectl describe crd {name}"
        )
    return None


def is_served(definition: Object) -> bool:
    """Whether a CRD serves the version of this operator."""
    return any(
        version["name"] == VERSION and version["served"]
        for version in definition["spec"]["versions"]
    )


def _remedy(definition: Object) -> str:
    annotations = definition["metadata"].get("annotations") or {}
    release, namespace = (annotations.get(f"{_HELM}-{part}") for part in ("name", "namespace"))
    if not release:
        return APPLY
    chart = "charts/finetune-operator"
    return f"helm upgrade {release} {chart} --namespace {namespace} --reset-then-reuse-values"
