"""A Kubernetes API server in this process, as far as the operator and kubectl need one."""

from finetune_operator.embedded.faults import Fault, Faults
from finetune_operator.embedded.server import EmbeddedApi

__all__ = ["EmbeddedApi", "Fault", "Faults"]
