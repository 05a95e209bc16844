"""What the operator declares is what its page has, over the life of a job; in virtual time."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Resource
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.page import MAX_LABEL, Snapshot, render
from finetune_trainer.config import CheckpointRef, Phase, Suspect, SuspectCause
from finetune_trainer.config.metrics import Metric, MetricType
from support.api.builders import manifest
from support.cluster.operator_pages import DECLARED, OperatorPage, read_page
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START, nothing
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run
from support.reconcile.ledgers import Rank

OF_THE_SCRAPE = {"job", "pod", "node", "instance"}
OF_A_PROCESS = {catalogue.LEADER, catalogue.BUILD_INFO, catalogue.API_REQUESTS}

BACKENDS = (*SETTINGS.backends, "secluded=support.kernel.configmap_backend:SecludedBackend")

every_metric = pytest.mark.parametrize(
    "metric", [pytest.param(one, id=one.name) for one in DECLARED]
)


@every_metric
def test_a_name_says_type_and_unit(metric: Metric) -> None:
    is_rank_zeros = metric in catalogue.OF_RANK_ZERO
    prefixes = ("finetune_train_",) if is_rank_zeros else ("finetune_operator_", "finetune_job_")
    assert metric.name.startswith(prefixes)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    name = metric.name.removesuffix("_total")
    assert (metric.unit == "seconds") == name.endswith("_seconds")
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
    if metric is not catalogue.SUSPECT:  # which names the node of a rank, not the operator's
        assert not OF_THE_SCRAPE & set(metric.label_names)


def test_each_metric_is_declared_once() -> None:
    declared = {one.name for one in vars(catalogue).values() if isinstance(one, Metric)}
    assert sorted(one.name for one in DECLARED) == sorted(declared)


class Lives:
    """An operator that leads, and a job of its own that a test plays."""

    def __init__(self, backend: str = "configmap") -> None:
        self._backend = backend
        loop = asyncio.get_running_loop()
        self.api = FakeApi()
        self.api.now = lambda: START + timedelta(seconds=loop.time())
        settings = SETTINGS.model_copy(update={"backends": BACKENDS})
        self.term = LeaderTerm(self.api, settings, listen=FollowedJobs, now=self.api.now)
        self._task = asyncio.create_task(self.term.run())

    async def apply(self, name: str = "tiny", namespace: str = "ns", **fields: object) -> None:
        made = manifest(
            name=name,
            backend={"type": self._backend},
            **{"model__source": "hf://a/b", "dataset__source": "hf://a/c", **fields},
        )
        await self.api.create(FINE_TUNE_JOBS, defaulted(made), namespace)
        await asyncio.sleep(20)

    async def play(self, attempt: str, **data: str) -> None:
        await self.api.patch(CONFIG_MAPS, attempt, "ns", {"data": data})
        await asyncio.sleep(20)

    def rank(self) -> Rank:
        """Return a rank 0 that begins now."""
        return Rank(self.api.now())

    def trains(self, rank: Rank, steps: int) -> dict[str, str]:
        """Return what is seen once it has made these steps, and saved them."""
        now = self.api.now()
        rank.enter(Phase.TRAINING, now)
        rank.make(steps)
        saved = CheckpointRef(step=steps, path="/step", time=now.timestamp(), world_size=1)
        more: dict[str, object] = {"checkpoint": saved, "total_steps": 10, "eta_seconds": 60.0}
        slow = Suspect(rank=0, node="n", cause=SuspectCause.DATA, score=1.3, since=now.timestamp())
        more |= {"loss": 2.0, "tokens_per_second": 100.0, "suspects": (slow,)}
        return {"progress": rank.report(now).model_copy(update=more).to_json()}

    def page(self) -> OperatorPage:
        snapshot = self.term.snapshot()
        calls = {("list", "finetunejobs", 200): 1}  # counted by a client that sends requests
        return read_page(
            render(Snapshot(calls, snapshot.counts, snapshot.queue, snapshot.jobs)).decode()
        )

    def phase(self) -> str:
        phases = self.page().values(catalogue.JOB_PHASE, "phase", finetunejob="tiny")
        assert set(phases) == set(JobPhase)
        (now,) = (phase for phase, value in phases.items() if value == 1)
        return now

    def end(self) -> None:
        self._task.cancel()


@pytest.mark.parametrize("backend", ["configmap", "secluded"])
def test_a_life_shows_everything_that_is_declared_and_nothing_else(backend: str) -> None:
    async def live() -> None:
        lives, seen = Lives(backend), set[Metric]()
        await lives.apply(topology__gpus_per_node=2)
        phases = [lives.phase()]
        rank = lives.rank()
        for attempt, data in (
            ("tiny-1", {"phase": "Running", "ready": "1"}),
            ("tiny-1", lives.trains(rank, 3)),
            ("tiny-1", {"phase": "Failed", "code": "137", "gone": "yes"}),
            ("tiny-2", {"phase": "Running", "ready": "1"}),
            ("tiny-2", lives.trains(lives.rank(), 2)),
            ("tiny-2", {"phase": "Succeeded", "code": "0", "gone": "yes"}),
        ):
            await lives.play(attempt, **data)
            phases.append(lives.phase())
            seen |= lives.page().metrics
        assert phases == [
            JobPhase.STARTING,
            JobPhase.STARTING,
            JobPhase.RUNNING,
            JobPhase.RESTARTING,
            JobPhase.RESTARTING,
            JobPhase.RUNNING,
            JobPhase.SUCCEEDED,
        ]
        is_scraped = backend == "configmap"
        told = set[Metric]() if is_scraped else set(catalogue.OF_RANK_ZERO)
        rare = {catalogue.JOBS_NOT_SHOWN}
        assert seen == told | (set(DECLARED) - set(catalogue.OF_RANK_ZERO) - rare)
        lives.end()

    run(live())


def test_a_replica_that_does_not_lead_tells_of_itself_alone() -> None:
    calls = {("get", "leases", 200): 2, ("get", "leases", 0): 1}
    page = read_page(render(Snapshot(calls)).decode())
    assert page.metrics == OF_A_PROCESS
    assert page.value(catalogue.LEADER) == 0
    assert page.values(catalogue.API_REQUESTS, "code", verb="get") == {"200": 2, "0": 1}


def test_reconciles_are_counted_by_backend_and_those_that_fail_from_0() -> None:
    def refuse(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", CONFIG_MAPS):
            raise UnavailableError(503, "ServiceUnavailable", "busy")

    async def live() -> None:
        lives = Lives()
        await asyncio.sleep(1)
        assert lives.page().value(catalogue.RECONCILE_ERRORS, backend="configmap") == 0
        lives.api.before = refuse
        await lives.apply()
        failed = lives.page().value(catalogue.RECONCILE_ERRORS, backend="configmap")
        assert failed > 1
        lives.api.before = nothing
        await asyncio.sleep(60)
        page = lives.page()
        done = page.value(catalogue.RECONCILE_DURATION, "_count", backend="configmap")
        assert done > failed
        assert page.value(catalogue.QUEUE_DEPTH) == page.value(catalogue.BACKLOG) == 0
        lives.end()

    run(live())


def test_a_job_of_another_controller_is_not_on_the_page() -> None:
    async def live() -> None:
        lives = Lives()
        await lives.apply("theirs", managed_by="example.com/other")
        await lives.apply("ours")
        page = lives.page()
        assert set(page.values(catalogue.JOB_INFO, "finetunejob")) == {"ours"}
        lives.end()

    run(live())


def test_what_a_short_job_did_between_two_scrapes_is_not_lost() -> None:
    async def live() -> None:
        lives = Lives()
        await lives.apply(ttl_seconds_after_finished=0, topology__gpus_per_node=2)
        assert lives.page().value(catalogue.ENDS, backend="configmap", phase="Succeeded") == 0
        await lives.play("tiny-1", phase="Running", ready="1")
        rank = lives.rank()
        await asyncio.sleep(30)
        await lives.play("tiny-1", **lives.trains(rank, 3))
        await lives.play("tiny-1", phase="Succeeded", code="0", gone="yes")
        assert lives.api.objects(FINE_TUNE_JOBS) == []
        page = lives.page()
        assert page.value(catalogue.ENDS, backend="configmap", phase="Succeeded") == 1
        for metric in (catalogue.TIME_TO_FIRST_STEP, catalogue.QUEUE_WAIT):
            assert page.value(metric, "_count", backend="configmap") == 1
        times = page.values(catalogue.WALLCLOCK, "category", finetunejob="tiny")
        ended = page.values(catalogue.ENDED_WALLCLOCK, "category", backend="configmap")
        assert {name: spent for name, spent in ended.items() if spent} == times
        gpus = page.values(catalogue.ENDED_GPU, "category", backend="configmap")
        assert gpus["starting"] == 2 * times["starting"]
        await asyncio.sleep(400)
        assert catalogue.WALLCLOCK not in lives.page().metrics
        lives.end()

    run(live())


def test_a_job_that_is_deleted_before_its_end_has_ended_too() -> None:
    async def live() -> None:
        lives = Lives()
        await lives.apply()
        await lives.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await asyncio.sleep(20)
        page = lives.page()
        assert page.value(catalogue.ENDS, backend="configmap", phase="Deleting") == 1
        times = page.values(catalogue.WALLCLOCK, "category", finetunejob="tiny")
        await lives.apply()  # of the same name
        later = lives.page().values(catalogue.WALLCLOCK, "category", finetunejob="tiny")
        assert sum(times.values()) == sum(later.values()) == 20
        lives.end()

    run(live())


def test_a_job_that_ended_long_ago_is_not_on_the_page() -> None:
    async def live() -> None:
        lives = Lives()
        await lives.apply()
        await lives.play("tiny-1", phase="Succeeded", code="0", gone="yes")
        assert lives.phase() == JobPhase.SUCCEEDED
        await asyncio.sleep(3600)
        page = lives.page()
        assert catalogue.JOB_PHASE not in page.metrics
        assert page.value(catalogue.ENDS, backend="configmap", phase="Succeeded") == 1
        lives.end()

    run(live())


def test_a_scrape_asks_nobody() -> None:
    async def live() -> None:
        lives = Lives("secluded")
        await lives.apply()
        await lives.play("tiny-1", **lives.trains(lives.rank(), 3))
        asked = dict(lives.api.calls.by_kind)
        ages = []
        for _ in range(20):
            page = lives.page()
            assert page.value(catalogue.RANK_ZERO_STEP, finetunejob="tiny", rank="0") == 3
            ages.append(page.value(catalogue.RANK_ZERO_AGE, finetunejob="tiny"))
            await asyncio.sleep(0.1)
        assert ages == sorted(set(ages))
        assert lives.api.calls.by_kind == asked
        lives.end()

    run(live())


def test_nobody_can_scrape_what_runs_on_azure_ml() -> None:
    assert not AzureMLBackend.pages_are_scraped
    assert KubernetesBackend.pages_are_scraped


CROWD = ("crowd-0", "crowd-1", "crowd-2", "crowd-3")


def shown(page: OperatorPage) -> dict[str, int]:
    """Return the number of series of each job."""
    return Counter(
        sample.labels["finetunejob"] for sample in page.samples if "finetunejob" in sample.labels
    )


def test_the_jobs_of_a_namespace_beyond_its_number_of_series_are_counted_instead() -> None:
    async def work() -> tuple[OperatorPage, OperatorPage]:
        lives = Lives()
        for name in CROWD:
            await lives.apply(name, suspend=True)
        await lives.apply("alone", "quiet", suspend=True)
        snapshot = lives.term.snapshot()
        of_a_job = shown(read_page(render(snapshot).decode()))["alone"]
        limited = replace(snapshot, max_series=3 * of_a_job - 1)
        return read_page(render(snapshot).decode()), read_page(render(limited).decode())

    whole, limited = run(work())
    assert set(shown(whole)) == {*CROWD, "alone"}
    assert catalogue.JOBS_NOT_SHOWN not in whole.metrics
    assert set(shown(limited)) == {"crowd-0", "crowd-1", "alone"}
    assert limited.values(catalogue.JOBS_NOT_SHOWN, "namespace") == {"ns": 2}


def test_a_published_number_of_series_suffices_for_600_jobs_of_a_namespace() -> None:
    async def work() -> OperatorPage:
        lives = Lives("secluded")
        await lives.apply()
        rank = lives.rank()
        await lives.play("tiny-1", phase="Running", ready="1")
        await lives.play("tiny-1", **lives.trains(rank, 4))
        return lives.page()

    assert shown(run(work()))["tiny"] <= catalogue.MAX_SERIES / 600


def test_the_value_of_a_label_is_cut() -> None:
    async def work() -> OperatorPage:
        lives = Lives()
        await lives.apply(model__source="hf://a/" + "b" * 400)
        return lives.page()

    (model,) = run(work()).values(catalogue.JOB_INFO, "model")
    assert len(model) == MAX_LABEL
    assert model.endswith("bbb...")
