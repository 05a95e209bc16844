"""FineTuneJobs on a stand-in for Azure ML, with real ranks: preempted, suspended and resumed.

`make run-azureml` is one of them, as docs/how-to/azure-ml.md shows it, with the real small model.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from azureml_service import SeenJob, ServiceClient, running_service
from finetune_operator.kube.resources import FINE_TUNE_JOBS, FINE_TUNE_PROFILES, Object
from finetune_trainer.checkpoint.commit import ledger
from finetune_trainer.config import (
    ENV_TRAIN_CONFIG,
    HEARD_TAG,
    PROGRESS_TAG,
    Heard,
    Progress,
    Termination,
    TrainConfig,
    unpack,
)
from finetune_trainer.launch.azureml.mounts import resolve_mounts
from support.azureml.walk_azureml import ASSETS, NAMESPACE, PROFILE, served
from support.cluster.operators import Api, phase_of, wait_until
from support.launch.forked_ranks import attempt, numbers
from support.launch.journals import journal_in
from support.launch.tiny_run import write_inputs

pytest.importorskip("azure.identity", reason="needs the extra azureml")
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # most of it is waiting for polls

STEPS, SAVE_EVERY = 80, 4
PATIENCE_SECONDS = 280.0
ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "how-to" / "azure-ml.md"
FAILED, REQUEUED, SUSPENDED = "failed", "requeued", "suspended"
RANKS = {
    FAILED: {"nodes": 1, "processesPerNode": 2},
    REQUEUED: {"nodes": 2, "processesPerNode": 1},
}
"""The ranks of the job that is preempted in each way."""
SPEC: Mapping[str, Any] = {
    "model": {"source": "azureml://models/tiny/versions/1"},
    "dataset": {"source": "azureml://datastores/rows/paths/train.jsonl"},
    "method": {"type": "lora", "lora": {"r": 4, "dropout": 0.2}},
    "training": {
        "maxSteps": STEPS,
        "globalBatchSize": 4,
        "maxSeqLength": 64,
        "learningRate": 1e-3,
    },
    "topology": {"gpusPerNode": 0, **RANKS[FAILED]},
    "checkpoint": {"everySteps": SAVE_EVERY},
    "backend": {"type": "azureml"},
}


@dataclass
class Life:
    """What became of a FineTuneJob.

    Attributes:
        made: As it was at the end.
        runs: Its jobs on Azure ML, the first attempt's first.
        losses: By step, of all starts together; of a step made twice the later one.
    """

    made: Object
    runs: list[SeenJob]
    losses: dict[int, float]

    @property
    def attempts(self) -> list[Object]:
        """What the status says of the attempts."""
        return list(self.made["status"]["attempts"])


class World:
    """The operator and the service, as one job's life sees them; each life has a thread."""

    def __init__(self, kubeconfig: str, service: ServiceClient, folder: Path, name: str) -> None:
        self.api, self.service, self.name = Api(kubeconfig), service, name
        self._nodes = folder / "nodes"

    def close(self) -> None:
        self.api.close()

    def apply(self, **changes: Mapping[str, Any]) -> None:
        """Create the job, with changes of parts of its spec."""
        meta = {"apiVersion": FINE_TUNE_JOBS.api_version, "kind": FINE_TUNE_JOBS.kind}
        spec = {key: {**value, **changes.get(key, {})} for key, value in SPEC.items()}
        made = {**meta, "metadata": {"name": self.name}, "spec": spec}
        self.api.run(self.api.client.create(FINE_TUNE_JOBS, made, NAMESPACE))

    @property
    def runs(self) -> list[SeenJob]:
        """Its jobs on Azure ML, the first attempt's first."""
        return [one for one in self.service.jobs() if one.tags["finetune.job"] == self.name]

    @property
    def folder(self) -> Path:
        """Where its checkpoints are."""
        uid = self.made["metadata"]["uid"]
        return self.service.datastore("kept", f"finetune/{NAMESPACE}/{self.name}/{uid}/checkpoints")

    @property
    def made(self) -> Object:
        """It, as the API server has it."""
        made = self.api.job(NAMESPACE, self.name)
        assert made is not None
        return made

    def wait_for(self, check: Callable[[], object], what: str) -> None:
        wait_until(check, PATIENCE_SECONDS, f"{self.name}: {what}")

    def wait_for_phase(self, phase: str) -> None:
        self.wait_for(lambda: phase_of(self.made) == phase, phase)

    def live(self) -> Life:
        """Return what became of it; of a killed start, its node's disk has the losses."""
        losses: dict[int, float] = {}
        for run in self.runs:
            for run_dir in sorted(self._nodes.glob(f"{run.name}/*/tmp/*/run")):
                told = [one for one in journal_in(run_dir) if one["event"] == "step"]
                losses |= {one["step"]: one["loss"] for one in told}
            drawn = [point for point in run.points if point["key"] == "train/loss"]
            losses |= {point["step"]: point["value"] for point in drawn}
        return Life(self.made, self.runs, losses)


def preempt(world: World, how: str, **changes: Any) -> Life:
    """Take the nodes of a job away after its first checkpoint, and let it go on to its end."""
    world.apply(**changes)
    world.wait_for(lambda: world.runs, "is submitted")
    world.wait_for(lambda: ledger(world.folder), "commits")
    world.service.preempt(world.runs[0].name, how)
    world.wait_for_phase("Succeeded")
    return world.live()


