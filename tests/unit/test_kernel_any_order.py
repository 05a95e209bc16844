"""Whatever happens to a job, in any order, with crashes and faults at any write."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.kube.errors import UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Object
from kernel_world import Crash, World, at_write, nothing
from virtual_time import run

AWAY = UnavailableError(0, "Timeout", "no answer in time")
PLAYS = {
    "runs": {"phase": "Running", "ready": "1", "step": "3"},
    "is stuck": {"phase": "Pending", "reason": "Unschedulable", "message": "no node"},
    "fails": {"phase": "Failed", "code": "137"},
    "is preempted": {"phase": "Failed", "code": "75", "gone": "yes"},
    "finds bad data": {"phase": "Failed", "code": "65", "gone": "yes"},
    "is gone": {"gone": "yes", "phase": "Failed"},
    "completes": {"phase": "Succeeded", "code": "0", "gone": "yes"},
}
HAPPENINGS = st.sampled_from([*PLAYS, "vanishes", "suspend", "resume", "restart", "wait"])
FAULTS = st.none() | st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([Crash(), AWAY]))


async def happen(world: World, what: str) -> None:
    """Let one thing happen in the cluster, unless nothing is there that it could happen to."""
    newest: Object | None = next(
        (one for one in reversed(world.api.objects(CONFIG_MAPS)) if "gone" not in one["data"]),
        None,
    )
    if what in ("suspend", "resume"):
        await world.change(suspend=what == "suspend")
    elif what == "restart":
        world.start_process()
    elif what == "wait":
        world.now += timedelta(minutes=1)
    elif newest is not None and what == "vanishes":
        world.api.remove(CONFIG_MAPS, newest["metadata"]["name"], "ns")
    elif newest is not None:
        name = newest["metadata"]["name"]
        await world.api.patch(CONFIG_MAPS, name, "ns", {"data": PLAYS[what]})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(story=st.lists(st.tuples(HAPPENINGS, FAULTS), max_size=8))
def test_attempts_never_overlap_and_every_story_comes_to_rest(
    story: list[tuple[str, tuple[int, bool, BaseException] | None]],
) -> None:
    async def work() -> None:
        world = World()
        count = world.api.after
        await world.apply()
        for what, fault in story:
            await happen(world, what)
            if fault is not None:
                number, is_done, error = fault
                hook = at_write(number, error)
                world.api.before = nothing if is_done else hook
                if is_done:
                    world.api.after = lambda *call, h=hook: (count(*call), h(*call))[0]
            await world.settle()
            world.api.before, world.api.after = nothing, count
            assert world.most_alive <= 1
            at_rest = world.writes_but_events  # an Event that was lost is told again
            world.start_process()
            await world.settle()
            assert world.writes_but_events == at_rest
            told = world.job["status"]
            alive = [one for one in world.api.objects(CONFIG_MAPS) if "gone" not in one["data"]]
            assert told["attempt"] == len(told["attempts"])
            assert all(one["metadata"]["name"] == f"tiny-{told['attempt']}" for one in alive)
        assert len(world.api.objects(FINE_TUNE_JOBS)) == 1

    run(work())
