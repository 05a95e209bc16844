"""kopf's thread beside an API server: what it asks for, and with which token."""

import asyncio
import gc
from pathlib import Path

import pytest
import yaml

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.job_events import ListenOptions
from finetune_operator.kernel.kopf_events import KopfThread
from finetune_operator.kube.config import ClusterAccess, load_access
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.kubeconfig import read_login
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, SECRETS, Object, Resource
from support.api.builders import manifest
from support.cluster.clusters import embedded_cluster
from support.cluster.gates import Gate
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.cluster.permissions import FOR_THE_LEASE, WHERE_JOBS_ARE, Permission
from support.cluster.proxies import AnswerProxy
from support.cluster.service_account import open_account


class StickingAccess(ClusterAccess):
    """Access whose login may hang.

    Attributes:
        is_stuck: No header comes any more.
    """

    is_stuck = False

    async def headers(self) -> dict[str, str]:
        while self.is_stuck:
            await asyncio.sleep(0.05)
        return await super().headers()


async def most_silent(events: KopfThread, seconds: float) -> float:
    loop = asyncio.get_running_loop()
    most, end = 0.0, loop.time() + seconds
    while loop.time() < end:
        most = max(most, loop.time() - (events.asked_at() or loop.time()))
        await asyncio.sleep(0.1)
    return most


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
def test_an_idle_watch_is_asked_for_all_the_time_and_one_that_hangs_has_ended(api: Api) -> None:
    async def work(namespace: str) -> tuple[float, float]:
        access = StickingAccess(read_login(api.kubeconfig))
        options = ListenOptions((namespace,), Backoff(0.1, 0.5), 1.0, watch_seconds=1)
        events = KopfThread(access, options, lambda kind, made: None)
        events.start()
        try:
            idle = await most_silent(events, 5)
            access.is_stuck = True
            async with asyncio.timeout(30):
                await events.ended()
            asked = events.asked_at()
            assert asked is not None
            return idle, asyncio.get_running_loop().time() - asked
        finally:
            access.is_stuck = False
            events.stop()
            await events.ended()

    with api.namespace("idle") as namespace:
        idle, stuck = asyncio.run(work(namespace))
    assert 0 < idle < 5
    assert stuck > idle


def test_what_looks_for_its_kind_in_vain_has_ended(tmp_path: Path) -> None:
    async def work(kubeconfig: str) -> float:
        options = ListenOptions((), Backoff(0.1, 0.5), 5.0)
        events = KopfThread(await load_access(kubeconfig), options, lambda kind, made: None)
        start = asyncio.get_running_loop().time()
        events.start()
        await events.ended()
        events.stop()
        assert events.asked_at() is None
        return asyncio.get_running_loop().time() - start

    with embedded_cluster(tmp_path) as cluster:
        assert asyncio.run(work(cluster.kubeconfig)) < 20


@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
def test_no_object_of_an_event_is_held_until_the_next_garbage_collection(api: Api) -> None:
    async def work(namespace: str) -> int:
        seen: asyncio.Queue[str | None] = asyncio.Queue()
        options = ListenOptions((namespace,), Backoff(0.1, 0.5), 5.0)
        events = KopfThread(
            await load_access(api.kubeconfig),
            options,
            lambda kind, obj: seen.put_nowait(obj["metadata"]["name"] if obj else None),
        )
        events.start()
        try:
            async with asyncio.timeout(60), await HttpClient.connect(api.kubeconfig) as client:
                assert await seen.get() is None  # the list
                for name in ("one", "two", "three"):
                    body = manifest(name=name, model__source="hf://a/b", dataset__source="hf://a/c")
                    body["metadata"] = {"name": name, "labels": _LABELS}
                    await client.create(FINE_TUNE_JOBS, body, namespace)
                    assert await seen.get() == name
            await asyncio.sleep(1.0)  # longer than kopf's workers live without an event
            return sum(map(_is_large, gc.get_objects()))
        finally:
            events.stop()
            await events.ended()

    gc.collect()
    before = sum(map(_is_large, gc.get_objects()))
    gc.disable()
    try:
        with api.namespace("large") as namespace:
            assert asyncio.run(work(namespace)) == before
    finally:
        gc.enable()


