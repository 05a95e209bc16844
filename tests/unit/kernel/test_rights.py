"""What a replica says of a right that it lacks, and of CRDs that it cannot work with."""

import asyncio
import copy
from typing import Any

import pytest

from finetune_operator import __version__
from finetune_operator.api.crd import custom_resource_definition
from finetune_operator.api.crd_revision import REVISION_ANNOTATION, revision
from finetune_operator.embedded.kinds import accepted
from finetune_operator.kernel.definitions import judge
from finetune_operator.kernel.rights import Right, Rights, command_for
from finetune_operator.kube.api_errors import ForbiddenError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, FINE_TUNE_PROFILES, LEASES
from support.kernel.fake_api import FakeApi

NAME = "finetunejobs.finetune.dev"
APPLY = "ftctl crd | kubectl apply --server-side --force-conflicts -f -"


@pytest.mark.parametrize(
    ("right", "message", "command"),
    [
        pytest.param(
            Right(LEASES, ("get", "update"), "ops", "ft"),
            "get and update leases.coordination.k8s.io ft in namespace ops",
            "kubectl create role ops-ft-may-get-update-ft --namespace=ops --verb=get,update "
            "--resource=leases.coordination.k8s.io --resource-name=ft && "
            "kubectl create rolebinding ops-ft-may-get-update-ft --namespace=ops "
            "--role=ops-ft-may-get-update-ft --serviceaccount=ops:ft",
            id="one object of a namespace",
        ),
        pytest.param(
            Right(FINE_TUNE_JOBS, ("list",)),
            "list finetunejobs.finetune.dev in all namespaces",
            "kubectl create clusterrole ops-ft-may-list-finetunejobs --verb=list "
            "--resource=finetunejobs.finetune.dev && "
            "kubectl create clusterrolebinding ops-ft-may-list-finetunejobs "
            "--clusterrole=ops-ft-may-list-finetunejobs --serviceaccount=ops:ft",
            id="every namespace",
        ),
    ],
)
def test_a_right_is_said_in_words_and_given_by_a_command(
    right: Right, message: str, command: str
) -> None:
    assert str(right) == message
    assert command_for(right, "system:serviceaccount:ops:ft") == command


def test_a_right_of_a_user_is_bound_to_the_user() -> None:
    command = command_for(Right(FINE_TUNE_PROFILES, ("watch",)), "jo@example.com")

    assert command == (
        "kubectl create clusterrole finetune-operator-may-watch-finetuneprofiles --verb=watch "
        "--resource=finetuneprofiles.finetune.dev && kubectl create clusterrolebinding "
        "finetune-operator-may-watch-finetuneprofiles "
        "--clusterrole=finetune-operator-may-watch-finetuneprofiles --user='jo@example.com'"
    )


@pytest.mark.parametrize(
    ("message", "name"),
    [
        pytest.param(
            'selfsubjectreviews.authentication.k8s.io is forbidden: User "system:anonymous" cannot '
            'create resource "selfsubjectreviews"',
            "system:anonymous",
            id="the refusal names it",
        ),
        pytest.param("denied by a webhook", "", id="nothing names it"),
    ],
)
def test_an_account_that_may_not_ask_who_it_is_is_read_from_the_refusal(
    message: str, name: str
) -> None:
    class Refusing(FakeApi):
        async def create(self, *_: Any, **__: Any) -> Any:
            raise ForbiddenError(403, "Forbidden", message)

    account = asyncio.run(Rights(Refusing()).account())

    assert account == name
    command = command_for(Right(FINE_TUNE_PROFILES, ("watch",)), account)
    assert command.endswith(f" --user='{name or 'USER'}'")


def served(**annotations: str) -> dict[str, Any]:
    """Return the CRD as a cluster has it that serves the kind."""
    made = copy.deepcopy(custom_resource_definition())
    made["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
    made["metadata"]["annotations"] |= annotations
    return accepted(made)


@pytest.mark.parametrize("more", [0, 1], ids=["its own revision", "a newer one"])
def test_a_crd_that_is_no_older_fits(more: int) -> None:
    assert judge(served(**{REVISION_ANNOTATION: str(revision(NAME) + more)})) is None


def test_an_older_crd_is_told_with_both_revisions() -> None:
    found = judge(served(**{REVISION_ANNOTATION: str(revision(NAME) - 1)}))

    assert found is not None
    assert found.is_older
    assert found.remedy == APPLY
    assert found.message == (
        f"the CustomResourceDefinition {NAME} has revision {revision(NAME) - 1} (version "
        f"{__version__}), and this operator (version {__version__}) needs revision {revision(NAME)}"
    )


def test_a_newer_crd_that_has_dropped_our_version_is_told() -> None:
    made = served()
    made["spec"]["versions"][0]["name"] = "v2"

    found = judge(made)

    assert found is not None
    assert not found.is_older
    assert "does not serve v1alpha1" in found.message


def test_a_crd_whose_names_are_taken_is_told_in_the_clusters_words() -> None:
    made = served()
    taken = {"type": "NamesAccepted", "status": "False", "message": '"ftj" is already in use'}
    made["status"]["conditions"] = [taken]

    found = judge(made)

    assert found is not None
    assert found.message == (
        f'the CustomResourceDefinition {NAME} is not served ("ftj" is already in use)'
    )
    assert found.remedy == f"kubectl describe crd {NAME}"
