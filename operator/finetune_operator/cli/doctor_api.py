"""`ftctl doctor --cluster`: the API server's version, and the CustomResourceDefinitions."""

import re

from finetune_operator.api.crd_revision import revision, revision_of
from finetune_operator.api.v1alpha1 import GROUP, VERSION
from finetune_operator.cli.asking import Asking
from finetune_operator.cli.top_rows import told_in
from finetune_operator.kernel.definitions import APPLY, NAMES, is_served
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.resources import CRDS

OLDEST, NEWEST_TESTED = (1, 30), (1, 34)
"""Minors of Kubernetes: the chart's oldest, and the newest that tests have run on."""

NOT_THERE = "is not in the cluster"
_TOPIC = "API server"
_UPGRADE = "az aks upgrade --name CLUSTER --resource-group GROUP"


async def check_version(asking: Asking, host: str) -> bool:
    """Say whether the API server answers at all, and note its version."""
    try:
        said = await asking.get_path("/version")
    except (ApiError, TimeoutError) as error:
        why = str(error) or "no answer in time"
        asking.wrong(_TOPIC, host, why, "kubectl version  # must work with the same KUBECONFIG")
        return False
    text = str(told_in(said, "gitVersion") or "of an unknown version")
    match = re.match(r"v(\d+)\.(\d+)", text)
    minor = (int(match[1]), int(match[2])) if match else None
    span = f"{_shown(OLDEST)} to {_shown(NEWEST_TESTED)} are supported"
    if minor is not None and minor < OLDEST:
        remedy = f"{_UPGRADE} --kubernetes-version {_shown(OLDEST)}"
        asking.wrong(_TOPIC, host, f"{text}; {_shown(OLDEST)} is the oldest that works", remedy)
    elif minor is not None and minor > NEWEST_TESTED:
        asking.ok(_TOPIC, host, f"{text}, newer than any that was tested; {span}")
    else:
        asking.ok(_TOPIC, host, f"{text}; {span}")
    return True


async def check_crds(asking: Asking) -> None:
    """Note whether both kinds are there, and of which revision."""
    for name in NAMES:
        await _check_crd(asking, name)


async def _check_crd(asking: Asking, name: str) -> None:
    topic = "CustomResourceDefinitions"
    try:
        found = await asking.client.get(CRDS, name)
    except NotFoundError:
        asking.wrong(topic, name, NOT_THERE, APPLY)
        return
    except ForbiddenError:
        await _check_served(asking, topic, name)
        return
    except (ApiError, TimeoutError) as error:
        asking.unknown(topic, name, str(error) or "no answer in time")
        return
    has, wants = revision_of(found), revision(name)
    conditions = told_in(found, "status", "conditions") or ()
    refused = [one for one in conditions if one["status"] == "False" and one["type"] in _NEEDED]
    if not is_served(found):
        asking.wrong(topic, name, f"does not serve {GROUP}/{VERSION}", APPLY)
    elif refused:
        said = refused[0].get("message", "")
        remedy = f"kubectl describe crd {name}  # another CRD may have its names"
        asking.wrong(topic, name, f"is not {refused[0]['type']} ({said})", remedy)
    elif has < wants:
        of = f"revision {has}" if has else "without a revision"
        text = f"{of}, older than this ftctl's {wants}; newer fields would be dropped"
        asking.wrong(topic, name, text, APPLY)
    elif has > wants:
        asking.ok(topic, name, f"revision {has}, newer than this ftctl's {wants}")
    else:
        asking.ok(topic, name, f"revision {has}")


async def _check_served(asking: Asking, topic: str, name: str) -> None:
    """Note what those know who may not read the CRD itself."""
    try:
        found = await asking.ask(topic, name, asking.get_path(f"/apis/{GROUP}/{VERSION}"))
    except NotFoundError:
        found = {"resources": []}
    if found is None:
        return
    if name.partition(".")[0] in [one.get("name") for one in told_in(found, "resources") or ()]:
        asking.unknown(topic, name, "is there; you may not read of which revision")
    else:
        asking.wrong(topic, name, NOT_THERE, APPLY)


_NEEDED = ("NamesAccepted", "Established")


def _shown(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
