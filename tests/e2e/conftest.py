"""The cluster, the installed chart, and a volume with a tiny model that all tests share.

Only `make e2e` collects this folder. Nothing is left in the cluster at the end.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support.cluster.operators import Api
from support.cluster.real_cluster import (
    OPERATOR_NAMESPACE,
    RELEASE,
    Given,
    RealCluster,
    Release,
    namespace,
)
from support.cluster.real_jobs import NAMESPACE, Jobs, profile
from support.cluster.real_volume import Volume
from support.launch.tiny_run import write_inputs

GIVEN = Given.read()
DEFINITIONS = ("finetunejobs.finetune.dev", "finetuneprofiles.finetune.dev")

OWN = (f"--namespace={NAMESPACE}",)
SHOWN = {
    "jobs": ("get", "finetunejobs", *OWN, "--output=yaml"),
    "batch Jobs": ("get", "jobs", *OWN, "--output=yaml"),
    "pods": ("get", "pods", *OWN, "--output=wide"),
    "Events": ("get", "events", *OWN, "--sort-by=.metadata.creationTimestamp"),
    "operator": (
        *("logs", f"--namespace={OPERATOR_NAMESPACE}", "--all-containers", "--tail=400"),
        "--selector=app.kubernetes.io/name=finetune-operator",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where there is no cluster to test on."""
    reason = "FINETUNE_E2E_KUBECONFIG names no cluster" if GIVEN is None else GIVEN.lacking()
    for item in items:
        if reason and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the cluster holds where a test fails, as nothing of it is left afterwards."""
    report = yield
    if report.failed and GIVEN is not None:
        cluster = RealCluster(GIVEN)
        for title, command in SHOWN.items():
            done = cluster.run("kubectl", *command)
            report.sections.append((title, done.stdout + done.stderr))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[RealCluster]:
    """The cluster, which the tests leave as it was."""
    assert GIVEN is not None
    made = RealCluster(GIVEN)
    there = made.run("kubectl", "get", "crd", *DEFINITIONS, "--ignore-not-found", "-o", "name")
    assert there.stdout + there.stderr == "", (
        "the tests end with the deletion of every FineTuneJob, so they take only a cluster that "
        "answers and does not know that kind"
    )
    try:
        yield made
    finally:
        names = (NAMESPACE, OPERATOR_NAMESPACE)
        made.run("helm", "uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE)
        made.run("kubectl", "delete", "crd", *DEFINITIONS, "--ignore-not-found")
        made.run("kubectl", "delete", "namespace", *names, "--ignore-not-found")
        made.run("kubectl", "delete", "persistentvolume", NAMESPACE, "--ignore-not-found")


@pytest.fixture(scope="session")
def release(cluster: RealCluster) -> Release:
    """The chart, installed as docs/installation.md says, in a namespace for restricted pods."""
    cluster.apply(namespace(OPERATOR_NAMESPACE), namespace(NAMESPACE))
    made = Release(cluster)
    made.install()
    cluster.apply(profile(cluster.given))
    return made


@pytest.fixture(scope="session")
def volume(
    cluster: RealCluster, release: Release, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Volume]:
    """A volume with a tiny model and rows to train on."""
    made = Volume(cluster, NAMESPACE)
    made.put(write_inputs(tmp_path_factory.mktemp("inputs")))
    yield made
    made.close()


@pytest.fixture(scope="session")
def jobs(cluster: RealCluster, volume: Volume) -> Iterator[Jobs]:
    """The jobs of this session."""
    api = Api(cluster.given.kubeconfig)
    yield Jobs(cluster, api, volume)
    api.close()