def suspend(world: World) -> Life:
    """Suspend a job while it trains, let it begin to go on, and end it."""
    world.apply(training={"maxSteps": 1_000_000})
    world.wait_for(lambda: (world.made["status"].get("progress") or {}).get("step"), "trains")
    world.api.change(NAMESPACE, world.name, suspend=True)
    world.wait_for_phase("Suspended")
    world.api.change(NAMESPACE, world.name, suspend=False)
    world.wait_for(lambda: len(world.runs) == 2, "is submitted again")
    world.wait_for(lambda: _resumed_step(world.runs[1]), "goes on")
    life = world.live()
    world.api.change(NAMESPACE, world.name, suspend=True)
    return life


def _resumed_step(run: SeenJob) -> int | None:
    told = run.tags.get(PROGRESS_TAG)
    return Progress.model_validate_json(told).resumed_step if told else None


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, "Future[Life]"]]:
    """All lives at once, as most of each is waiting for the next look."""
    folder = tmp_path_factory.mktemp("azure")
    with (
        running_service(folder / "service", runs_jobs=True, cancel="sigkill") as service,
        ThreadPoolExecutor() as threads,
    ):
        inputs = write_inputs(service.datastore("rows"))
        (inputs / "model").rename(service.model("tiny", "1"))
        with served(folder, service.environ()) as api:
            allow = {**PROFILE["spec"]["allow"], "maxNodes": 2}
            profile = {**PROFILE, "spec": {**PROFILE["spec"], "allow": allow}}
            api.run(api.client.create(FINE_TUNE_PROFILES, profile))

            def begin(name: str, live: Callable[..., Life], *arguments: Any, **changes: Any) -> Any:
                return threads.submit(in_world, name, live, *arguments, **changes)

            def in_world(
                name: str, live: Callable[..., Life], *arguments: Any, **changes: Any
            ) -> Life:
                with closing(World(api.kubeconfig, service, folder / "service", name)) as world:
                    return live(world, *arguments, **changes)

            begun = {SUSPENDED: begin(SUSPENDED, suspend)}
            for how, ranks in RANKS.items():
                begun[how] = begin(how, preempt, how, topology=ranks)
            yield begun


@pytest.fixture(scope="module")
def undisturbed(
    lives: Mapping[str, "Future[Life]"], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """The losses of the same configuration in two ranks on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = lives[FAILED].result().runs[0]
    config = unpack(run.properties["environmentVariables"][ENV_TRAIN_CONFIG])
    inputs = write_inputs(folder / "inputs")
    mounts = {
        "model": inputs / "model",
        "data": inputs,
        **{name: folder / name for name in ("checkpoints", "output", "scratch")},
    }
    local: TrainConfig = resolve_mounts(config, {name: str(path) for name, path in mounts.items()})
    (folder / "scratch").mkdir()
    assert attempt(local) == [0, 0]
    return {step: loss for step, (loss, *_) in numbers(local)["steps"].items()}


@pytest.mark.model
@pytest.mark.skipif(
    not (ASSETS / "model").is_dir(),
    reason="the quickstart's model is not there; run: make quickstart-assets",
)
@pytest.mark.usefixtures("lives")  # they wait for polls meanwhile
def test_the_walk_ends_as_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "support" / "azureml" / "walk_azureml.py"),
            str(tmp_path / "walk"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The number of progress lines depends on the machine.
    wanted, found = (
        [line for line in text.splitlines() if not re.match(r"attempt \d+: ", line)]
        for text in (shown, done.stdout)
    )
    assert len(found) == len(wanted), done.stdout
    for one, other in zip(found, wanted, strict=True):
        pattern = re.escape(other).replace("…", ".*").replace("\\ ", " ")
        assert re.fullmatch(pattern, one), (one, other)


def test_a_preempted_job_goes_on_in_its_second_attempt_to_the_same_losses(
    lives: Mapping[str, "Future[Life]"], undisturbed: dict[int, float]
) -> None:
    life = lives[FAILED].result()
    first, second = life.attempts
    assert first["failureClass"] == "Preempted"
    assert second["resumedStep"] % SAVE_EVERY == 0
    assert [run.state for run in life.runs] == ["Failed", "Completed"]
    assert [nodes_of(run) for run in life.runs] == 2 * [RANKS[FAILED]["nodes"]]
    assert life.losses == pytest.approx(undisturbed, abs=2e-5)
    assert life.made["status"]["artifacts"]


def nodes_of(run: SeenJob) -> int:
    """Return the number of nodes that a run asks for."""
    return (run.properties.get("resources") or {}).get("instanceCount") or 1


def test_a_run_that_the_service_starts_again_goes_on_to_the_same_losses(
    lives: Mapping[str, "Future[Life]"], undisturbed: dict[int, float]
) -> None:
    life = lives[REQUEUED].result()
    assert len(life.attempts) == 1
    (run,) = life.runs
    assert nodes_of(run) == RANKS[REQUEUED]["nodes"]
    assert (run.state, run.starts) == ("Completed", 2)
    assert Heard.model_validate_json(run.tags[HEARD_TAG]).starts == 2
    assert (_resumed_step(run) or 0) % SAVE_EVERY == 0
    assert life.losses == pytest.approx(undisturbed, abs=2e-5)


def test_a_job_that_is_suspended_without_a_signal_loses_no_step(
    lives: Mapping[str, "Future[Life]"],
) -> None:
    life = lives[SUSPENDED].result()
    first, second = life.runs
    said = Termination.model_validate_json(first.logs["user_logs/std_log.txt"].splitlines()[-1])
    assert said.exit_code == 75
    assert first.state == "Failed", "it was killed"
    assert (
        _resumed_step(second) == said.step == max(step for step in life.losses if step <= said.step)
    )
