"""Responses of a service are cached up to a number, which no job can exceed."""

import asyncio

from finetune_operator.backends.response_cache import MAX_RESPONSES, ResponseCache
from support.kernel import virtual_time


class Service:
    """Responds after a second.

    Attributes:
        asked: Keys in the order of the requests.
    """

    def __init__(self) -> None:
        self.cache = ResponseCache()
        self.asked: list[int] = []

    async def get(self, key: int) -> int | None:
        async def ask() -> int:
            self.asked.append(key)
            await asyncio.sleep(1.0)
            return key

        return await self.cache.get(key, ask)


def test_the_response_that_was_used_last_stays_and_the_oldest_is_discarded() -> None:
    async def work() -> None:
        service = Service()
        for key in (-1, -2):
            await service.get(key)
        for first in range(0, 3 * MAX_RESPONSES, 100):
            await asyncio.gather(*(service.get(first + key) for key in range(100)))
            assert await service.get(-1) == -1
        assert service.asked.count(-1) == 1
        assert await service.get(-2) == -2
        assert service.asked.count(-2) == 2

    virtual_time.run(work())


def test_more_requests_at_once_than_are_cached_each_get_their_own_response() -> None:
    async def work() -> None:
        service, keys = Service(), range(2 * MAX_RESPONSES)
        found = await asyncio.gather(*(service.get(key) for key in (*keys, *keys)))
        assert found == [*keys, *keys]

    virtual_time.run(work())
