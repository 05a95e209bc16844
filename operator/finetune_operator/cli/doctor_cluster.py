"""`ftctl doctor --cluster`: check a cluster for jobs, and print commands that fix the faults.

The command only reads, with its caller's permissions, and ends within a minute whatever the API
server does: each group of checks has a timeout, and the findings list the checks that could not be
run.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from finetune_operator import __version__
from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.doctor_api import NOT_THERE, check_crds, check_version
from finetune_operator.cli.doctor_network import check_network
from finetune_operator.cli.doctor_places import (
    check_gpus,
    check_policy,
    check_profiles,
    check_storage,
)
from finetune_operator.cli.doctor_queue import check_queue
from finetune_operator.cli.doctor_replicas import INSTALL, check_operator
from finetune_operator.cli.doctor_rights import check_rights
from finetune_operator.cli.findings import Finding
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.definitions import APPLY
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.client import ClientOptions
from finetune_operator.kube.config import ClusterAccess, load_access
from finetune_operator.kube.http import HttpClient

REQUEST_SECONDS = 5.0
GROUP_SECONDS = 20.0
LOGIN_SECONDS = 30.0

Check = Callable[[Probe], Awaitable[None]]

CHECKS: dict[str, Check] = {
    "CustomResourceDefinitions": check_crds,
    "operator": check_operator,
    "your rights": check_rights,
    "profiles": check_profiles,
    "queues": check_queue,
    "storage": check_storage,
    "GPU nodes": check_gpus,
    "admission policy": check_policy,
    "NetworkPolicies": check_network,
}


async def examine_cluster(namespace: str | None) -> list[Finding]:
    """Check the cluster that kubectl uses, and return a finding per check.

    Args:
        namespace: Namespace in which the caller wants to create jobs; None takes the kubeconfig's.

    Raises:
        FineTuneError: no cluster is configured, or the login fails.
    """
    try:
        async with asyncio.timeout(LOGIN_SECONDS):
            access = await load_access()
    except TimeoutError as error:
        raise FineTuneError(
            f"logging in took more than {LOGIN_SECONDS:g} s; try: kubectl auth whoami"
        ) from error
    options = ClientOptions(
        request_seconds=REQUEST_SECONDS, user_agent=f"ftctl-doctor/{__version__}"
    )
    async with HttpClient(access, options) as client:
        return await _ask_all(client, access, namespace or access.namespace)


async def _ask_all(client: HttpClient, access: ClusterAccess, namespace: str) -> list[Finding]:
    first = Probe(client, namespace)
    if not await check_version(first, access.host):
        for topic in CHECKS:
            first.unknown(topic, "", "not checked: the API server does not respond")
        return first.findings
    groups = [_within_limit(Probe(client, namespace), topic, one) for topic, one in CHECKS.items()]
    found = [one for group in await asyncio.gather(*groups) for one in group]
    return [*first.findings, *_installed_by_helm(found)]


def _installed_by_helm(found: list[Finding]) -> list[Finding]:
    """Install the CRDs with the operator by helm: helm upgrades only CRDs that it has installed."""
    unfit = [one for one in found if one.remedy == APPLY]
    is_new = all(one.detail == NOT_THERE for one in unfit)
    if not is_new or all(one.remedy != INSTALL for one in found):
        return found
    return [replace(one, remedy=INSTALL) if one in unfit else one for one in found]


async def _within_limit(probe: Probe, topic: str, check: Check) -> list[Finding]:
    try:
        async with asyncio.timeout(GROUP_SECONDS):
            await check(probe)
    except TimeoutError:
        probe.unknown(topic, "the rest", f"not checked within {GROUP_SECONDS:g} s")
    except ApiError as error:
        probe.unknown(topic, "the rest", str(error))
    return probe.findings
