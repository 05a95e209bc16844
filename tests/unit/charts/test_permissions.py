"""The operator's rights are exactly what its code asks the API server for."""

from pathlib import Path

from finetune_operator.kube import resources
from finetune_operator.kube.resources import EVENTS, LEASES, PODS
from support.cluster import permissions
from support.cluster.called_rights import EVERYBODYS, NOT_CALLED, SOURCES, Right, calls_of
from support.cluster.permissions import Permission


def rights(table: tuple[Permission, ...]) -> set[Right]:
    return {(one.resource, verb, one.subresource) for one in table for verb in one.verbs}


def test_table_of_rights_is_what_kernel_and_backend_call_and_no_more() -> None:
    called = {right for path in SOURCES for right in calls_of(path)}

    granted = rights(permissions.WHERE_JOBS_ARE + permissions.CLUSTER_WIDE)
    granted |= rights(permissions.FOR_THE_LEASE + permissions.ABOUT_ITSELF)
    assert granted == (called | NOT_CALLED) - EVERYBODYS
    assert called > EVERYBODYS


def test_each_role_holds_what_lives_where_it_is_bound() -> None:
    assert all(one.resource.namespaced for one in permissions.WHERE_JOBS_ARE)
    assert not any(one.resource.namespaced for one in permissions.CLUSTER_WIDE)
    assert {one.resource for one in permissions.FOR_THE_LEASE} == {LEASES}
    assert {one.resource for one in permissions.ABOUT_ITSELF} == {EVENTS}


def test_a_call_that_no_right_covers_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "new.py"
    source.write_text(
        "async def go(self):\n"
        "    await self._client.patch(SECRETS, 'a', 'b', {}, subresource='status' if x else None)\n"
        "    async for line in client.log('pod', 'b'): pass\n"
    )

    assert set(calls_of(source)) == {
        (resources.SECRETS, "patch", ""),
        (resources.SECRETS, "patch", "status"),
        (PODS, "get", "log"),
    }
