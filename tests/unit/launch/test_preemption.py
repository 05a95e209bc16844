"""What a node's metadata service says of its end, asked of a stand-in on this machine."""

import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from finetune_trainer.control import StopSignal
from finetune_trainer.preemption import watch_scheduled_events
from support.launch.launches import free_port, until
from support.launch.metadata_service import Service, event, metadata_service


@pytest.fixture
def service() -> Iterator[Service]:
    with metadata_service() as made:
        yield made


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_an_event_that_takes_this_machine_stops_the_run_in_the_time_it_leaves(
    service: Service, kind: str
) -> None:
    begins = formatdate(time.time() + 300, usegmt=True)
    service.events = [event(kind, "node-1", NotBefore=begins)]
    stop, told = StopSignal(), list[str]()
    watch_scheduled_events(service.url, stop, lambda message: told.append(message))
    until(lambda: stop.requested)
    assert stop.reason == f"an Azure {kind} event"
    assert 200 < stop.seconds_left(grace_seconds=600) <= 300
    assert told == []


def test_other_events_and_other_machines_stop_nothing(service: Service) -> None:
    service.events = [event("Preempt", "node-2"), event("Freeze", "node-1")]
    stop = StopSignal()
    watch_scheduled_events(service.url, stop, lambda message: None)
    assert service.asked.wait(60)
    service.asked.clear()
    assert service.asked.wait(60), "it is asked again"
    assert not stop.requested
    service.events = [event("Preempt", "node-1")]
    until(lambda: stop.requested)
    assert stop.seconds_left(grace_seconds=600) > 500


def test_answers_that_are_cut_off_are_told_of_once_and_asked_for_again(service: Service) -> None:
    service.is_cut_off = True
    service.events = [event("Preempt", "node-1")]
    stop, told = StopSignal(), list[str]()
    watch_scheduled_events(service.url, stop, lambda message: told.append(message))
    until(lambda: bool(told))
    assert told[0].startswith(f"Scheduled Events cannot be read from {service.url} (")
    assert not stop.requested
    service.is_cut_off = False
    until(lambda: stop.requested)
    assert len(told) == 1


def test_a_service_that_is_not_there_is_told_of_once_and_asked_on() -> None:
    port, stop, told = free_port(), StopSignal(), list[str]()
    url = f"http://127.0.0.1:{port}/metadata/scheduledevents?api-version=2020-07-01"
    watch_scheduled_events(url, stop, lambda message: told.append(message))
    until(lambda: bool(told))
    assert told[0].startswith(f"Scheduled Events cannot be read from {url} (")
    assert not stop.requested
    stop.request("the end of the test")
    assert len(told) == 1
