"""The kinds of objects that the operator reads or writes, by their names in the API server."""

from dataclasses import dataclass
from typing import Any

from finetune_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

Object = dict[str, Any]
"""A Kubernetes object as parsed JSON."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object.

    Attributes:
        group: API group; empty for the core group.
        namespaced: Whether objects of the kind are in a namespace.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of objects of the kind."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, *parts: str) -> str:
        """Return the URL path of the collection, or of the object with this name and subresource.

        `namespace` is None for all namespaces, and for cluster-scoped kinds.
        """
        root = f"/apis/{self.group}" if self.group else "/api"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join((f"{root}/{self.version}{place}", self.plural, *parts))

    def __str__(self) -> str:
        """Return the name that `kubectl` uses, such as `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


FINE_TUNE_JOBS = Resource(GROUP, VERSION, PLURAL, KIND)
FINE_TUNE_PROFILES = Resource(
    GROUP, VERSION, "finetuneprofiles", "FineTuneProfile", namespaced=False
)
JOBS = Resource("batch", "v1", "jobs", "Job")
PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("", "v1", "events", "Event")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
KUEUE_GROUP = "kueue.x-k8s.io"
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CRDS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
)
# Reviews are not stored: the response to a creation describes the caller.
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False
)
ACCOUNT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", False
)
SELF_REVIEWS = Resource(
    "authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview", False
)
