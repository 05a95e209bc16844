"""The Lease election against a server in memory, in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from finetune_operator.kernel.election import Election, LeaseOptions
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import LEASES, Resource
from support.kernel.fake_api import FakeApi
from support.kernel.virtual_time import run

LEASE, DEADLINE = 15.0, 10.0


def now() -> float:
    return asyncio.get_running_loop().time()


def candidate(api: FakeApi, identity: str) -> Election:
    return Election(api, LeaseOptions("operator", "default", identity))


def holder(api: FakeApi) -> str:
    (lease,) = api.objects(LEASES)
    return str(lease["spec"]["holderIdentity"])


def refuse(verb: str, resource: Resource, name: str) -> None:
    raise UnavailableError(0, "ClientConnectorError", "connection refused")


def allow(verb: str, resource: Resource, name: str) -> None:
    """Let every request through."""


async def seconds(what: Coroutine[Any, Any, None]) -> float:
    start = now()
    await what
    return now() - start


def test_the_first_candidate_creates_the_lease_and_leads() -> None:
    async def work() -> None:
        api = FakeApi()
        one = candidate(api, "one")
        assert not one.is_leading
        await one.acquire()
        assert one.is_leading
        assert holder(api) == "one"

    run(work())


def test_of_two_candidates_one_leads_and_the_other_waits() -> None:
    async def work() -> None:
        api = FakeApi()
        one, two = candidate(api, "one"), candidate(api, "two")
        tasks = [asyncio.create_task(each.acquire()) for each in (one, two)]
        await asyncio.sleep(5)
        assert [one.is_leading, two.is_leading].count(True) == 1
        for task in tasks:
            task.cancel()

    run(work())


def test_a_leader_that_renews_leads_on_and_the_standby_never_does() -> None:
    async def work() -> None:
        api = FakeApi()
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        hold, wait = asyncio.create_task(one.hold()), asyncio.create_task(two.acquire())
        for _ in range(100):
            await asyncio.sleep(3)
            assert one.is_leading
            assert not two.is_leading
        hold.cancel()
        wait.cancel()

    run(work())


def test_a_standby_takes_over_within_the_lease_and_two_seconds() -> None:
    async def work() -> float:
        api = FakeApi()
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        hold, wait = asyncio.create_task(one.hold()), asyncio.create_task(two.acquire())
        await asyncio.sleep(60)
        hold.cancel()
        took = await seconds(_done(wait))
        assert holder(api) == "two"
        return took

    assert LEASE - 2 <= run(work()) <= LEASE + 2


async def _done(task: "asyncio.Task[None]") -> None:
    await task


def test_a_leader_without_an_answer_stops_by_the_renew_deadline() -> None:
    async def work() -> float:
        api = FakeApi()
        one = candidate(api, "one")
        await one.acquire()
        api.is_hung = True
        hung_at = now()
        hold = asyncio.create_task(one.hold())
        while one.is_leading:
            await asyncio.sleep(0.1)
        stopped = now() - hung_at
        await hold
        assert now() - hung_at <= DEADLINE + 0.1  # though a renewal was under way
        return stopped

    assert run(work()) <= DEADLINE + 0.1


def test_a_leader_whose_connection_is_refused_stops_and_campaigns_again() -> None:
    async def work() -> None:
        api = FakeApi()
        one = candidate(api, "one")
        await one.acquire()
        api.before = refuse
        assert await seconds(one.hold()) <= DEADLINE + 2
        assert not one.is_leading
        again = asyncio.create_task(one.acquire())
        await asyncio.sleep(30)
        assert not again.done()
        api.before = allow
        await again
        assert one.is_leading

    run(work())


def test_a_leader_bears_a_refusal_that_is_shorter_than_its_deadline() -> None:
    async def work() -> None:
        api = FakeApi()
        one = candidate(api, "one")
        await one.acquire()
        hold = asyncio.create_task(one.hold())
        api.before = refuse
        await asyncio.sleep(DEADLINE - 3)
        api.before = allow
        await asyncio.sleep(30)
        assert one.is_leading
        hold.cancel()

    run(work())


def test_released_it_is_taken_within_a_second() -> None:
    async def work() -> float:
        api = FakeApi()
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        wait = asyncio.create_task(two.acquire())
        await asyncio.sleep(5)
        await one.release()
        assert not one.is_leading
        return await seconds(_done(wait))

    assert run(work()) <= 1


def test_release_takes_nothing_from_another_and_bears_a_server_that_is_away() -> None:
    async def work() -> None:
        api = FakeApi()
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        await two.release()
        assert holder(api) == "one"
        api.before = refuse
        await one.release()
        assert not one.is_leading

    run(work())


def test_a_process_started_under_the_holders_name_leads_at_once() -> None:
    async def work() -> float:
        api = FakeApi()
        await candidate(api, "one").acquire()
        await asyncio.sleep(1)
        return await seconds(candidate(api, "one").acquire())

    assert run(work()) == 0


def test_a_leader_that_finds_another_holder_stops_at_its_next_renewal() -> None:
    async def work() -> float:
        api = FakeApi()
        one = candidate(api, "one")
        await one.acquire()
        (lease,) = api.objects(LEASES)
        stolen = {**lease, "spec": {**lease["spec"], "holderIdentity": "two"}}
        await api.replace(LEASES, stolen, "default")
        return await seconds(one.hold())

    assert run(work()) <= 4
