"""A job that is refused causes no request of its backend: none to a service, none to a disk."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from support.api.builders import manifest
from support.kernel.fake_backend import FakeBackend
from support.kernel.kernel_world import World


class Service(FakeBackend):
    """A backend that would ask its service about the inputs of a job.

    Attributes:
        checked: Names of the jobs whose inputs were checked.
    """

    name: ClassVar[str] = "service"

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[str] = []

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        severity = Severity.WARNING if job.metadata.name == "warned" else Severity.ERROR
        is_allowed = job.metadata.name not in ("refused", "warned")
        return () if is_allowed else [Problem("spec.backend", "is not allowed", severity)]

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        self.checked.append(job.metadata.name)
        return ()


class ServiceWorld(World):
    def __init__(self) -> None:
        self.service = Service()
        super().__init__()

    def given(self, context: BackendContext) -> Mapping[str, Backend]:
        return {"service": self.service, "local": LocalBackend(context)}

    async def reconcile(self, name: str, backend: str = "service", **overrides: Any) -> None:
        fields: dict[str, Any] = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        new = manifest(name=name, backend={"type": backend}, **{**fields, **overrides})
        await self.api.create(FINE_TUNE_JOBS, defaulted(new), "ns")
        for _ in range(4):
            await self.catch_up()
            await self.reconciler.reconcile(Key("ns", name))
            self.now += timedelta(seconds=2)


@pytest.mark.parametrize(
    ("name", "overrides", "is_checked"),
    [
        ("tiny", {}, True),
        ("warned", {}, True),
        ("waits", {"suspend": True}, True),
        ("refused", {}, False),
        ("refused", {"suspend": True}, False),
        ("tiny", {"strategy__tensorParallel": 2, "topology__nodes": 2}, False),
        ("tiny", {"output__uri": "pvc://models/taken/x"}, False),
    ],
    ids=str,
)
def test_inputs_are_checked_of_jobs_that_may_run(
    name: str, overrides: Any, is_checked: bool
) -> None:
    async def work() -> None:
        world = ServiceWorld()
        await world.reconcile("first", output__uri="pvc://models/taken")
        world.service.checked.clear()
        await world.reconcile(name, **overrides)
        assert (name in world.service.checked) == is_checked

    asyncio.run(work())


def test_no_path_of_a_local_job_is_read_in_the_operators_pod(tmp_path: Path) -> None:
    async def work() -> None:
        world = ServiceWorld()
        (tmp_path / "link").symlink_to(tmp_path / "secret")
        await world.reconcile("tiny", "local", output__uri=f"file://{tmp_path}/link/out")
        (stalled,) = [one for one in world.job["status"]["conditions"] if one["type"] == "Stalled"]
        assert "local would run in the operator's own pod" in stalled["message"]
        local, job = world.backends.get("local"), FineTuneJob.model_validate(world.job)
        assert await local.check_inputs(job) == []
        assert local.writes(job) == []

    asyncio.run(work())
