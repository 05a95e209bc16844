"""What a watch of the embedded API sends while nothing happens, in virtual time."""

import pytest

from finetune_operator.embedded.api_requests import ApiRequest
from finetune_operator.embedded.store import Change, Store
from finetune_operator.embedded.watching import Watch
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import CONFIG_MAPS
from support.kernel import virtual_time


class CountingStore(Store):
    """Bears only so many looks at its history, as a watch that never sleeps takes no time."""

    looks = 0

    def since(self, version: int, plural: str) -> list[Change]:
        self.looks += 1
        assert self.looks < 20, "the watch does not sleep"
        return super().since(version, plural)


@pytest.mark.parametrize(
    ("more", "bookmarks"),
    [
        pytest.param({"allowWatchBookmarks": "true"}, 5, id="bookmarks"),
        pytest.param({}, 0, id="no bookmarks"),
    ],
)
def test_a_watch_sleeps_until_its_next_bookmark_or_its_end(
    more: dict[str, str], bookmarks: int
) -> None:
    async def work() -> list[str]:
        store = CountingStore()
        query = {"resourceVersion": "1", "timeoutSeconds": "60", **more}
        request = ApiRequest(store.kinds[str(CONFIG_MAPS)], Key("", ""), "", query, "", b"")
        watch = Watch(store, request)
        return [event["type"] async for event in watch.events()]

    assert virtual_time.run(work()) == ["BOOKMARK"] * bookmarks
