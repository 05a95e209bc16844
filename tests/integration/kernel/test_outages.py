"""An API server that restarts, an etcd that hangs, a watch that expires, and a kind that goes.

Afterwards everything must be as in the namespace of a twin that met no fault. The control plane is
the tests' own: KUBEBUILDER_ASSETS names the folder of its programs (etcd and kube-apiserver, as
setup-envtest fetches them). The Lease has its default times, and etcd hangs for longer than those.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.api_errors import (
    AlreadyExistsError,
    GoneError,
    NotFoundError,
    UnavailableError,
)
from finetune_operator.kube.resources import CONFIG_MAPS, CRDS, FINE_TUNE_JOBS, Object
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.gates import Gate
from support.cluster.operators import Api, OperatorProcess, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no control plane"),
]

ETCD_SECONDS = 30
RECOVERY_SECONDS = 15
SEEN_SECONDS = 5
WRITES = ("create", "update", "patch", "delete")
NO_BACKOFF = {"backoff": {"baseSeconds": 0, "maxSeconds": 1}}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="module")
def own_api(plane: ControlPlane) -> Iterator[Api]:
    made = Api(str(plane.kubeconfig))
    made.install_crds()
    yield made
    made.close()


def persist(change: Callable[[], Any]) -> None:
    """Make a change, however often it takes; what was done without an answer is done."""
    is_first = True
    while True:
        try:
            change()
        except UnavailableError:
            is_first = False
            continue
        except (NotFoundError, AlreadyExistsError):
            if is_first:
                raise
        return


@dataclass(frozen=True)
class Story:
    """What happens to the jobs of one namespace; the name of each job tells its end."""

    api: Api
    namespace: str
    round: str

    def begin(self) -> None:
        """Start jobs, and wait until each has its attempt."""
        names = [f"{self.round}-{what}" for what in ("runs", "fails", "ends", "goes", "vanishes")]
        for name in (*names, f"{self.round}-pauses"):
            self.api.apply(self.namespace, name, restart_policy=NO_BACKOFF)
            self._await_attempt(name)
        for name in (f"{self.round}-fails", f"{self.round}-vanishes"):
            self.api.play(self.namespace, f"{name}-1", phase="Running", ready="1", step="2")
            self._await_running(name)

    def _await_attempt(self, name: str) -> None:
        wait_until(lambda: f"{name}-1" in self.api.attempts(self.namespace), 20, name)

    def _await_running(self, name: str) -> None:
        wait_until(lambda: self.api.phase(self.namespace, name) == "Running", 20, name)

    def go_on(self) -> None:
        """Change every one of them, as their pods, their users and the garbage collector do."""
        api, at, each = self.api, self.namespace, self.round
        persist(lambda: api.play(at, f"{each}-runs-1", phase="Running", ready="1", step="1"))
        persist(lambda: api.play(at, f"{each}-fails-1", phase="Failed", code="137", gone="yes"))
        persist(lambda: api.play(at, f"{each}-ends-1", phase="Succeeded", code="0", gone="yes"))
        persist(lambda: api.delete(at, f"{each}-goes"))
        persist(lambda: self._drop(f"{each}-vanishes-1"))
        persist(lambda: api.change(at, f"{each}-pauses", suspend=True))
        persist(lambda: api.apply(at, f"{each}-comes", restart_policy=NO_BACKOFF))

    def _drop(self, child: str) -> None:
        self.api.run(self.api.client.delete(CONFIG_MAPS, child, self.namespace))

    def told(self) -> dict[str, Any]:
        """Return every status and every child of a job that is there, but for what varies."""
        listing = self.api.run(self.api.client.list(FINE_TUNE_JOBS, self.namespace))
        jobs = [one for one in listing.items if _name(one).startswith(self.round)]
        uids = {one["metadata"]["uid"] for one in jobs}
        children = self.api.run(self.api.client.list(CONFIG_MAPS, self.namespace)).items
        told = {
            "jobs": {_name(one): _timeless(one["status"]) for one in jobs},
            # The others are the garbage collector's.
            "children": {_name(one): one["data"] for one in children if _owner(one) in uids},
        }
        made: dict[str, Any] = json.loads(json.dumps(told).replace(f"{self.round}-", ""))
        return made


def _name(made: Object) -> str:
    return str(made["metadata"]["name"])


def _owner(made: Object) -> str:
    owners = made["metadata"].get("ownerReferences") or [{"uid": ""}]
    return str(owners[0]["uid"])


_VARYING = {"uid", "url", "startTime", "endTime", "completionTime", "lastTransitionTime"}
_VARYING |= {"lastUpdateTime", "stopDeadline", "ledger", "name", "artifacts"}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in _VARYING}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def undisturbed(api: Api) -> dict[str, Any]:
    """Return what the story comes to where nothing goes wrong."""
    with (
        api.namespace("twin") as namespace,
        OperatorProcess(api.kubeconfig, namespace) as operator,
    ):
        operator.wait_for("synced")
        story = Story(api, namespace, "twin")
        story.begin()
        story.go_on()
        wait_until(lambda: _is_over(story.told()), 30, "the twin's story ends")
        return story.told()


def _is_over(told: dict[str, Any]) -> bool:
    return {name: one["phase"] for name, one in told["jobs"].items()} == {
        "runs": "Running",
        "fails": "Restarting",
        "ends": "Succeeded",
        "vanishes": "Restarting",
        "pauses": "Suspended",
        "comes": "Starting",
    } and {"fails-2", "vanishes-2", "comes-1"} <= told["children"].keys()


def etcd_hangs(plane: ControlPlane, story: Story, gate: Gate, operator: OperatorProcess) -> None:
    end = plane.stop_etcd(ETCD_SECONDS)
    started_at = time.monotonic()
    wait_until(lambda: not operator.health()["leading"], Settings().renew_deadline_seconds + 1)
    before = operator.calls(*WRITES)
    time.sleep(max(0.0, started_at + ETCD_SECONDS - 1 - time.monotonic()))
    assert operator.calls(*WRITES) == before
    story.go_on()
    end.join()


def server_restarts(
    plane: ControlPlane, story: Story, gate: Gate, operator: OperatorProcess
) -> None:
    gate.shut()
    story.go_on()
    plane.kill_server()
    plane.start_server(watch_cache=False)
    gate.open()


def watch_expires(plane: ControlPlane, story: Story, gate: Gate, operator: OperatorProcess) -> None:
    api, seen = story.api, operator.calls("list")
    leading = len(operator.said("leading"))
    old = api.run(api.client.list(CONFIG_MAPS, story.namespace)).resource_version
    gate.shut()
    story.go_on()
    plane.forget_history(api)
    gate.open()
    with pytest.raises(GoneError):
        api.run(_watch(api, story.namespace, old))
    wait_until(
        lambda: operator.calls("list")["list configmaps 200"] > seen["list configmaps 200"], 15
    )
    assert len(operator.said("leading")) == leading  # it was none of the Lease's doing


async def _watch(api: Api, namespace: str, version: str) -> None:
    async for _ in api.client.watch(CONFIG_MAPS, namespace, resource_version=version):
        pass


def test_one_process_outlives_a_hanging_etcd_a_restart_and_an_expired_watch(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    outages = {"etcd": etcd_hangs, "server": server_restarts, "watch": watch_expires}
    expected = undisturbed(own_api)
    with (
        own_api.namespace("outages") as namespace,
        Gate(str(plane.kubeconfig), tmp_path) as gate,
        OperatorProcess(gate.kubeconfig, namespace) as operator,
    ):
        operator.wait_for("synced")
        for name, outage in outages.items():
            story = Story(own_api, namespace, name)
            story.begin()
            outage(plane, story, gate, operator)
            answered_at = time.monotonic()
            end = answered_at + RECOVERY_SECONDS
            while story.told() != expected and time.monotonic() < end:
                time.sleep(0.1)
            told = story.told()
            for what, one in expected.items():
                assert told[what] == one, f"after {name}"
            print(f"{name}: {time.monotonic() - answered_at:.1f} s after the API answered")
            assert operator.is_running
            assert operator.health("healthz")["complaints"] == []


def attempted(api: Api, namespace: str, name: str) -> None:
    """Apply a job, and wait until it has its attempt."""
    api.apply(namespace, name)
    wait_until(lambda: f"{name}-1" in api.attempts(namespace), SEEN_SECONDS, f"{name} has one")


def comes_without_a_list(api: Api, operator: OperatorProcess, namespace: str, name: str) -> bool:
    """Say whether only kopf can have told of a new job, once that has its attempt."""
    lists = num_lists(operator)
    attempted(api, namespace, name)
    return num_lists(operator) == lists


def num_lists(operator: OperatorProcess) -> int:
    """Return how often the operator has listed FineTuneJobs; what kopf does is not in it."""
    counts = operator.calls("list").items()
    return sum(count for kind, count in counts if kind.split()[1] == "finetunejobs")


def test_jobs_are_watched_again_within_seconds_of_the_return_of_their_kind(
    plane: ControlPlane, own_api: Api
) -> None:
    kind = str(FINE_TUNE_JOBS)
    with (
        own_api.namespace("kind") as namespace,
        OperatorProcess(plane.kubeconfig, namespace) as operator,
    ):
        operator.wait_for("synced")
        attempted(own_api, namespace, "before")
        own_api.run(own_api.client.delete(CRDS, kind))
        wait_until(lambda: kind in operator.health()["absent"], 60, "it is told")
        assert operator.health()["code"] == 503
        assert operator.health("healthz")["code"] == 200  # a restart would not bring it back
        own_api.run(own_api.client.delete(CONFIG_MAPS, "before-1", namespace))
        own_api.install_crds()
        for name in ("before", "after"):
            attempted(own_api, namespace, name)
        # Only kopf can tell of a job without a list; the gap may still owe a list or two.
        later = (f"later-{number}" for number in range(20))
        assert any(comes_without_a_list(own_api, operator, namespace, name) for name in later)
        # The definition is asked for again some seconds later.
        wait_until(lambda: operator.health()["code"] == 200, 30, "it is ready again")
        health = operator.health("healthz")
        assert (health["absent"], health["complaints"]) == ({}, [])
        assert operator.said("kopf ended; it starts again") != []
