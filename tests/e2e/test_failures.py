"""What goes wrong in a cluster: pods that vanish, data that is not there, nodes that nobody has."""

import pytest

from finetune_operator.kube.resources import Object
from support.cluster.operators import condition, wait_until
from support.cluster.real_jobs import NAMESPACE, Jobs, is_over, profile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ONE_NODE = {"nodes": 1, "gpusPerNode": 0}
GPU = "nvidia.com/gpu"


def test_a_pod_that_is_deleted_costs_no_step_that_was_saved(jobs: Jobs) -> None:
    jobs.apply("lost", training={"maxSteps": 200})
    jobs.wait_for_checkpoint("lost")
    _, second = jobs.pods("lost", 1)
    jobs.kubectl("delete", "pod", second["metadata"]["name"], "--wait=false")
    status = jobs.wait("lost", "Complete")["status"]
    first, last = sorted(status["attempts"], key=lambda one: int(one["number"]))
    assert (first["failureClass"], first["exitCode"]) == ("Preempted", 75)
    assert 10 <= last["resumedStep"] < 200
    assert last["failureClass"] == "Completed"
    assert status["restarts"] == {"counted": 0, "disruptions": 1}
    assert status["progress"]["step"] == 200
    jobs.wait_for_event("lost", "Completed")
    assert jobs.events("lost")[-1] == "Completed"


def test_a_pod_that_is_killed_without_a_word_goes_on_from_the_last_checkpoint(jobs: Jobs) -> None:
    # One process alone makes its steps fast: it must not be over before the pod is deleted.
    one_process = ONE_NODE | {"processesPerNode": 1}
    jobs.apply("killed", training={"maxSteps": 600}, topology=one_process)
    jobs.wait_for_checkpoint("killed")
    (pod,) = jobs.pods("killed", 1)
    jobs.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")
    status = jobs.wait("killed", "Complete")["status"]
    last = max(status["attempts"], key=lambda one: int(one["number"]))
    assert (last["number"], last["failureClass"]) == (2, "Completed")
    assert last["resumedStep"] >= 10


def test_what_a_failed_job_said_last_outlives_its_pods(jobs: Jobs) -> None:
    jobs.apply("fails", dataset={"source": "pvc://models/absent.jsonl"}, topology=ONE_NODE)
    status = jobs.wait("fails", "Failed")["status"]
    (attempt,) = status["attempts"]
    assert (attempt["failureClass"], attempt["exitCode"]) == ("DataError", 65)
    assert "/mnt/models/absent.jsonl" in attempt["message"]
    jobs.wait_for_event("fails", "DataError")
    assert jobs.events("fails") == ["AttemptCreated", "DataError"]
    jobs.kubectl("delete", "pods", "--selector", "finetune.dev/job=fails")
    log = jobs.cluster.ftctl("logs", "fails", "-n", NAMESPACE, "--previous")
    assert log.returncode == 0, log.stderr
    gone, about, *said = log.stdout.splitlines()
    assert (gone, about[:27]) == (
        f"the pod of rank 0 of {NAMESPACE}/fails-1 no longer exists",
        "the last lines of pod fails",
    )
    assert "/mnt/models/absent.jsonl" in "\n".join(said)


def test_pods_that_ask_for_gpus_go_to_nodes_that_offer_them_and_say_if_there_are_none(
    jobs: Jobs,
) -> None:
    """A node may offer what it does not have, as that of the tests' own cluster does."""
    nodes = jobs.cluster.list("nodes")
    offered = {one["metadata"]["name"]: one["status"]["allocatable"].get(GPU, 0) for one in nodes}
    if not any(map(int, offered.values())):
        pytest.skip(f"no node offers {GPU}")
    jobs.apply("gpus", topology={"nodes": 2, "gpusPerNode": 2})

    def trains_or_is_over() -> Object | None:
        made = jobs.get("gpus")
        return made if is_over(made) or condition(made, "Running")["status"] == "True" else None

    def placed() -> list[Object] | None:
        pods = jobs.pods("gpus", 1)
        return pods if len(pods) == 2 and all("nodeName" in one["spec"] for one in pods) else None

    # Before one of them fails: the other is deleted then, maybe before it has run.
    pods = wait_until(placed, 120, "the pods of gpus to have nodes")
    made = wait_until(trains_or_is_over, 120, "gpus to train or to fail")
    assert [one["spec"]["containers"][0]["resources"]["limits"][GPU] for one in pods] == ["2", "2"]
    assert all(int(offered[one["spec"]["nodeName"]]) >= 2 for one in pods)
    if is_over(made):
        (attempt,) = made["status"]["attempts"]
        assert attempt["failureClass"] == "ConfigError"
        assert "0 are visible; lower spec.topology.gpusPerNode" in attempt["message"]
    jobs.delete("gpus")


def test_a_job_that_fits_on_no_gpu_has_no_child_until_it_has_the_change_of_the_message(
    jobs: Jobs,
) -> None:
    jobs.apply(
        "heavy",
        model={"source": "hf://meta-llama/Llama-3.1-8B"},
        method={"type": "full"},
        topology={"nodes": 1, "gpusPerNode": 1, "instanceType": "Standard_NC4as_T4_v3"},
    )
    stalled = jobs.wait_for_reason("heavy", "Stalled", "DoesNotFit", 10)
    planned = condition(jobs.get("heavy"), "Planned")
    assert (stalled["status"], planned["status"]) == ("True", "False")
    assert planned["reason"] == "DoesNotFit"
    for one in (stalled, planned):
        assert "does not fit on Standard_NC4as_T4_v3" in one["message"]
        assert "the cheapest change that fits is spec.method.type qlora" in one["message"]
    assert jobs.children("heavy") == []

    jobs.api.change(NAMESPACE, "heavy", suspend=True)
    jobs.api.change(NAMESPACE, "heavy", suspend=False, method={"type": "qlora"})
    wait_until(lambda: jobs.pods("heavy", 1), 20, "heavy to have a pod")
    assert condition(jobs.get("heavy"), "Planned")["status"] == "True"
    jobs.delete("heavy")


STUCK = [
    pytest.param(
        {"nodes": {"selector": {"finetune.test/none": "here"}}},
        "Unschedulable",
        "node affinity/selector",
        id="no node",
    ),
    pytest.param(
        {"image": "registry.invalid/trainer:1"},
        "ImagePullFailed",
        "registry.invalid/trainer:1",
        id="no image",
    ),
    pytest.param(
        {
            "volumes": [
                {"name": "x", "mountPath": "/x", "source": {"configMap": {"name": "absent"}}}
            ]
        },
        "VolumeNotReady",
        'configmap "absent" not found',
        id="no volume",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "words"), STUCK)
def test_what_keeps_a_job_from_starting_is_told_in_words_within_five_seconds(
    jobs: Jobs, changes: dict[str, object], reason: str, words: str
) -> None:
    name = reason.lower()
    jobs.cluster.apply(profile(jobs.cluster.given, name, **changes))
    jobs.apply(name, name, topology=ONE_NODE)
    jobs.wait_for_warning_about_a_pod(name)  # from here on the operator can know
    told = jobs.wait_for_reason(name, "ResourcesReady", reason, 5)
    assert words in told["message"]
    assert told["message"].startswith((f"pod {name}-1-0-", f"Pod {name}-1-0-"))
    jobs.delete(name)
