"""Whatever happens to a job and to its operators, the page accounts for each millisecond of it."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.kube.packed_jobs import unpack
from finetune_operator.metrics.job_values import JobNow
from finetune_operator.reconcile.conditions import parse_rfc3339
from support.kernel.kernel_world import HAPPENINGS, Crash, happen
from support.kernel.live_world import AWAY, LiveWorld
from support.kernel.virtual_time import run

SCENES = st.tuples(
    st.sampled_from([one for one in HAPPENINGS if one != "wait"]),
    st.sampled_from([0.0, 0.05, 0.37, 5.0, 60.123]),
    st.none() | st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([Crash(), AWAY])),
)


def shown(world: LiveWorld) -> JobNow | None:
    """Return what the page shows of the job; None before the operator has seen it."""
    return next(iter(world.term.snapshot().jobs), None)


def check(now: JobNow) -> None:
    """Show that the categories sum to the age of the job, or to what that was at its end."""
    age = now.now - parse_rfc3339(now.obj["metadata"]["creationTimestamp"])
    total = sum(now.ledger.time.values())
    if now.ledger.is_closed:
        assert total <= age.total_seconds() * 1000
    else:
        assert total == round(age.total_seconds() * 1000)
    assert all(spent >= 0 for spent in now.ledger.time.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(story=st.lists(SCENES, min_size=1, max_size=10), seed=st.integers(0, 999))
def test_the_ledger_sums_to_the_age_of_the_job_at_any_moment(
    story: list[tuple[str, float, tuple[int, bool, BaseException] | None]], seed: int
) -> None:
    async def work() -> None:
        async with LiveWorld.start(seed) as world:
            await world.apply()
            ended: dict[str, int] = {}
            for what, pause, fault in story:
                if fault is not None:
                    number, is_done, error = fault
                    world.fail_at(number, error, is_done=is_done)
                if what == "restart":
                    world.restart()
                else:
                    await happen(world, what)
                await asyncio.sleep(pause)
                world.heal()
                if (now := shown(world)) is not None:
                    check(now)
                    written = unpack(now.obj).get("status") or {}
                    if written.get("completionTime"):
                        ended = ended or dict(written["ledger"]["time"])
                        assert ended == written["ledger"]["time"]

    run(work())
