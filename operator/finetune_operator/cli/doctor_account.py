"""`ftctl doctor --cluster`: check the permissions of the operator in the caller's namespace.

A Role is deleted with its namespace, so a recreated namespace of the same name lacks it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.doctor_pods import CHART
from finetune_operator.kernel.rights import review_access
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, PODS

_NEEDED = (
    ("list", FINE_TUNE_JOBS, ""),
    ("patch", FINE_TUNE_JOBS, "status"),
    ("create", JOBS, ""),
    ("list", PODS, ""),
)
"""A verb for each rule of the chart's Role; the chart grants all verbs of a rule together."""


@dataclass(frozen=True)
class Account:
    """An operator's service account.

    Attributes:
        namespace: Namespace of the operator.
        name: Name of the account.
        deployment: Name of the operator's Deployment.
        release: Name of the helm release; empty if the operator was installed without helm.
        namespaces: Namespaces that the operator serves; empty for all.
    """

    namespace: str
    name: str
    deployment: str
    release: str
    namespaces: Sequence[str]

    @property
    def grant(self) -> str:
        """The command that recreates the roles of the account."""
        if self.release:
            options = f"{CHART} -n {self.namespace} --reset-then-reuse-values"
            return f"helm upgrade {self.release} {options}"
        served = f" --set 'settings.namespaces={{{','.join(self.namespaces)}}}'"
        return (
            f"helm template {self.deployment} {CHART} -n {self.namespace} "
            "--set image.repository=finetune-operator --kube-version 1.30.0"
            f"{served if self.namespaces else ''} --show-only templates/rbac.yaml | "
            "kubectl apply --server-side --force-conflicts -f -"
        )


async def check_account(probe: Probe, topic: str, account: Account) -> None:
    """Check that an account has the permissions of the chart in the caller's namespace."""
    title = f"its rights in {probe.namespace}"
    who = f"{account.namespace}:{account.name}"
    reviews = (
        review_access(probe.client, verb, resource, probe.namespace, subresource=part, account=who)
        for verb, resource, part in _NEEDED
    )
    statuses = await probe.ask(topic, title, asyncio.gather(*reviews))
    if statuses is None:
        return
    lacks = [
        f"{verb} {resource}{f'/{part}' if part else ''}"
        for (verb, resource, part), status in zip(_NEEDED, statuses, strict=True)
        if not status["allowed"]
    ]
    if lacks:
        probe.wrong(topic, title, f"{who} may not {', '.join(lacks)}", account.grant)
    else:
        probe.ok(topic, title, f"{who} has the permissions it needs")
