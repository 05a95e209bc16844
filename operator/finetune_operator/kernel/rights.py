"""Checks the permissions of this process's account, and builds commands that grant missing ones.

Every account may review its own access (`system:basic-user`). If the API server refuses such a
review, the permission counts as granted, because requests that need it will show whether it is.
"""

import asyncio
import re
from dataclasses import dataclass, replace

from finetune_operator.kube.api_errors import ForbiddenError, NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import (
    ACCESS_REVIEWS,
    ACCOUNT_ACCESS_REVIEWS,
    SELF_REVIEWS,
    Object,
    Resource,
)

_ACCOUNT = "system:serviceaccount:"
_NAMELESS = "finetune-operator"
_REFUSED_USER = re.compile(r'User "([^"]+)" cannot')


@dataclass(frozen=True)
class Right:
    """Verbs on one kind.

    Attributes:
        namespace: Namespace of the right; None for the whole cluster.
        name: Name of the only object; empty for all objects.
    """

    resource: Resource
    verbs: tuple[str, ...]
    namespace: str | None = None
    name: str = ""

    def __str__(self) -> str:
        """`get and update leases.coordination.k8s.io x in namespace y`."""
        what = f"{' and '.join(self.verbs)} {self.resource} {self.name}".rstrip()
        if not self.resource.namespaced:
            return what
        return f"{what} in {f'namespace {self.namespace}' if self.namespace else 'all namespaces'}"


class Rights:
    """Reviews the access of this process's account.

    Args:
        client: Sends the reviews; must not depend on the Lease.
    """

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._account = ""

    async def missing(self, right: Right) -> Right | None:
        """Return the denied part of a permission; None if the whole permission is granted.

        Raises:
            ApiError: The API server has not responded.
        """
        grants = await asyncio.gather(*(self._is_granted(right, verb) for verb in right.verbs))
        denied = tuple(verb for verb, given in zip(right.verbs, grants, strict=True) if not given)
        return replace(right, verbs=denied) if denied else None

    async def account(self) -> str:
        """Return the account's name as in a RoleBinding; empty if it is unknown.

        Raises:
            ApiError: The API server has not responded.
        """
        if not self._account:
            try:
                self._account = await own_name(self._client)
            except ForbiddenError as error:
                named = _REFUSED_USER.search(error.message)
                return named[1] if named else ""
            except NotFoundError:
                return ""
        return self._account

    async def _is_granted(self, right: Right, verb: str) -> bool:
        try:
            status = await review_access(
                self._client, verb, right.resource, right.namespace, name=right.name
            )
        except (ForbiddenError, NotFoundError):
            return True
        return bool(status["allowed"])


async def own_name(client: KubeClient) -> str:
    """Return the caller's user name at the API server."""
    created = await client.create(SELF_REVIEWS, {"metadata": {}})
    return str(created["status"]["userInfo"]["username"])


async def review_access(
    client: KubeClient,
    verb: str,
    resource: Resource,
    namespace: str | None = None,
    *,
    name: str = "",
    subresource: str = "",
    account: str = "",
) -> Object:
    """Return the status of an access review: `allowed`, and `evaluationError` if it failed.

    Args:
        client: Client of the caller.
        verb: Verb to review.
        resource: Kind to review.
        namespace: None for the whole cluster.
        name: Object to review; empty for all objects.
        subresource: Such as `log`; empty for the object itself.
        account: `NAMESPACE:NAME` of the service account to review; empty for the caller.
    """
    spec: Object = {
        "resourceAttributes": {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
            "namespace": namespace or "",
            "name": name,
        }
    }
    if account:
        space, _, _ = account.partition(":")
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{space}"]
        groups.append("system:authenticated")
        spec |= {"user": f"{_ACCOUNT}{account}", "groups": groups}
    kind = ACCOUNT_ACCESS_REVIEWS if account else ACCESS_REVIEWS
    created = await client.create(kind, {"metadata": {}, "spec": spec})
    status: Object = created["status"]
    return status


def command_for(right: Right, account: str) -> str:
    """Return the command with which an administrator grants a permission.

    Args:
        right: The missing permission.
        account: Name of the account that lacks it; empty if unknown.
    """
    kind = "role" if right.namespace else "clusterrole"
    place = f" --namespace={right.namespace}" if right.namespace else ""
    space, _, name = account.removeprefix(_ACCOUNT).partition(":")
    is_service_account = account.startswith(_ACCOUNT)
    owner = f"{space}-{name}" if is_service_account else _NAMELESS
    who = (
        f"--serviceaccount={space}:{name}"
        if is_service_account
        else f"--user='{account or 'USER'}'"
    )
    called = "-".join((owner, "may", *right.verbs, right.name or right.resource.plural))
    only = f" --resource-name={right.name}" if right.name else ""
    verbs = ",".join(right.verbs)
    return (
        f"kubectl create {kind} {called}{place} --verb={verbs} --resource={right.resource}{only}"
        f" && kubectl create {kind}binding {called}{place} --{kind}={called} {who}"
    )
