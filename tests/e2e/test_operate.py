"""The operator itself: what it may do, and what upgrading or removing it does to jobs that run."""

import re
from collections.abc import Iterator

import pytest

from finetune_operator.kube.resources import Object
from support.cluster.operators import condition, wait_until
from support.cluster.real_cluster import RELEASE, RealCluster, Release
from support.cluster.real_jobs import NAMESPACE, Jobs, profile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = "stays"


@pytest.fixture
def running(jobs: Jobs) -> Object:
    """A job of two nodes that trains and has a checkpoint; the one of the last test if it does."""
    if jobs.api.job(NAMESPACE, JOB) is None:
        jobs.apply(JOB)
    made = jobs.wait(JOB, "Running")
    jobs.wait_for_checkpoint(JOB)
    return made


@pytest.fixture(scope="module", autouse=True)
def gone_at_the_end(jobs: Jobs) -> Iterator[None]:
    yield
    jobs.delete(JOB)


def written(children: list[Object]) -> dict[str, object]:
    """Return of each child what only a write of ours would change."""
    found: dict[str, object] = {}
    for one in children:
        metadata = one["metadata"]
        own = [part for part in metadata["managedFields"] if part["manager"] == "finetune-operator"]
        fields = (metadata["uid"], metadata["labels"], metadata.get("annotations"), own)
        found[f"{one['kind']} {metadata['name']}"] = fields
    return found


def test_two_replicas_are_ready_and_one_of_them_leads(
    release: Release, cluster: RealCluster
) -> None:
    pods = release.pods()
    assert [one["status"]["phase"] for one in pods] == ["Running"] * 2
    assert release.leader() in {one["metadata"]["name"] for one in pods}
    assert {one["spec"]["serviceAccountName"] for one in pods} == {"finetune-operator"}


def test_release_passes_the_test_of_its_chart_and_keeps_nothing_of_it(
    release: Release, cluster: RealCluster
) -> None:
    said = cluster.helm("test", RELEASE, "--timeout", "2m")

    assert re.search(r"^Phase: +Succeeded$", said, re.MULTILINE), said
    assert len(release.pods()) == 2


@pytest.mark.parametrize(
    ("verb", "kind", "may"),
    [
        pytest.param("create", "jobs.batch", True, id="make batch Jobs"),
        pytest.param("patch", "finetunejobs.finetune.dev/status", True, id="write a status"),
        pytest.param("get", "secrets", False, id="read a Secret"),
        pytest.param("list", "secrets", False, id="list Secrets"),
        pytest.param("create", "pods", False, id="make pods"),
        pytest.param("create", "pods/exec", False, id="run something in a pod"),
        pytest.param("update", "finetuneprofiles.finetune.dev", False, id="change a profile"),
        pytest.param("create", "rolebindings.rbac.authorization.k8s.io", False, id="give rights"),
        pytest.param("impersonate", "users", False, id="be somebody else"),
        pytest.param("*", "*", False, id="be cluster-admin"),
    ],
)
def test_the_operator_may_do_its_work_and_no_more(
    release: Release, cluster: RealCluster, verb: str, kind: str, may: bool
) -> None:
    assert cluster.may("finetune-operator", verb, kind) is may


def test_an_upgrade_writes_nothing_to_the_children_of_a_running_job(
    running: Object, jobs: Jobs, release: Release
) -> None:
    before, old = written(jobs.children(JOB)), {one["metadata"]["name"] for one in release.pods()}
    # Both change what would be rendered today: the profile, and the operator itself.
    jobs.cluster.apply(profile(jobs.cluster.given, env={"ADDED": "later"}))
    release.upgrade(podAnnotations={"version": "next"}, settings={"workers": 8})
    leader = wait_until(
        lambda: release.leader() if release.leader() not in old else "", 60, "a new leader"
    )
    step = running["status"]["progress"]["step"]
    wait_until(lambda: jobs.get(JOB)["status"]["progress"]["step"] > step, 90, f"word by {leader}")
    assert written(jobs.children(JOB)) == before
    assert jobs.get(JOB)["status"]["attempt"] == running["status"]["attempt"]


def test_a_suspended_job_goes_on_where_it_stopped(running: Object, jobs: Jobs) -> None:
    number = running["status"]["attempt"]
    jobs.kubectl("patch", "finetunejob", JOB, "--type=merge", '-p={"spec":{"suspend":true}}')
    stopped = jobs.wait(JOB, "Suspended")
    saved = stopped["status"]["checkpoint"]["last"]["step"]
    assert saved == stopped["status"]["progress"]["step"]
    assert all(one["status"]["phase"] in ("Succeeded", "Failed") for one in jobs.pods(JOB, number))
    jobs.kubectl("patch", "finetunejob", JOB, "--type=merge", '-p={"spec":{"suspend":false}}')
    again = jobs.wait(JOB, "Running")
    newest = max(again["status"]["attempts"], key=lambda one: int(one["number"]))
    assert (newest["number"], newest["resumedStep"]) == (number + 1, saved)
    assert again["status"]["restarts"] == {"counted": 0, "disruptions": 0}


def test_jobs_outlive_the_release_and_the_next_one_takes_them_over(
    running: Object, jobs: Jobs, release: Release
) -> None:
    before = written(jobs.children(JOB))
    release.uninstall()
    left = jobs.cluster.list("clusterroles,clusterrolebindings,deployments", "--all-namespaces")
    wait_until(lambda: not release.pods(), 60, "the operator's pods to be gone")
    alone = jobs.get(JOB)
    children = jobs.children(JOB)
    release.install()  # before anything is judged: other tests need it
    assert [one for one in left if "finetune" in one["metadata"]["name"]] == []
    assert alone["metadata"]["uid"] == running["metadata"]["uid"]
    assert written(children) == before
    phases = {one["status"]["phase"] for one in children if one["kind"] == "Pod"}
    assert "Running" in phases
    step = alone["status"]["progress"]["step"]
    wait_until(lambda: jobs.get(JOB)["status"]["progress"]["step"] > step, 90, "its progress")
    assert written(jobs.children(JOB)) == before
    assert condition(jobs.get(JOB), "Running")["status"] == "True"
