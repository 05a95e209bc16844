"""`ftctl doctor --cluster`: whether the operator's account may work in the caller's namespace.

A Role goes with its namespace, and one of the same name that is made later has none.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_operator.cli.asking import Asking
from finetune_operator.cli.doctor_pods import CHART
from finetune_operator.kernel.rights import review_access
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, PODS

_NEEDED = (
    ("list", FINE_TUNE_JOBS, ""),
    ("patch", FINE_TUNE_JOBS, "status"),
    ("create", JOBS, ""),
    ("list", PODS, ""),
)
"""Of each rule without which no job runs, a verb; the chart gives all of them together."""


@dataclass(frozen=True)
class Account:
    """An operator's service account.

    Attributes:
        namespace: Of the operator.
        name: Of the account.
        deployment: Of the operator.
        release: Of helm; empty where something else installed it.
        namespaces: Those that the operator serves; empty for all.
    """

    namespace: str
    name: str
    deployment: str
    release: str
    namespaces: Sequence[str]

    @property
    def grant(self) -> str:
        """The command that makes its roles anew."""
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


async def check_account(asking: Asking, topic: str, account: Account) -> None:
    """Note whether an account has what the chart gives it in the caller's namespace."""
    title = f"its rights in {asking.namespace}"
    who = f"{account.namespace}:{account.name}"
    reviews = (
        review_access(
            asking.client, verb, resource, asking.namespace, subresource=part, account=who
        )
        for verb, resource, part in _NEEDED
    )
    statuses = await asking.ask(topic, title, asyncio.gather(*reviews))
    if statuses is None:
        return
    lacks = [
        f"{verb} {resource}{f'/{part}' if part else ''}"
        for (verb, resource, part), status in zip(_NEEDED, statuses, strict=True)
        if not status["allowed"]
    ]
    if lacks:
        asking.wrong(topic, title, f"{who} may not {', '.join(lacks)}", account.grant)
    else:
        asking.ok(topic, title, f"{who} may do its work")
