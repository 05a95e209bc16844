"""An operator whose account lacks a right: what is told, and that it goes on once it is given."""

import time
from pathlib import Path

import pytest

from finetune_operator.kube.resources import JOBS, Object
from support.cluster.operators import Api, OperatorProcess, condition, wait_until
from support.cluster.permissions import FOR_THE_LEASE, WHERE_JOBS_ARE, Permission
from support.cluster.service_account import open_account
from support.kubernetes.kubernetes_cases import JOB, profile

ALL = (*WHERE_JOBS_ARE, *FOR_THE_LEASE)
MENDED_WITHIN_SECONDS = 60


def all_but(verb: str, right: Permission) -> list[Permission]:
    rest = Permission(right.resource, tuple(one for one in right.verbs if one != verb))
    assert len(rest.verbs) == len(right.verbs) - 1
    return [rest if one == right else one for one in ALL]


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_right_that_is_missing_is_told_in_the_conditions_and_missed_no_more_once_it_is_given(
    api: Api, tmp_path: Path
) -> None:
    (right,) = (one for one in WHERE_JOBS_ARE if one.resource == JOBS and not one.subresource)
    with (
        api.namespace("rights") as namespace,
        api.profile(namespace, profile()),
        open_account(api, namespace, tmp_path) as account,
        OperatorProcess(account.kubeconfig, namespace, backends="") as operator,
    ):
        account.grant(all_but("create", right))
        operator.wait_for("synced", 60)
        api.apply(
            namespace,
            **{**JOB, "backend": {"type": "kubernetes", "kubernetes": {"profile": namespace}}},
        )

        def told() -> Object | None:
            job = api.job(namespace)
            found = condition(job, "ResourcesReady")
            return found if condition(job, "Stalled")["status"] == "True" else None

        found = wait_until(told, 25, "it is told")
        assert found is not None
        assert (found["status"], found["reason"]) == ("False", "CreationFailed")
        account_name = f"system:serviceaccount:{namespace}:operator"
        assert found["message"] == (
            f'jobs.batch is forbidden: User "{account_name}" cannot create resource "jobs" in '
            f'API group "batch" in the namespace "{namespace}"'
        )
        assert condition(api.job(namespace), "Accepted")["status"] == "True"
        account.grant(ALL)
        start = time.monotonic()
        wait_until(lambda: api.get(JOBS, namespace, "tiny-1"), MENDED_WITHIN_SECONDS, "it starts")
        print(f"{time.monotonic() - start:.1f} s after the right was given")
        wait_until(lambda: condition(api.job(namespace), "Stalled")["status"] == "False", 25)
