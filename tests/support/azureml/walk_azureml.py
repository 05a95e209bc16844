"""`make run-azureml`: the quickstart's model on a stand-in for Azure ML, preempted once.

    PYTHONPATH=tests python tests/support/azureml/walk_azureml.py FOLDER

It serves `ftctl dev` in FOLDER, applies the profile and the job that it writes there, takes the
job's node away after a checkpoint, and prints what the job's status says until it is Complete.
docs/how-to/azure-ml.md shows it; no step of it needs Azure.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from azureml_service import running_service
from azureml_service.client import ServiceClient
from azureml_service.resources import WORKSPACE
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.kube.resources import FINE_TUNE_JOBS, FINE_TUNE_PROFILES, Object
from finetune_trainer.checkpoint.commit import MANIFEST
from support.cluster.operators import Api

ASSETS = Path(__file__).parents[3] / "examples" / ".quickstart"
NAMESPACE, NAME = "default", "quickstart"
END_SECONDS = 900.0
_LOOK_SECONDS = 0.2
_SUBSCRIPTION, _GROUP = WORKSPACE.split("/")[2:5:2]

PROFILE: Object = {
    "apiVersion": FINE_TUNE_PROFILES.api_version,
    "kind": FINE_TUNE_PROFILES.kind,
    "metadata": {"name": "default"},
    "spec": {
        "azureml": {
            "subscriptionId": _SUBSCRIPTION,
            "resourceGroup": _GROUP,
            "workspace": WORKSPACE.rpartition("/")[2],
            "compute": "cpu-cluster",
            "environment": "azureml:trainer:1",
            "datastore": "kept",
            "env": {"OMP_NUM_THREADS": "1"},  # two ranks share two cores
        },
        "allow": {"namespaces": [NAMESPACE], "datastores": ["rows"]},
    },
}

JOB: Object = {
    "apiVersion": FINE_TUNE_JOBS.api_version,
    "kind": FINE_TUNE_JOBS.kind,
    "metadata": {"name": NAME},
    "spec": {
        "model": {"source": "azureml://models/smollm2/versions/1"},
        "dataset": {
            "source": "azureml://datastores/rows/paths/train.jsonl",
            "evalSource": "azureml://datastores/rows/paths/eval.jsonl",
            "format": "chat",
        },
        "method": {"type": "lora", "lora": {"r": 8, "alpha": 16}},
        "training": {
            "maxSteps": 8,
            "globalBatchSize": 2,
            "maxSeqLength": 128,
            "learningRate": 3e-3,
        },
        "topology": {"gpusPerNode": 0, "processesPerNode": 2},
        "checkpoint": {"everySteps": 4},
        "backend": {"type": "azureml"},
    },
}


def main() -> int:
    """Walk, and return the exit code."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/azureml").resolve()
    if not (ASSETS / "model").is_dir():
        print("the quickstart's model is not there; run: make quickstart-assets")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with running_service(folder / "azure", runs_jobs=True) as service:
        shutil.copy(ASSETS / "train.jsonl", service.datastore("rows"))
        few = (ASSETS / "eval.jsonl").read_text().splitlines(keepends=True)[:16]
        (service.datastore("rows") / "eval.jsonl").write_text("".join(few))
        shutil.copytree(ASSETS / "model", service.model("smollm2", "1"), dirs_exist_ok=True)
        with served(folder, service.environ()) as api:
            return walk(api, service, folder)


@contextmanager
def served(folder: Path, environ: Mapping[str, str]) -> Iterator[Api]:
    """Run `ftctl dev` in a folder until the block ends."""
    log = folder / "ftctl-dev.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "finetune_operator", "dev", str(folder)],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise RuntimeError(f"ftctl dev did not start; see {log}")
            api = Api(str(folder / "runs" / ".dev" / "kubeconfig"))
            try:
                yield api
            finally:
                api.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def walk(api: Api, service: ServiceClient, folder: Path) -> int:
    """Apply, preempt, and print what the status says; return the exit code."""
    for made, resource, namespace in (
        (PROFILE, FINE_TUNE_PROFILES, None),
        (JOB, FINE_TUNE_JOBS, NAMESPACE),
    ):
        (folder / f"{resource.plural}.yaml").write_text(yaml.safe_dump(made, sort_keys=False))
        api.run(api.client.create(resource, made, namespace))
        print(f"{resource.kind} {made['metadata']['name']} created", flush=True)
    said, is_preempted, end = "", False, time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        job = FineTuneJob.model_validate(api.job(NAMESPACE, NAME))
        if told(job) != said:
            said = told(job)
            print(said, flush=True)
        if not is_preempted and list(service.datastore("kept").glob(f"**/step-4.*/{MANIFEST}")):
            (name,) = [one.name for one in service.jobs()]
            print(f"-- the compute takes the node of {name} away", flush=True)
            service.preempt(name)
            is_preempted = True
        if job.status.completion_time is not None:
            return conclude(job, service)
        time.sleep(_LOOK_SECONDS)
    print(f"not over after {END_SECONDS:.0f} s; see {folder / 'ftctl-dev.log'}")
    return 1


def told(job: FineTuneJob) -> str:
    """Return in a line how far the job is."""
    status = job.status
    progress = status.progress
    known = progress is not None and progress.total_steps is not None
    step = f", step {progress.step} of {progress.total_steps}" if progress and known else ""
    return f"attempt {status.attempt}: {status.phase}{step}"


def conclude(job: FineTuneJob, service: ServiceClient) -> int:
    """Print how it ended, and return the exit code."""
    status = job.status
    for one in status.attempts:
        print(f"attempt {one.number} ended: {one.failure_class}: {one.message}")
        if one.resumed_step is not None:
            print(f"attempt {one.number} went on from step {one.resumed_step}")
    if status.progress is not None:
        print(f"held-out loss {status.progress.eval_loss}")
    for uri in status.artifacts:
        print(f"adapter: {uri}")
    return 0 if status.phase == "Succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
