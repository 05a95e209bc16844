"""The client's verbs and errors on an API server."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.api_errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    InvalidError,
    KubeConfigError,
    NotFoundError,
    NotLeadingError,
    UnavailableError,
)
from finetune_operator.kube.client import ClientOptions, WatchEvent
from finetune_operator.kube.config import load_access
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import CONFIG_MAPS, LEASES, PODS, Object, Resource
from support.cluster.gates import Gate
from support.cluster.operators import Api


@pytest.fixture(scope="module")
def namespace(api: Api) -> Iterator[str]:
    with api.namespace("client") as name:
        yield name


def config_map(name: str, **data: object) -> Object:
    return {"metadata": {"name": name, "labels": {"kind": "test"}}, "data": data}


def test_an_object_is_created_read_changed_and_deleted(api: Api, namespace: str) -> None:
    client = api.client
    made = api.run(client.create(CONFIG_MAPS, config_map("life", a="1", b="2"), namespace))
    changed = api.run(client.patch(CONFIG_MAPS, "life", namespace, {"data": {"a": None, "c": "3"}}))
    assert changed["data"] == {"b": "2", "c": "3"}
    replaced = api.run(client.replace(CONFIG_MAPS, {**changed, "data": {}}, namespace))
    assert api.run(client.get(CONFIG_MAPS, "life", namespace)) == replaced
    uid = made["metadata"]["uid"]
    api.run(client.delete(CONFIG_MAPS, "life", namespace, uid=uid))
    assert api.get(CONFIG_MAPS, namespace, "life") is None


UNSERVED = Resource("nowhere.example", "v1", "things", "Thing")


def test_every_refusal_has_its_class_and_the_servers_sentence(api: Api, namespace: str) -> None:
    client = api.client
    there = api.run(client.create(CONFIG_MAPS, config_map("there"), namespace))
    stale = {"metadata": {"resourceVersion": "1"}, "data": {"a": "1"}}
    refusals: list[tuple[type[ApiError], int, object]] = [
        (NotFoundError, 404, client.get(PODS, "nowhere", namespace)),
        (NotFoundError, 404, client.list(UNSERVED)),
        (NotFoundError, 404, client.create(CONFIG_MAPS, config_map("a"), "no-such-namespace")),
        (AlreadyExistsError, 409, client.create(CONFIG_MAPS, config_map("there"), namespace)),
        (InvalidError, 400, client.create(CONFIG_MAPS, config_map("a", b=1), namespace)),
        (InvalidError, 422, client.create(CONFIG_MAPS, config_map("Not A Name"), namespace)),
        (InvalidError, 400, client.create(CONFIG_MAPS, {**config_map("a"), "x": 1}, namespace)),
        (ConflictError, 409, client.delete(CONFIG_MAPS, "there", namespace, uid="another")),
        (ConflictError, 409, client.patch(CONFIG_MAPS, "there", namespace, stale)),
    ]
    for kind, status, call in refusals:
        with pytest.raises(kind) as caught:
            api.run(call)  # type: ignore[arg-type]
        assert caught.value.status == status
        assert caught.value.message
    assert api.get(CONFIG_MAPS, namespace, "there") == there


def test_a_list_comes_in_pages_and_only_with_its_label(api: Api, namespace: str) -> None:
    async def work() -> list[str]:
        options = ClientOptions(page=2)
        async with await HttpClient.connect(api.kubeconfig, options) as client:
            for number in range(5):
                await client.create(CONFIG_MAPS, config_map(f"page-{number}"), namespace)
            listing = await client.list(
                CONFIG_MAPS, namespace, label_selector="kind=test", trim=lambda one: one["metadata"]
            )
            assert client.calls.by_kind[("list", "configmaps", 200)] >= 3
            return [one["name"] for one in listing.items]

    assert {f"page-{number}" for number in range(5)} <= set(api.run(work()))


def test_a_page_with_too_many_bytes_is_requested_with_fewer_objects(
    api: Api, namespace: str
) -> None:
    async def work() -> list[int]:
        options = ClientOptions(page_bytes=50_000)
        async with await HttpClient.connect(api.kubeconfig, options) as client:
            for number in range(6):
                large = config_map(f"large-{number}", big="x" * 20_000)
                await client.create(CONFIG_MAPS, large, namespace)
            huge = config_map("large-huge", big="x" * 200_000)  # more than a page has alone
            await client.create(CONFIG_MAPS, huge, namespace)
            listing = await client.list(CONFIG_MAPS, namespace)
            found = [obj for obj in listing.items if obj["metadata"]["name"].startswith("large")]
            return sorted(len(obj["data"]["big"]) for obj in found)

    assert api.run(work()) == [20_000] * 6 + [200_000]


def test_a_watch_goes_on_from_a_version_and_ends_in_its_time(api: Api, namespace: str) -> None:
    async def work() -> list[WatchEvent]:
        client = api.client
        at = (await client.list(CONFIG_MAPS, namespace)).resource_version
        await client.create(CONFIG_MAPS, config_map("seen", big="x" * 900_000), namespace)
        await client.delete(CONFIG_MAPS, "seen", namespace)
        watch = client.watch(CONFIG_MAPS, namespace, resource_version=at, timeout_seconds=3)
        return [event async for event in watch]

    events = [one for one in api.run(work()) if one.type != "BOOKMARK"]
    assert [one.type for one in events] == ["ADDED", "DELETED"]
    assert int(events[0].resource_version) < int(events[1].resource_version)


def test_a_server_that_hangs_and_one_that_is_away_are_unavailable(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    async def work(gate: Gate) -> None:
        options = ClientOptions(request_seconds=3)
        async with await HttpClient.connect(str(gate.kubeconfig), options) as client:
            await client.list(CONFIG_MAPS, namespace)
            gate.freeze()
            start = time.monotonic()
            with pytest.raises(UnavailableError, match="timed out") as hung:
                await client.list(CONFIG_MAPS, namespace)
            assert time.monotonic() - start < 6
            assert hung.value.retryable
            gate.shut()
            with pytest.raises(UnavailableError, match="no response to list"):
                await client.list(CONFIG_MAPS, namespace)
            gate.open()
            await client.list(CONFIG_MAPS, namespace)

    with Gate(api.kubeconfig, tmp_path) as gate:
        api.run(work(gate))


def test_who_may_not_write_any_more_is_stopped_before_the_server_hears_of_it(
    api: Api, namespace: str
) -> None:
    times = iter([10.0, 0.0])

    async def work() -> None:
        options = ClientOptions(seconds_to_write=lambda: next(times))
        async with await HttpClient.connect(api.kubeconfig, options) as client:
            await client.create(CONFIG_MAPS, config_map("in-time"), namespace)
            with pytest.raises(NotLeadingError):
                await client.create(CONFIG_MAPS, config_map("late"), namespace)
            await client.get(CONFIG_MAPS, "in-time", namespace)
            lease = {"metadata": {"name": "free"}, "spec": {"holderIdentity": "one"}}
            await client.create(LEASES, lease, namespace)

    api.run(work())
    assert api.get(CONFIG_MAPS, namespace, "late") is None


def test_a_kubeconfig_that_is_no_good_is_named(api: Api, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.yaml"
    with pytest.raises(KubeConfigError, match=r"nowhere\.yaml"):
        api.run(load_access(str(nowhere)))


def test_a_port_that_nobody_listens_on_is_unavailable(api: Api, tmp_path: Path) -> None:
    taken = socket.socket()  # bound, so that nobody else comes to listen there
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        f"clusters: [{{name: a, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n"
        "users: [{name: a, user: {token: abc}}]\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
    )

    async def work() -> None:
        async with await HttpClient.connect(str(config)) as client:
            await client.list(PODS)

    with taken, pytest.raises(UnavailableError, match="no response to list"):
        api.run(work())
