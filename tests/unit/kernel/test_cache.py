"""Caches: what gets in, what is taken out, and what is too old for either."""

import pytest

from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import PODS, Object


def pod(name: str, version: int, job: str = "tiny", namespace: str = "ns") -> Object:
    metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {JOB_LABEL: job}}}


@pytest.fixture
def cache() -> ObjectCache:
    return ObjectCache(PODS)


def test_the_newer_object_stays_whichever_way_round_it_comes(cache: ObjectCache) -> None:
    assert cache.put(pod("a", 5))
    cache.put(pod("a", 4))
    assert cache.get(Key("ns", "a")) == pod("a", 5)
    assert cache.put(pod("a", 6))
    assert cache.get(Key("ns", "a")) == pod("a", 6)


def test_what_an_answer_has_overtaken_is_news_and_its_echo_is_none(cache: ObjectCache) -> None:
    cache.put(pod("a", 5))
    cache.put(pod("a", 7))  # the answer to a write of ours, with what became version 6
    assert cache.put(pod("a", 6))
    assert not cache.put(pod("a", 7))
    assert cache.get(Key("ns", "a")) == pod("a", 7)


def test_an_answer_older_than_a_deletion_does_not_bring_the_object_back(
    cache: ObjectCache,
) -> None:
    cache.put(pod("a", 5))
    assert cache.remove(pod("a", 9))
    assert not cache.put(pod("a", 7))
    assert cache.get(Key("ns", "a")) is None
    assert cache.put(pod("a", 10))


def test_a_deletion_is_remembered_until_no_older_answer_may_come(cache: ObjectCache) -> None:
    for name, version in (("a", 5), ("b", 6)):
        cache.put(pod(name, version))
        cache.remove(pod(name, version + 4))
    cache.forget_deletions(9)
    assert cache.put(pod("a", 7))
    assert not cache.put(pod("b", 7))


def test_the_deletion_of_an_earlier_object_does_not_remove_its_successor(
    cache: ObjectCache,
) -> None:
    cache.put(pod("a", 12))
    assert not cache.remove(pod("a", 9))
    assert cache.get(Key("ns", "a")) == pod("a", 12)


def test_a_full_list_takes_out_what_it_lacks_and_keeps_what_is_newer(cache: ObjectCache) -> None:
    for one in (pod("gone", 1), pod("stays", 2), pod("changed", 3), pod("written-since", 20)):
        cache.put(one)
    listed = [pod("stays", 2), pod("changed", 8), pod("new", 9)]
    changed = cache.replace(listed, "10")
    assert changed == [pod("gone", 1), pod("changed", 8), pod("new", 9)]
    assert {one["metadata"]["name"] for one in cache} == {
        "stays",
        "changed",
        "new",
        "written-since",
    }


def test_a_list_of_one_namespace_says_nothing_of_others(cache: ObjectCache) -> None:
    cache.put(pod("a", 1, namespace="other"))
    cache.put(pod("b", 2))
    assert cache.replace([], "10", "ns") == [pod("b", 2)]
    assert len(cache) == 1


def test_children_are_found_by_the_job_that_their_label_names(cache: ObjectCache) -> None:
    for one in (pod("b", 1), pod("a", 2), pod("c", 3, job="other")):
        cache.put(one)
    job = Key("ns", "tiny")
    assert [one["metadata"]["name"] for one in cache.of_job(job)] == ["a", "b"]
    cache.remove(pod("a", 5))
    cache.put(pod("b", 6, job="other"))
    assert cache.of_job(job) == []
    assert [one["metadata"]["name"] for one in cache.of_job(Key("ns", "other"))] == ["b", "c"]


def test_absence_means_nothing_before_the_first_list(cache: ObjectCache) -> None:
    assert not cache.is_synced
    cache.replace([], "1")
    assert cache.is_synced
