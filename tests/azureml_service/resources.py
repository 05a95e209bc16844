"""What a workspace has besides jobs: computes, environments, datastores, its data plane."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azureml_service.answers import Json, missing

WORKSPACE = (
    "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/ml"
    "/providers/Microsoft.MachineLearningServices/workspaces/tuning"
)
LOCATION = "westeurope"
WORKSPACE_ID = "55555555-5555-5555-5555-555555555555"

SIZES: Mapping[str, tuple[int, int]] = {
    "Standard_DS3_v2": (4, 0),
    "Standard_NC24ads_A100_v4": (24, 1),
    "Standard_ND96isr_H100_v5": (96, 8),
}
"""CPUs and GPUs by the name of the size."""


def amlcompute(size: str, *, max_nodes: int = 4, is_low_priority: bool = False) -> Json:
    """Return the properties of a cluster of Azure ML's own."""
    return {
        "computeType": "AmlCompute",
        "properties": {
            "vmSize": size,
            "vmPriority": "LowPriority" if is_low_priority else "Dedicated",
            "osType": "Linux",
            "allocationState": "Steady",
            "currentNodeCount": 0,
            "targetNodeCount": 0,
            "scaleSettings": {
                "minNodeCount": 0,
                "maxNodeCount": max_nodes,
                "nodeIdleTimeBeforeScaleDown": "PT2M",
            },
        },
    }


def kubernetes(gpus: Mapping[str, int]) -> Json:
    """Return the properties of an attached cluster.

    Args:
        gpus: Of a pod, by the name of the instance type.
    """
    return {
        "computeType": "Kubernetes",
        "resourceId": f"{WORKSPACE.rpartition('/providers/')[0]}"
        "/providers/Microsoft.ContainerService/managedClusters/aks",
        "properties": {
            "namespace": "azureml",
            "defaultInstanceType": "defaultinstancetype",
            "instanceTypes": {
                name: {"nodeSelector": None, "resources": _limits(number)}
                for name, number in {"defaultinstancetype": 0, **gpus}.items()
            },
        },
    }


def _limits(gpus: int) -> Json:
    plain = {"cpu": "2", "memory": "2Gi"}
    return {
        "requests": plain,
        "limits": {**plain, **({"nvidia.com/gpu": str(gpus)} if gpus else {})},
    }


@dataclass
class Workspace:
    """One workspace.

    Attributes:
        id: ARM id.
        computes: Properties by name.
        environments: "NAME/VERSION" of each.
        datastores: Names.
    """

    id: str
    computes: dict[str, Json] = field(
        default_factory=lambda: {
            "cpu-cluster": amlcompute("Standard_DS3_v2"),
            "h100-cluster": amlcompute("Standard_ND96isr_H100_v5"),
            "spot-cluster": amlcompute("Standard_NC24ads_A100_v4", is_low_priority=True),
            "aks": kubernetes({"gpu1": 1, "gpu8": 8}),
        }
    )
    environments: set[str] = field(default_factory=lambda: {"trainer/1"})
    datastores: set[str] = field(
        default_factory=lambda: {"workspaceblobstore", "workspaceartifactstore", "rows", "kept"}
    )

    @property
    def name(self) -> str:
        """The last part of its id."""
        return self.id.rpartition("/")[2]

    def body(self, base: str) -> Json:
        """Return it as ARM shows it; `base` is where its data plane is found."""
        properties = {
            "workspaceId": WORKSPACE_ID,
            "friendlyName": self.name,
            "discoveryUrl": f"{base}/discovery",
            "mlFlowTrackingUri": f"azureml://{base.removeprefix('https://')}/mlflow/v1.0{self.id}",
            "provisioningState": "Succeeded",
            "storageAccount": "/subscriptions/0/resourceGroups/ml/storageAccounts/ml",
        }
        return self._resource("", properties) | {"location": LOCATION}

    def compute(self, name: str) -> Json:
        """Return a compute.

        Raises:
            RefusalError: there is none of that name.
        """
        found = self.computes.get(name)
        if found is None:
            raise missing(f"Compute {name}")
        properties = {"provisioningState": "Succeeded", "computeLocation": LOCATION, **found}
        return self._resource(f"computes/{name}", properties) | {"location": LOCATION}

    def environment(self, name: str, version: str) -> Json:
        """Return a version of an environment.

        Raises:
            RefusalError: there is none of that name.
        """
        if f"{name}/{version}" not in self.environments:
            raise missing(f"Environment {name} of version {version}")
        properties = {"image": f"registry.test/{name}:{version}", "osType": "Linux"}
        return self._resource(f"environments/{name}/versions/{version}", properties)

    def datastore(self, name: str) -> Json:
        """Return a datastore, without credentials.

        Raises:
            RefusalError: there is none of that name.
        """
        if name not in self.datastores:
            raise missing(f"Datastore {name}")
        properties: dict[str, Any] = {
            "datastoreType": "AzureBlob",
            "accountName": "mlstorage",
            "containerName": name,
            "endpoint": "core.windows.net",
            "protocol": "https",
            "credentials": {"credentialsType": "None"},
            "isDefault": name == "workspaceblobstore",
        }
        return self._resource(f"datastores/{name}", properties)

    def _resource(self, path: str, properties: Json) -> Json:
        identity = f"{self.id}/{path}".rstrip("/")
        kinds = "/".join(("Microsoft.MachineLearningServices/workspaces", *path.split("/")[::2]))
        name = identity.rpartition("/")[2]
        return {
            "id": identity,
            "name": name,
            "type": kinds.rstrip("/"),
            "properties": properties,
            "systemData": {"createdBy": "somebody", "createdByType": "User"},
        }


def sizes() -> Json:
    """Return the sizes of virtual machines of the location."""
    return {
        "value": [
            {
                "name": name,
                "family": name.rsplit("_", 1)[0],
                "vCPUs": cpus,
                "gpus": gpus,
                "memoryGB": cpus * 4.0,
                "lowPriorityCapable": True,
                "premiumIO": True,
                "supportedComputeTypes": ["AmlCompute", "ComputeInstance"],
            }
            for name, (cpus, gpus) in SIZES.items()
        ]
    }
