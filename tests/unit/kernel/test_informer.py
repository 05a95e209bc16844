"""A watch that breaks, falls behind and loses deletions, against a server in memory."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest

from finetune_operator.backends.kubernetes.pod_facts import facts_of_pod, trim_pod
from finetune_operator.backends.kubernetes.watched import WATCHES, trim_job
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import ABSENT_SECONDS, Informer
from finetune_operator.kube.api_errors import ApiError, NotFoundError, UnavailableError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.labels import GRACE_ANNOTATION, JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import CONFIG_MAPS, JOBS, SERVICES, Object, Resource
from finetune_operator.kube.watch import Watch
from support.kernel.fake_api import FakeApi
from support.kernel.virtual_time import run

CHILDREN = Watch(CONFIG_MAPS)


class Scene:
    """A server, a watch of one kind on it, and what the watch told."""

    def __init__(self, watch: Watch) -> None:
        self.api = FakeApi()
        self.watched = watch
        self.cache = ObjectCache(self.watched.resource)
        self.woken: list[Key | None] = []
        self.gaps = 0
        self.informer = Informer(
            self.api,
            self.watched,
            self.cache,
            wake=self.woken.append,
            on_missed_events=self._gap,
            namespace=None,
            backoff=Backoff(1.0, 15.0),
        )
        self.task = asyncio.create_task(self.informer.run())

    def _gap(self) -> None:
        self.gaps += 1

    async def make(self, name: str, **fields: Any) -> Object:
        labels = {JOB_UID_LABEL: "uid", JOB_LABEL: f"job-of-{name}"}
        made = {"metadata": {"name": name, "labels": labels}, **fields}
        return await self.api.create(self.watched.resource, made, "ns")

    def names(self) -> set[str]:
        return {one["metadata"]["name"] for one in self.cache}


def play(script: Callable[[Scene], Coroutine[Any, Any, None]], watch: Watch = CHILDREN) -> Scene:
    """Run a script beside a watch that is synced."""

    async def work() -> Scene:
        scene = Scene(watch)
        await script(scene)
        scene.task.cancel()
        return scene

    return run(work())


def failing(error: ApiError, *verbs: str) -> Callable[[str, Resource, str], None]:
    def before(verb: str, resource: Resource, name: str) -> None:
        if verb in verbs:
            raise error

    return before


def passing(verb: str, resource: Resource, name: str) -> None:
    """Let every request through."""


AWAY = UnavailableError(0, "ClientConnectorError", "connection refused")


def test_what_is_there_and_what_comes_wakes_its_job() -> None:
    async def script(scene: Scene) -> None:
        await scene.make("a")
        await scene.informer.is_synced.wait()
        await scene.make("b")
        await asyncio.sleep(1)
        assert scene.woken == [Key("ns", "job-of-a"), Key("ns", "job-of-b")]
        await scene.api.delete(CONFIG_MAPS, "a", "ns")
        await asyncio.sleep(1)
        assert scene.names() == {"b"}
        assert scene.woken[2:] == [Key("ns", "job-of-a")]

    assert play(script).gaps == 0


def test_the_answer_to_our_own_write_wakes_nobody() -> None:
    async def script(scene: Scene) -> None:
        await scene.informer.is_synced.wait()
        scene.cache.put(await scene.make("a"))
        await asyncio.sleep(1)

    assert play(script).woken == []


@pytest.mark.parametrize(
    ("watch", "theirs", "ours"),
    [
        pytest.param(CHILDREN, {"data": {"theirs": "1"}}, {"data": {"ours": "1"}}, id="metadata"),
        pytest.param(
            Watch(JOBS, trim=trim_job),
            {"status": {"active": 1}},
            {"spec": {"backoffLimit": 0}},
            id="batch Job",
        ),
    ],
)
def test_a_change_that_the_answer_to_our_own_write_overtook_wakes_its_job(
    watch: Watch, theirs: Object, ours: Object
) -> None:
    async def script(scene: Scene) -> None:
        await scene.make("a", spec={"parallelism": 2}, status={"active": 2})
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1)
        scene.api.watch_lag = lambda: 1.0
        part: Literal["status"] | None = "status" if "status" in theirs else None
        await scene.api.patch(watch.resource, "a", "ns", theirs, subresource=part)
        answer = await scene.api.patch(watch.resource, "a", "ns", ours)
        scene.cache.put(watch.trim(answer))
        scene.woken.clear()
        await asyncio.sleep(5)

    assert play(script, watch).woken == [Key("ns", "job-of-a")]


def test_a_change_of_nothing_that_is_kept_wakes_nobody() -> None:
    async def script(scene: Scene) -> None:
        await scene.make("a", status={"active": 2, "ready": 0, "conditions": []})
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1)
        scene.woken.clear()
        counters = {"ready": 2, "succeeded": 1, "startTime": "2026-01-01T00:00:00Z"}
        made = await scene.api.patch(JOBS, "a", "ns", {"status": counters}, subresource="status")
        await asyncio.sleep(1)
        kept = scene.cache.get(Key("ns", "a"))
        assert kept is not None
        assert kept["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        assert scene.woken == []
        fewer = {"active": 1}
        await scene.api.patch(JOBS, "a", "ns", {"status": fewer}, subresource="status")
        await asyncio.sleep(1)

    assert play(script, Watch(JOBS, trim=trim_job)).woken == [Key("ns", "job-of-a")]


def test_a_deletion_that_falls_into_an_expired_gap_is_found_by_the_list() -> None:
    async def script(scene: Scene) -> None:
        await scene.make("stays")
        await scene.make("goes")
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1)
        scene.api.before = failing(AWAY, "watch", "event", "list")
        scene.api.break_watches()
        await asyncio.sleep(5)
        await scene.api.delete(CONFIG_MAPS, "goes", "ns")
        await scene.make("comes")
        scene.api.forget_history()
        assert scene.names() == {"stays", "goes"}
        scene.api.before = passing
        await asyncio.sleep(16)
        assert scene.names() == {"stays", "comes"}
        assert Key("ns", "job-of-goes") in scene.woken[2:]

    assert play(script).gaps > 0


def test_a_long_outage_is_asked_after_for_ever_and_not_in_a_storm() -> None:
    async def script(scene: Scene) -> None:
        await scene.informer.is_synced.wait()
        scene.api.before = failing(AWAY, "watch", "event", "list")
        scene.api.break_watches()
        await asyncio.sleep(3600)
        asked = scene.gaps
        assert 3600 / 15 <= asked <= 3600 / 7
        scene.api.before = passing
        await scene.make("late")
        await asyncio.sleep(16)
        assert scene.names() == {"late"}

    play(script)


def test_a_watch_that_the_server_ends_goes_on_where_it_was() -> None:
    async def script(scene: Scene) -> None:
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1000)
        await scene.make("a")
        await asyncio.sleep(1)
        assert scene.names() == {"a"}
        assert asyncio.get_running_loop().time() - scene.informer.last_activity < 301

    assert play(script).gaps == 0


def test_a_kind_that_is_not_installed_counts_as_seen_and_is_found_later() -> None:
    async def script(scene: Scene) -> None:
        missing = NotFoundError(404, "NotFound", "the server could not find the resource")
        scene.api.before = failing(missing, "list")
        await scene.informer.is_synced.wait()
        scene.api.before = passing
        await scene.make("a")
        await asyncio.sleep(20)
        assert scene.names() == {"a"}

    play(script)


def test_a_kind_that_is_deleted_has_no_objects_and_is_watched_again_soon_after_its_return() -> None:
    async def script(scene: Scene) -> None:
        await scene.make("a")
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1)
        missing = NotFoundError(404, "NotFound", "the server could not find the resource")
        scene.api.before = failing(missing, "list", "watch", "event")
        scene.api.break_watches()
        scene.woken.clear()
        await asyncio.sleep(600)
        assert (scene.names(), scene.woken) == (set(), [Key("ns", "job-of-a")])
        assert scene.informer.absent == "the server could not find the resource"
        assert asyncio.get_running_loop().time() - scene.informer.last_activity <= ABSENT_SECONDS
        scene.api.before = passing
        await asyncio.sleep(ABSENT_SECONDS)
        assert (scene.names(), scene.informer.absent) == ({"a"}, "")
        await scene.make("b")
        await asyncio.sleep(1)
        assert scene.names() == {"a", "b"}

    play(script)


def test_an_object_that_is_given_to_another_job_wakes_both() -> None:
    async def script(scene: Scene) -> None:
        await scene.make("a")
        await scene.informer.is_synced.wait()
        await asyncio.sleep(1)
        scene.woken.clear()
        labels = {"metadata": {"labels": {JOB_LABEL: "other"}}}
        await scene.api.patch(SERVICES, "a", "ns", labels)
        await asyncio.sleep(1)
        assert set(scene.woken) == {Key("ns", "job-of-a"), Key("ns", "other")}

    play(script, next(one for one in WATCHES if one.resource == SERVICES))


def test_of_a_pod_the_facts_are_kept_and_all_that_is_long_is_left_out() -> None:
    long = "x" * 100_000
    made: Object = {
        "metadata": {
            "name": "tiny-1-0",
            "uid": "p",
            "labels": {JOB_UID_LABEL: "uid"},
            "annotations": {"finetune.dev/config": long, GRACE_ANNOTATION: "600"},
            "managedFields": [{"fieldsV1": long}],
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "trainer", "args": [long]}]},
        "status": {"phase": "Running"},
    }
    kept = trim_pod(made)
    assert facts_of_pod(kept).grace_seconds == 600.0
    assert facts_of_pod(kept).node == "node-1"
    assert "x" * 100 not in str(kept)
    del made["metadata"]["annotations"]
    assert facts_of_pod(trim_pod(made)).grace_seconds is None


def test_of_a_batch_job_the_facts_are_kept_and_the_pods_template_is_not() -> None:
    facts = {"finetune.dev/attempt-facts": "{}"}
    template = {"metadata": {"annotations": {"finetune.dev/config": "x" * 100_000}}}
    made = {
        "metadata": {"name": "tiny-1", "annotations": facts},
        "spec": {"parallelism": 2, "template": template},
    }
    kept = trim_job(made)
    assert kept == {
        "metadata": {"name": "tiny-1", "annotations": facts},
        "spec": {"parallelism": 2},
        "status": {},
    }
