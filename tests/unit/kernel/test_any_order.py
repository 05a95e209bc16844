"""Whatever happens to a job, in any order, with crashes and faults at any write."""

from datetime import timedelta

from hypothesis import example, given, settings
from hypothesis import strategies as st

from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS
from support.kernel.kernel_world import HAPPENINGS, Crash, World, at_write, happen, nothing
from support.kernel.virtual_time import run

AWAY = UnavailableError(0, "Timeout", "no answer in time")
QUOTA = ("quota is used up", "quota allows")
OPENING = timedelta(seconds=10)
FAULTS = st.none() | st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([Crash(), AWAY]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(story=st.lists(st.tuples(st.sampled_from([*HAPPENINGS, *QUOTA]), FAULTS), max_size=8))
@example(story=[("quota is used up", None), ("suspend", None), ("resume", None)])
@example(story=[("quota is used up", (1, True, Crash())), ("suspend", (1, True, AWAY))])
@example(story=[("wait", (1, True, AWAY)), ("quota is used up", None), ("suspend", None)])
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
            world.now += OPENING  # what was opened is told by now
            await world.settle()
            told = world.job["status"]
            alive = [one for one in world.api.objects(CONFIG_MAPS) if "gone" not in one["data"]]
            assert told["attempt"] == len(told.get("attempts", ()))
            assert all(one["metadata"]["name"] == f"tiny-{told['attempt']}" for one in alive)
            assert told["phase"] != "Suspended" or not alive
            if world.job["spec"]["suspend"] and not alive:
                assert told["phase"] in ("Suspended", "Succeeded", "Failed")
        assert len(world.api.objects(FINE_TUNE_JOBS)) == 1

    run(work())