_LABELS = {f"label-{number}": "x" * 60 for number in range(2000)}


def _is_large(one: object) -> bool:
    """Whether an object has the labels, or their text."""
    if type(one) is not dict or one is _LABELS:
        return False
    text = one.get("text")
    return "label-1999" in one or (isinstance(text, str) and "label-1999" in text)


_ACCOUNTS = "serviceaccounts/operator/token"


def token_bound_to(api: Api, namespace: str, secret: str) -> str:
    """Return a token of the account that is refused once the Secret is gone."""
    made = api.run(api.client.create(SECRETS, {"metadata": {"name": secret}}, namespace))
    bound = {"kind": "Secret", "apiVersion": "v1", "name": secret, "uid": made["metadata"]["uid"]}
    requests = Resource("", "v1", _ACCOUNTS, "TokenRequest")
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": requests.kind,
        "spec": {"boundObjectRef": bound},
    }
    token: str = api.run(api.client.create(requests, body, namespace))["status"]["token"]
    return token


def was_refused(operator: OperatorProcess) -> bool:
    return any(kind.endswith(" 401") for kind in operator.health()["calls"])


def num_refused(proxy: AnswerProxy, agent: str) -> int:
    return sum(one.agent.startswith(agent) and one.status == 401 for one in proxy.answers)


def num_lists(operator: OperatorProcess) -> int:
    """Return how often the operator has listed FineTuneJobs; what kopf does is not in it."""
    counts = operator.calls("list").items()
    return sum(count for kind, count in counts if kind.split()[1] == "finetunejobs")


def comes_without_a_list(api: Api, operator: OperatorProcess, namespace: str, name: str) -> bool:
    """Say whether only kopf can have told of a new job, once that has its attempt."""
    lists = num_lists(operator)
    api.apply(namespace, name)
    wait_until(lambda: f"{name}-1" in api.attempts(namespace), 20, f"{name} has an attempt")
    return num_lists(operator) == lists


def with_user(kubeconfig: Path, user: Object) -> Path:
    config: Object = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"] = user
    kubeconfig.write_text(yaml.safe_dump(config))
    return kubeconfig


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_token_that_is_refused_is_followed_by_the_one_that_took_its_place(
    api: Api, tmp_path: Path
) -> None:
    children = Permission(CONFIG_MAPS, ("create", "get", "list", "patch", "watch"))
    file = tmp_path / "token"
    with api.namespace("tokens") as namespace, open_account(api, namespace, tmp_path) as account:
        account.grant((*WHERE_JOBS_ARE, *FOR_THE_LEASE, children))
        file.write_text(token_bound_to(api, namespace, "one"))
        kubeconfig = with_user(account.kubeconfig, {"tokenFile": str(file)})
        with (
            AnswerProxy(kubeconfig, tmp_path) as proxy,
            Gate(str(proxy.kubeconfig), tmp_path) as gate,
            OperatorProcess(gate.kubeconfig, namespace) as operator,
        ):
            operator.wait_for("synced", 60)
            api.apply(namespace, "before")
            wait_until(lambda: "before-1" in api.attempts(namespace), 30)
            new = token_bound_to(api, namespace, "two")
            api.run(api.client.delete(SECRETS, "one", namespace))
            wait_until(lambda: was_refused(operator), 30, "the old token is refused")
            gate.shut()  # every watch begins anew, as it does within minutes anyway
            gate.open()
            # ... and a second time after its login, as the file still holds the old token.
            wait_until(lambda: num_refused(proxy, "kopf/") > 1, 30, "kopf is refused, too")
            file.write_text(new)
            api.apply(namespace, "after")
            wait_until(lambda: "after-1" in api.attempts(namespace), 20)
            api.play(namespace, "after-1", phase="Running", ready="1", step="1")
            wait_until(lambda: api.phase(namespace, "after") == "Running", 25)
            # The outage may still owe a list, or a few, and those would tell of a job as well.
            later = (f"later-{number}" for number in range(5))
            assert any(comes_without_a_list(api, operator, namespace, name) for name in later)
            assert len(operator.said("leading")) == 1
            assert operator.said("kopf ended; it starts again") == []
