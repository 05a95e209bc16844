"""The client's verbs on a store of this process, as the operator of `ftctl run` uses them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.embedded.store import Store
from finetune_operator.embedded.store_client import EmbeddedClient
from finetune_operator.kube.api_errors import (
    AlreadyExistsError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    NAMESPACES,
    PODS,
    Object,
)
from support.api.builders import manifest
from support.azureml.azureml_cases import SETTINGS


def on_a_store(
    work: Callable[[EmbeddedClient, Store], Awaitable[None]],
    on_write: Callable[[Object], None] = lambda made: None,
) -> None:
    """Do the work with a client of a store that knows FineTuneJobs."""

    async def both() -> None:
        store = Store()
        store.put(store.kinds[str(CRDS)], custom_resource_definition())
        store.put(store.kinds[str(NAMESPACES)], {"metadata": {"name": "default"}})
        await work(EmbeddedClient(store, on_write), store)

    asyncio.run(both())


def test_a_job_is_created_with_its_defaults_changed_and_told_of() -> None:
    written: list[tuple[int, str]] = []

    async def work(client: EmbeddedClient, store: Store) -> None:
        made = await client.create(FINE_TUNE_JOBS, manifest(), "default")
        assert made["spec"]["suspend"] is False
        listing = await client.list(FINE_TUNE_JOBS)
        assert listing.items == [await client.get(FINE_TUNE_JOBS, "tiny", "default")]
        await client.patch(FINE_TUNE_JOBS, "tiny", "default", {"spec": {"suspend": True}})
        told = {"status": {"phase": "Suspended"}}
        await client.patch(FINE_TUNE_JOBS, "tiny", "default", told, subresource="status")
        watch = client.watch(FINE_TUNE_JOBS, resource_version=listing.resource_version)
        events = [await anext(watch), await anext(watch)]
        assert [one.type for one in events] == ["MODIFIED", "MODIFIED"]
        assert events[1].object["status"]["phase"] == "Suspended"

    on_a_store(
        work,
        lambda made: written.append((made["metadata"]["generation"], made["status"]["phase"])),
    )
    assert written == [(1, "Pending"), (2, "Pending"), (2, "Suspended")]


def test_what_the_api_refuses_is_the_error_that_a_server_would_lead_to() -> None:
    async def work(client: EmbeddedClient, store: Store) -> None:
        made = await client.create(FINE_TUNE_JOBS, manifest(), "default")
        version = made["metadata"]["resourceVersion"]
        with pytest.raises(AlreadyExistsError, match='"tiny" already exists'):
            await client.create(FINE_TUNE_JOBS, manifest(), "default")
        with pytest.raises(NotFoundError):
            await client.get(FINE_TUNE_JOBS, "other", "default")
        with pytest.raises(NotFoundError, match="is not served"):
            await anext(client.log("a-pod", "default"))
        rate = {"spec": {"training": {"learningRate": 1}}}
        with pytest.raises(InvalidError, match=r"spec\.training; set spec\.suspend: true first"):
            await client.patch(FINE_TUNE_JOBS, "tiny", "default", rate)
        await client.patch(FINE_TUNE_JOBS, "tiny", "default", {"spec": {"suspend": True}})
        with pytest.raises(ConflictError):
            await client.replace(FINE_TUNE_JOBS, made, "default")
        store.forget()
        with pytest.raises(GoneError):
            await anext(client.watch(FINE_TUNE_JOBS, resource_version=version))
        assert (await client.list(PODS)).items == []

    on_a_store(work)


def test_what_the_caller_cannot_keep_was_written_and_is_told() -> None:
    def refuse(made: Object) -> None:
        raise UnavailableError(0, "OSError", "no space left")

    async def work(client: EmbeddedClient, store: Store) -> None:
        with pytest.raises(UnavailableError, match="no space left"):
            await client.create(FINE_TUNE_JOBS, manifest(), "default")
        await client.get(FINE_TUNE_JOBS, "tiny", "default")

    on_a_store(work, refuse)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("subscriptionId", "11111111-1111-1111-1111-111111111111"),
        ("resourceGroup", "other"),
        ("workspace", "other"),
    ],
)
def test_a_profile_stays_with_its_workspace_where_attempts_are_searched_for(
    field: str, other: str
) -> None:
    made = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneProfile",
        "metadata": {"name": "gpu"},
        "spec": {"azureml": dict(SETTINGS)},
    }

    async def work(client: EmbeddedClient, store: Store) -> None:
        store.put(store.kinds[str(CRDS)], profile_definition())
        await client.create(FINE_TUNE_PROFILES, made)
        moved = {"spec": {"azureml": {field: other}}}
        with pytest.raises(InvalidError, match="create another profile"):
            await client.patch(FINE_TUNE_PROFILES, "gpu", None, moved)
        compute = {"spec": {"azureml": {"compute": "other"}}}
        await client.patch(FINE_TUNE_PROFILES, "gpu", None, compute)

    on_a_store(work)
