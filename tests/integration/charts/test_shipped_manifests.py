"""Every way to apply what is shipped, twice, on a real API server: no conflict, no change.

The control plane is the tests' own and empty: KUBEBUILDER_ASSETS names the folder of its programs.
No controller runs, so no pod does; the operator is a process beside it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.resources import Object
from support.api.verdicts import argo, health_script, kstatus
from support.cluster.applied import INSTALL, OURS, ROOT, Cluster, in_stages, read, rendered
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.operators import OperatorProcess, wait_until

CHART = str(ROOT / "charts" / "finetune-operator")
RELEASE = ("finetune-operator", CHART, "--namespace", "finetune-operator")
IMAGE = ("--set", "image.repository=registry.test/finetune-operator")
RENDERED = ("--kube-version", "1.34.0", "--skip-tests")
GITOPS = ROOT / "examples" / "gitops"
EXAMPLES = [ROOT / "examples" / "profiles" / "h100.yaml", *sorted(GITOPS.glob("[pj]*/*.yaml"))]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.skipif(PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no control plane"),
    pytest.mark.skipif(
        not (shutil.which("kubectl") and shutil.which("helm")),
        reason="kubectl and helm are not on the PATH",
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An empty cluster."""
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path) as made:
        yield Cluster(made.kubeconfig)


def test_kubectl_and_kustomize_change_nothing_the_second_time(cluster: Cluster) -> None:
    manifest, base = ("-f", str(INSTALL)), ("-k", str(INSTALL.parent))
    for how in ((), ("--server-side", "--field-manager=kustomize-controller")):
        cluster.must("kubectl", "apply", *manifest, *how)
        cluster.establish()
        before = cluster.versions()
        for what in (manifest, base):
            cluster.must("kubectl", "apply", *what, *how)
            assert cluster.differences(read(INSTALL), *how) == ""
        assert cluster.versions() == before


def test_helm_changes_nothing_the_second_time_and_takes_no_job_with_it(cluster: Cluster) -> None:
    example = ("--set", "exampleProfile.create=true", "--set", "exampleProfile.spec.image=a:1")
    done = cluster.run("helm", "install", *RELEASE, *IMAGE, *example, "--create-namespace")
    assert "the cluster does not know FineTuneProfiles yet; install with" in done.stderr
    assert [one for one in cluster.objects() if "finetune" in str(one["metadata"]["name"])] == []

    cluster.must("helm", "install", *RELEASE, *IMAGE, "--create-namespace")
    cluster.establish()
    before = cluster.versions()
    cluster.must("helm", "upgrade", *RELEASE, *IMAGE)
    assert cluster.versions() == before
    cluster.must("helm", "upgrade", *RELEASE, *IMAGE, *example)
    cluster.apply(read(GITOPS / "jobs" / "team-a.yaml"))
    cluster.must("helm", "uninstall", *RELEASE[:1], *RELEASE[2:])
    (job,) = cluster.objects(OURS)  # the profile was the release's
    assert (job["kind"], "deletionTimestamp" in job["metadata"]) == ("FineTuneJob", False)


def test_deleting_the_manifest_by_its_label_leaves_the_jobs(cluster: Cluster) -> None:
    cluster.must("kubectl", "apply", "-f", str(INSTALL))
    cluster.establish()
    cluster.apply(read(*EXAMPLES))
    label = ("-l", "app.kubernetes.io/name=finetune-operator", "--wait=false")
    cluster.must("kubectl", "delete", "-f", str(INSTALL), *label)

    assert cluster.objects("deployments") == []
    assert len(cluster.objects(OURS)) == 3


def everything() -> list[Object]:
    """Return what is shipped: the chart as Argo CD renders it, its profile, profiles and jobs."""
    (place,) = [one for one in read(INSTALL) if one["kind"] == "Namespace"]
    profile = ("--set", "exampleProfile.create=true", "--set", "exampleProfile.spec.image=a:1")
    chart = rendered(*("helm", "template", *RELEASE, *IMAGE, *profile), *RENDERED)
    (running,) = read(ROOT / "examples" / "07-kubernetes.yaml")
    running["metadata"]["namespace"] = "team-a"
    return [place, *chart, *read(*EXAMPLES), running]


def test_first_sync_of_everything_leaves_nothing_to_do(cluster: Cluster) -> None:
    first, rest = in_stages(everything())
    tool = "--field-manager=argocd-controller"
    cluster.apply(first, tool)
    cluster.establish()
    cluster.apply(rest, tool)

    with OperatorProcess(
        cluster.kubeconfig, "", lease_namespace="finetune-operator", resync_seconds=1
    ) as operator:
        operator.wait_for("synced")
        wait_until(lambda: phases(cluster) == {"Suspended", "Starting"}, 60)
        lists = operator.calls("list")["list finetunejobs 200"]
        wait_until(lambda: operator.calls("list")["list finetunejobs 200"] > lists + 3, 60)
        before = cluster.versions() | cluster.versions(OURS)
        for some in (first, rest):
            assert cluster.differences(some, "--server-side", tool) == ""
            cluster.apply(some, tool)
        assert cluster.versions() | cluster.versions(OURS) == before

    suspended = next(one for one in cluster.objects("finetunejobs") if one["spec"]["suspend"])
    assert (kstatus(suspended), argo(health_script(), suspended)) == ("Current", "Suspended")


def phases(cluster: Cluster) -> set[str]:
    return {one["status"]["phase"] for one in cluster.objects("finetunejobs")}
