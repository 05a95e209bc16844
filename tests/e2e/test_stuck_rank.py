"""A rank of another pod that stays away from a collective is named, and goes on once it may."""

from collections.abc import Iterator

import pytest

from finetune_operator.kube.resources import Object
from support.cluster.operators import wait_until
from support.cluster.real_jobs import Jobs, profile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# By the environment too, as processes of other pods may be seen from here.
SIGNAL_RANKS = """
lines() { cat "$1" 2>/dev/null | tr '\\0' '\\n'; }
for one in /proc/[0-9]*; do
  if lines $one/environ | grep -qx "RANK=1" && lines $one/environ | grep -qx "HOSTNAME=$HOSTNAME" &&
     lines $one/cmdline | grep -qx "finetune_trainer.launch.worker"
  then kill -$0 "${one#/proc/}" && echo signalled
  fi
done
"""


@pytest.fixture
def impatient(jobs: Jobs) -> Iterator[str]:
    """A profile whose pods judge their ranks ten times as fast."""
    jobs.cluster.apply(profile(jobs.cluster.given, "impatient", env={"FINETUNE_WATCH_SPEED": "10"}))
    yield "impatient"
    jobs.kubectl("delete", "finetuneprofile", "impatient")


def test_a_stopped_rank_of_the_other_pod_is_named_with_its_node_and_the_state_of_its_process(
    jobs: Jobs, impatient: str
) -> None:
    jobs.apply("stops", impatient)
    jobs.wait_for_checkpoint("stops")
    _, second = jobs.pods("stops", 1)

    def signal(name: str) -> None:
        pod = second["metadata"]["name"]
        said = jobs.kubectl("exec", pod, "--", "sh", "-c", SIGNAL_RANKS, name)
        assert said.split() == ["signalled"]

    def suspects() -> list[Object]:
        found: list[Object] = jobs.get("stops")["status"].get("suspects", [])
        return found

    signal("STOP")
    (found,) = wait_until(suspects, 60, "a suspect in the status of stops")
    assert (found["rank"], found["cause"]) == (1, "stuck")
    assert found["node"] == second["spec"]["nodeName"]
    assert "its process is stopped; its stacks are in logs/attempt-1.1/stall-1" in found["message"]
    folder = "checkpoints/stops/run/logs/attempt-1.1/stall-1"
    wait_until(lambda: jobs.volume.has(f"{folder}/rank-1.stacks.txt"), 60, "its stacks")
    wait_until(lambda: jobs.volume.has(f"{folder}/rank-0.collectives.json.gz"), 60, "of rank 0")
    jobs.wait_for_event("stops", "RankHoldsBack")
    signal("CONT")
    wait_until(lambda: not suspects(), 60, "nobody to be a suspect")
    assert jobs.events("stops").count("RankHoldsBack") == 1
    assert [one["number"] for one in jobs.get("stops")["status"]["attempts"]] == [1]
    jobs.delete("stops")
