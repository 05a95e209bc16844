"""`ftctl` as `pip install finetune-operator` installs it, without any extra.

What it is for without a trainer works; what needs more says in one sentence which extra has it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.backends.kubernetes.child_names import LOG_TAIL_ANNOTATION
from finetune_operator.kube.resources import JOBS, PODS
from support.api.builders import manifest
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.docs.plain_install import ROOT, PlainInstall, plain_install
from support.kubernetes.kubernetes_cases import JOB, profile

PROFILE = str(ROOT / "examples" / "profiles" / "h100.yaml")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainInstall:
    return plain_install(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("package", ["kopf", "kubernetes", "torch", "azure.ai.ml", "psutil"])
def test_the_packages_of_the_extras_are_not_there(plain: PlainInstall, package: str) -> None:
    done = plain.run("timeit", "-n1", "-r1", f"import {package}")
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["validate", "-f", "examples"], "no problem", id="validate"),
        pytest.param(["render", "examples/00-quickstart.yaml"], "# backend local", id="render"),
        pytest.param(
            ["render", "examples/07-kubernetes.yaml", "--profile", PROFILE],
            "kind: Job",
            id="render kubernetes",
        ),
        pytest.param(
            ["render", "examples/08-azureml.yaml"], "backend azureml", id="render azureml"
        ),
        pytest.param(["crd"], "kind: CustomResourceDefinition", id="crd"),
        pytest.param(["doctor", "--json"], '"torch"', id="doctor"),
    ],
)
def test_what_needs_no_extra_works(plain: PlainInstall, arguments: list[str], said: str) -> None:
    done = plain.ftctl(*arguments)
    assert said in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_counts_only_the_trainer_as_missing(plain: PlainInstall) -> None:
    done = plain.ftctl("doctor", "--json")
    missing = {one["topic"] for one in json.loads(done.stdout) if one["state"] == "missing"}
    assert missing == {"trainer"}
    assert done.returncode == 1


def test_the_jobs_of_this_machine_are_shown(plain: PlainInstall, tmp_path: Path) -> None:
    done = plain.ftctl("top", "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        pytest.param(
            "finetune_operator",
            ["dev", "examples"],
            "ftctl dev needs the package kopf, which is not installed; "
            'pip install "finetune-operator[operator]"',
            id="ftctl dev",
        ),
        pytest.param(
            "finetune_operator.kernel",
            [],
            "finetune-operator needs the package kopf, which is not installed; "
            'pip install "finetune-operator[operator]"',
            id="finetune-operator",
        ),
        pytest.param(
            "finetune_operator",
            ["doctor", "--azureml", "--profile", "examples/08-azureml.yaml"],
            "pip install 'finetune-operator[azureml]'",
            id="ftctl doctor --azureml",
        ),
    ],
)
def test_what_lacks_a_package_names_the_extra(
    plain: PlainInstall, module: str, arguments: list[str], said: str
) -> None:
    done = plain.run(module, *arguments)
    assert done.stderr.strip().endswith(said)
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.returncode == 1


def test_a_model_cannot_respond_without_the_trainer(plain: PlainInstall, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = plain.ftctl("chat", "model", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "ftctl chat needs the package torch, which is not installed; "
        'pip install "finetune-operator[trainer]"'
    )


@pytest.mark.parametrize("command", ["run", "preview"])
def test_this_machine_does_not_begin_what_it_cannot_train(
    plain: PlainInstall, tmp_path: Path, command: str
) -> None:
    source: dict[str, Any] = {"model": {"source": "hf://a/b"}, "dataset": {"source": "hf://a/c"}}
    (tmp_path / "job.yaml").write_text(
        json.dumps(manifest(**source, backend={"type": "local"}, topology={"gpusPerNode": 0}))
    )

    done = plain.ftctl(command, "job.yaml", cwd=tmp_path)

    [said] = done.stderr.splitlines()
    assert "cannot train without torch, transformers" in said
    assert said.endswith('pip install "finetune-operator[trainer]"')
    assert sorted(one.name for one in tmp_path.iterdir()) == ["job.yaml"]


def test_logs_of_a_cluster_are_read(api: Api, plain: PlainInstall) -> None:
    with api.namespace("plain") as namespace, api.profile(namespace, profile()):
        with OperatorProcess(api.kubeconfig, namespace):
            backend = {"type": "kubernetes", "kubernetes": {"profile": namespace}}
            api.apply(namespace, "told", **{**JOB, "backend": backend})
            wait_until(lambda: api.get(JOBS, namespace, "told-1"), 30)
            wait_until(lambda: (api.job(namespace, "told") or {})["status"].get("attempt"), 30)
        # Suspended, it has no pods, whose logs would be read first.
        kept = {"metadata": {"annotations": {LOG_TAIL_ANNOTATION: "step 1\nstep 2"}}}
        change = {**kept, "spec": {"suspend": True}}
        api.run(api.client.patch(JOBS, "told-1", namespace, change))
        wait_until(lambda: not api.run(api.client.list(PODS, namespace)).items, 30)

        done = plain.ftctl("logs", "told", "-n", namespace, KUBECONFIG=api.kubeconfig)

    assert done.stdout.endswith("step 1\nstep 2\n"), done.stderr
    assert done.returncode == 0


def test_logs_of_a_cluster_that_is_away_say_so(plain: PlainInstall, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "kubeconfig")
    done = plain.ftctl("logs", "told", "-n", "a", KUBECONFIG=nowhere)
    assert f"no cluster can be reached through {nowhere}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
