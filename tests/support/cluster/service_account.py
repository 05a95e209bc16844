"""A service account of a real cluster, whose rights a test gives and takes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from finetune_operator.kube.resources import Object, Resource
from support.cluster.operators import Api
from support.cluster.permissions import CLUSTER_WIDE, Permission

_GROUP = "rbac.authorization.k8s.io"
_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_ROLES = Resource(_GROUP, "v1", "roles", "Role")
_BINDINGS = Resource(_GROUP, "v1", "rolebindings", "RoleBinding")
_CLUSTER_ROLES = Resource(_GROUP, "v1", "clusterroles", "ClusterRole", False)
_CLUSTER_BINDINGS = Resource(_GROUP, "v1", "clusterrolebindings", "ClusterRoleBinding", False)
_NAME = "operator"


class Account:
    """An account of one namespace that may do what is granted there; make it with `open_account`.

    Args:
        cluster_wide: What it may do in the whole cluster.

    Attributes:
        kubeconfig: Of the cluster, as this account.
    """

    def __init__(
        self, api: Api, namespace: str, folder: Path, cluster_wide: Iterable[Permission]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self.kubeconfig = folder / "account.yaml"
        made = {"metadata": {"name": _NAME}}
        api.run(api.client.create(_ACCOUNTS, made, namespace))
        # What cannot be asked for in a namespace: named after it, as it is nobody's child.
        self._bind(_CLUSTER_ROLES, _CLUSTER_BINDINGS, namespace, cluster_wide, None)
        self._bind(_ROLES, _BINDINGS, _NAME, (), namespace)
        self.kubeconfig.write_text(kubeconfig_of(api, namespace, _NAME))

    def grant(self, rights: Iterable[Permission]) -> None:
        """Let the account do this in its namespace, and nothing else any more."""
        change = {"rules": [one.to_rule() for one in rights]}
        self._api.run(self._api.client.patch(_ROLES, _NAME, self._namespace, change))

    def grant_everywhere(self, rights: Iterable[Permission]) -> None:
        """Let the account do this in the whole cluster, and nothing else any more."""
        change = {"rules": [one.to_rule() for one in rights]}
        self._api.run(self._api.client.patch(_CLUSTER_ROLES, self._namespace, None, change))

    def grant_in(self, namespace: str, rights: Iterable[Permission]) -> None:
        """Let the account do this in another namespace too; it goes with that namespace."""
        self._bind(_ROLES, _BINDINGS, _NAME, rights, namespace)

    def close(self) -> None:
        """Delete what does not go with the namespace."""
        for kind in (_CLUSTER_BINDINGS, _CLUSTER_ROLES):
            self._api.run(self._api.client.delete(kind, self._namespace))

    def _bind(
        self,
        role: Resource,
        binding: Resource,
        name: str,
        rights: Iterable[Permission],
        namespace: str | None,
    ) -> None:
        client, head = self._api.client, {"metadata": {"name": name}}
        rules = [one.to_rule() for one in rights]
        self._api.run(client.create(role, {**head, "rules": rules}, namespace))
        who = {"kind": "ServiceAccount", "name": _NAME, "namespace": self._namespace}
        which = {"apiGroup": _GROUP, "kind": role.kind, "name": name}
        made = {**head, "roleRef": which, "subjects": [who]}
        self._api.run(client.create(binding, made, namespace))


def kubeconfig_of(api: Api, namespace: str, name: str) -> str:
    """Return the kubeconfig of a cluster as one of its service accounts."""
    requests = Resource("", "v1", f"{_ACCOUNTS.plural}/{name}/token", "TokenRequest")
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": requests.kind, "spec": {}}
    made = api.run(api.client.create(requests, body, namespace))
    config: Object = yaml.safe_load(Path(api.kubeconfig).read_text())
    (user,) = config["users"]
    user["user"] = {"token": made["status"]["token"]}
    return str(yaml.safe_dump(config))


@contextmanager
def open_account(
    api: Api,
    namespace: str,
    folder: Path,
    cluster_wide: Iterable[Permission] = CLUSTER_WIDE,
) -> Iterator[Account]:
    """Create an account without rights in the namespace; its kubeconfig lies in `folder`."""
    made = Account(api, namespace, folder, cluster_wide)
    try:
        yield made
    finally:
        made.close()
