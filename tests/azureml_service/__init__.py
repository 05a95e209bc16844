"""A stand-in for Azure ML on loopback, for the unmodified SDK, azure-identity and MLflow plugin.

`running_service` runs it as a process of its own and gives the test what drives it.
"""

from azureml_service.client import SeenJob, ServiceClient, running_service
from azureml_service.resources import WORKSPACE, amlcompute, kubernetes

__all__ = [
    "WORKSPACE",
    "SeenJob",
    "ServiceClient",
    "amlcompute",
    "kubernetes",
    "running_service",
]
