"""A release whose account, roles and policy are in a cluster, and somebody with its token."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_operator.backends.kubernetes.network import rank_zero_slice
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import ENDPOINT_SLICES, SERVICES, Object, Resource
from support.charts.helm_chart import made_of
from support.cluster.operators import Api
from support.cluster.service_account import kubeconfig_of
from support.kubernetes.kubernetes_cases import CASES

_ADMISSION = "admissionregistration.k8s.io"
_RBAC = "rbac.authorization.k8s.io"
POLICIES = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", False
)
_KINDS = {
    one.kind: one
    for one in (
        POLICIES,
        Resource(
            _ADMISSION,
            "v1",
            "validatingadmissionpolicybindings",
            "ValidatingAdmissionPolicyBinding",
            False,
        ),
        Resource("", "v1", "serviceaccounts", "ServiceAccount"),
        Resource(_RBAC, "v1", "roles", "Role"),
        Resource(_RBAC, "v1", "rolebindings", "RoleBinding"),
        Resource(_RBAC, "v1", "clusterroles", "ClusterRole", False),
        Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False),
    )
}
_TEMPLATES = ("serviceaccount", "rbac", "admissionpolicy")
_NAME = "finetune-operator"


@dataclass(frozen=True)
class Release:
    """What of the chart an operator needs that runs elsewhere.

    Attributes:
        kubeconfig: Of the cluster, as the operator's account.
        policy: Name of the policy.
    """

    namespace: str
    kubeconfig: Path
    policy: str

    @property
    def user(self) -> str:
        """Name of the account."""
        return f"system:serviceaccount:{self.namespace}:{_NAME}"


@contextmanager
def installed(api: Api, namespace: str, folder: Path, **policy: Any) -> Iterator[Release]:
    """Have account, roles and policy of a release, with these values of `admissionPolicy`."""
    shown = [part for name in _TEMPLATES for part in ("--show-only", f"templates/{name}.yaml")]
    values = {
        "fullnameOverride": _NAME,
        "image": {"repository": "registry.test/operator"},
        "admissionPolicy": {"create": True, **policy},
    }
    where = ("--namespace", namespace, "--values", "-")
    objects = made_of(*shown, *where, stdin=json.dumps(values))
    for made in objects:
        place = made["metadata"].get("namespace")
        api.run(api.client.create(_KINDS[made["kind"]], made, place))
    try:
        file = folder / "release.yaml"
        file.write_text(kubeconfig_of(api, namespace, _NAME))
        (policy,) = (one for one in objects if one["kind"] == POLICIES.kind)
        yield Release(namespace, file, policy["metadata"]["name"])
    finally:
        for made in objects:
            if "namespace" not in made["metadata"]:
                api.run(api.client.delete(_KINDS[made["kind"]], made["metadata"]["name"]))


class Thief:
    """Somebody who has the token of the operator's account.

    Args:
        api: The cluster.
        release: Whose account.
        owner: A FineTuneJob of the release's namespace.
    """

    def __init__(self, api: Api, release: Release, owner: Object) -> None:
        self.namespace = release.namespace
        self.job = owner["metadata"]["name"]
        kind = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        uid = owner["metadata"]["uid"]
        self.reference = {**kind, "name": self.job, "uid": uid, "controller": True}
        self._api = api
        self._client = api.run(HttpClient.connect(str(release.kubeconfig)))
        api.run(self._client.__aenter__())

    def close(self) -> None:
        """End the connections."""
        self._api.run(self._client.__aexit__(None, None, None))

    def child(self, kind: Resource, **metadata: Any) -> Object:
        """Return what the operator would make for the job, if that had two nodes."""
        objects = CASES["two-nodes-spot"].request().objects
        (service,) = (one for one in objects if one["kind"] == SERVICES.kind)
        named = service["metadata"]
        found = {
            ENDPOINT_SLICES.kind: rank_zero_slice(named, named["name"], "tiny-1-0", "10.0.0.1"),
            **{one["kind"]: one for one in objects},
        }[kind.kind]
        return self._of_the_job(found, metadata)

    def children(self, case: str) -> list[Object]:
        """Return the objects of a golden, which belong to the job, with names of their own."""
        objects = CASES[case].request().objects
        return [self._of_the_job(one, {"name": f"{case}-{at}"}) for at, one in enumerate(objects)]

    def _of_the_job(self, found: Mapping[str, Any], metadata: Object) -> Object:
        text = json.dumps(found).replace("uid-1", str(self.reference["uid"]))
        made: Object = json.loads(text.replace('"tiny', f'"{self.job}'))
        made["metadata"] |= {"ownerReferences": [self.reference], **metadata}
        made["metadata"].pop("namespace", None)
        return made

    def create(self, kind: Resource, made: Object, namespace: str | None = None) -> Object:
        """Create an object with the operator's token."""
        return self._api.run(self._client.create(kind, made, namespace or self.namespace))

    def patch(self, kind: Resource, name: str, change: Object) -> Object:
        """Change an object with the operator's token."""
        return self._api.run(self._client.patch(kind, name, self.namespace, change))

    def delete(self, kind: Resource, name: str) -> None:
        """Delete an object with the operator's token."""
        self._api.run(self._client.delete(kind, name, self.namespace))
