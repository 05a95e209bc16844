"""What the operator may do in a cluster: the table behind the chart's roles.

`charts/generate.py` writes it into the chart. A test compares it with every call of a client in
the kernel and the aks backend, so it grants exactly what they need.
"""

from dataclasses import dataclass

from finetune_operator.kube import resources
from finetune_operator.kube.resources import Object, Resource


@dataclass(frozen=True)
class Permission:
    """Verbs on one kind.

    Attributes:
        verbs: As RBAC spells them.
        subresource: Such as `status`; empty for the objects themselves.
    """

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""

    def to_rule(self) -> Object:
        """Return the rule of a Role or ClusterRole."""
        plural = self.resource.plural
        return {
            "apiGroups": [self.resource.group],
            "resources": [f"{plural}/{self.subresource}" if self.subresource else plural],
            "verbs": list(self.verbs),
        }


WHERE_JOBS_ARE = (
    Permission(resources.FINE_TUNE_JOBS, ("delete", "get", "list", "patch", "watch")),
    Permission(resources.FINE_TUNE_JOBS, ("patch",), "status"),
    # Children keep their job until they are gone (blockOwnerDeletion); clusters with the admission
    # plugin OwnerReferencesPermissionEnforcement ask for this right before they accept one.
    Permission(resources.FINE_TUNE_JOBS, ("update",), "finalizers"),
    Permission(resources.JOBS, ("create", "delete", "get", "list", "patch", "watch")),
    Permission(resources.JOBS, ("patch",), "status"),  # so that a suspended one never runs again
    Permission(resources.PODS, ("delete", "list", "watch")),
    Permission(resources.PODS, ("get",), "log"),
    # Watched, as they are restored when others delete or change them.
    Permission(resources.SERVICES, ("create", "get", "list", "patch", "watch")),
    Permission(resources.ENDPOINT_SLICES, ("create", "get", "list", "patch", "watch")),
    Permission(resources.NETWORK_POLICIES, ("create", "get", "list", "patch", "watch")),
    Permission(resources.EVENTS, ("create", "list")),
)
"""In every namespace that is served."""

CLUSTER_WIDE = (Permission(resources.FINE_TUNE_PROFILES, ("list", "watch")),)
"""Cluster-scoped kinds, needed also where only some namespaces are served."""

FOR_THE_LEASE = (
    Permission(resources.LEASES, ("create",)),
    Permission(resources.LEASES, ("get", "update")),
)
"""In the operator's namespace; RBAC can limit only the second to the Lease's name."""
