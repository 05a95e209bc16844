"""`ftctl doctor --cluster`: check the API server's version and the CustomResourceDefinitions."""

import re

from finetune_operator.api.crd_revision import revision, revision_of
from finetune_operator.api.v1alpha1 import GROUP, VERSION
from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.top_rows import get_in
from finetune_operator.kernel.definitions import APPLY, NAMES, is_served
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.resources import CRDS

OLDEST, NEWEST_TESTED = (1, 30), (1, 34)
"""Minor versions of Kubernetes: the oldest that the chart supports, and the newest tested."""

NOT_THERE = "is not in the cluster"
_TOPIC = "API server"
_UPGRADE = "az aks upgrade --name CLUSTER --resource-group GROUP"


async def check_version(probe: Probe, host: str) -> bool:
    """Check the version of the API server; return False if the server does not respond."""
    try:
        version = await probe.get_path("/version")
    except (ApiError, TimeoutError) as error:
        why = str(error) or "no response before the timeout"
        probe.wrong(_TOPIC, host, why, "kubectl version  # must work with the same KUBECONFIG")
        return False
    text = str(get_in(version, "gitVersion") or "unknown version")
    match = re.match(r"v(\d+)\.(\d+)", text)
    minor = (int(match[1]), int(match[2])) if match else None
    span = f"{_shown(OLDEST)} to {_shown(NEWEST_TESTED)} are supported"
    if minor is not None and minor < OLDEST:
        remedy = f"{_UPGRADE} --kubernetes-version {_shown(OLDEST)}"
        probe.wrong(_TOPIC, host, f"{text}; {_shown(OLDEST)} is the oldest that works", remedy)
    elif minor is not None and minor > NEWEST_TESTED:
        probe.ok(_TOPIC, host, f"{text}, newer than any tested version; {span}")
    else:
        probe.ok(_TOPIC, host, f"{text}; {span}")
    return True


async def check_crds(probe: Probe) -> None:
    """Check that both CRDs exist, with the needed revision."""
    for name in NAMES:
        await _check_crd(probe, name)


async def _check_crd(probe: Probe, name: str) -> None:
    topic = "CustomResourceDefinitions"
    try:
        found = await probe.client.get(CRDS, name)
    except NotFoundError:
        probe.wrong(topic, name, NOT_THERE, APPLY)
        return
    except ForbiddenError:
        await _check_served(probe, topic, name)
        return
    except (ApiError, TimeoutError) as error:
        probe.unknown(topic, name, str(error) or "no response before the timeout")
        return
    current, needed = revision_of(found), revision(name)
    conditions = get_in(found, "status", "conditions") or ()
    refused = [one for one in conditions if one["status"] == "False" and one["type"] in _NEEDED]
    if not is_served(found):
        probe.wrong(topic, name, f"does not serve {GROUP}/{VERSION}", APPLY)
    elif refused:
        reason = refused[0].get("message", "")
        remedy = f"kubectl describe crd {name}  # another CRD may have its names"
        probe.wrong(topic, name, f"is not {refused[0]['type']} ({reason})", remedy)
    elif current < needed:
        state = f"revision {current}" if current else "without a revision"
        text = f"{state}, older than this ftctl's {needed}; newer fields would be dropped"
        probe.wrong(topic, name, text, APPLY)
    elif current > needed:
        probe.ok(topic, name, f"revision {current}, newer than this ftctl's {needed}")
    else:
        probe.ok(topic, name, f"revision {current}")


async def _check_served(probe: Probe, topic: str, name: str) -> None:
    """Check that the kind is served, for callers that may not read the CRD."""
    try:
        found = await probe.ask(topic, name, probe.get_path(f"/apis/{GROUP}/{VERSION}"))
    except NotFoundError:
        found = {"resources": []}
    if found is None:
        return
    if name.partition(".")[0] in [one.get("name") for one in get_in(found, "resources") or ()]:
        probe.unknown(topic, name, "exists; you may not read its revision")
    else:
        probe.wrong(topic, name, NOT_THERE, APPLY)


_NEEDED = ("NamesAccepted", "Established")


def _shown(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
