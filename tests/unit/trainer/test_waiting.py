"""How a rank finds, while it waits for another one, that this will not come."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from finetune_trainer.control import classify
from finetune_trainer.errors import LostRankError
from finetune_trainer.waiting import Waiting

SILENT_SECONDS = 0.6
_NAMES = count()


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


@pytest.fixture
def store(server: TCPStore) -> Store:
    return PrefixStore(f"test-{next(_NAMES)}", server)


def rank(store: Store, number: int, world_size: int = 2) -> Waiting:
    connection: Store = store.clone()  # type: ignore[attr-defined]
    return Waiting(connection, rank=number, world_size=world_size, silent_seconds=SILENT_SECONDS)


@pytest.fixture
def two(store: Store) -> Iterator[list[Waiting]]:
    made = [rank(store, 0), rank(store, 1)]
    yield made
    for one in made:
        one.close()


def test_ranks_meet_as_often_as_they_like_in_two_places(two: list[Waiting]) -> None:
    def go(one: Waiting) -> None:
        for _ in range(20):
            one.liveness_barrier("here")
            one.liveness_barrier("there")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(go, two))


def test_nothing_stays_in_the_store_of_meetings_that_all_have_left(
    store: Store, two: list[Waiting]
) -> None:
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            list(threads.map(Waiting.liveness_barrier, two))
    assert not store.check(["control/1"])
    assert not store.check(["control/1/0"])
    assert not store.check(["control/1/1"])
    assert store.check(["control/3", "control/3/0", "control/3/1"])


def test_a_rank_that_is_silent_is_named(two: list[Waiting]) -> None:
    two[1].close()  # its heart stops, as when its process is killed or stopped
    with pytest.raises(LostRankError, match=r"^rank 1 has not responded for \d+ s, "):
        two[0].liveness_barrier()


def test_a_rank_that_ends_with_an_error_is_named_at_once(two: list[Waiting]) -> None:
    with ThreadPoolExecutor(1) as threads:
        met = threads.submit(two[0].liveness_barrier)
        two[1].leave()
        with pytest.raises(LostRankError, match=r"^rank 1 has ended with an error; see its log$"):
            met.result()


def test_a_store_that_is_gone_is_named_with_the_rank_that_held_it() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    client.set_timeout(timedelta(seconds=5))
    one = Waiting(client, rank=1, world_size=2, silent_seconds=60)
    del server
    with pytest.raises(LostRankError, match=r"^the store of the ranks does not respond .* rank 0"):
        one.liveness_barrier()


def test_who_waited_in_vain_is_not_to_blame() -> None:
    verdict = classify(LostRankError("rank 1 has ended with an error; see its log"))
    assert verdict.is_collateral
    assert verdict.failure_class == "WorkerLost"
