"""The condition Planned: a new job that fits on no GPU of its size has no child."""

from typing import Any

import pytest

from finetune_operator.kube.resources import CONFIG_MAPS
from support.kernel.kernel_world import World
from support.kernel.virtual_time import run

LLAMA = {"source": "hf://meta-llama/Llama-3.1-70B"}
T4, H100 = "Standard_NC16as_T4_v3", "Standard_ND96isr_H100_v5"


async def planned(world: World, size: str | None, **overrides: Any) -> tuple[str, str, str]:
    """Return status, reason and message of the condition after the job was reconciled."""
    gpus = overrides.pop("gpus", 1)
    topology = {"gpusPerNode": gpus, "processesPerNode": None, "instanceType": size}
    values = {"model": LLAMA, "topology": topology, "method": {"type": "lora"}, **overrides}
    await world.apply(**values)
    await world.settle()
    [found] = [one for one in world.job["status"]["conditions"] if one["type"] == "Planned"]
    return found["status"], found["reason"], found["message"]


def conditions(world: World) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in world.job["status"]["conditions"]}


def test_a_job_that_cannot_fit_is_stalled_without_a_child() -> None:
    world = World()
    status, reason, message = run(planned(world, T4))
    assert (status, reason) == ("False", "DoesNotFit")
    assert "of 14.5 GiB per GPU; " in message
    assert message.endswith("spec.training.checkMemory false starts anyway")
    assert conditions(world)["Stalled"] == "DoesNotFit"
    assert world.api.objects(CONFIG_MAPS) == []
    assert "attempts" not in world.job["status"]


@pytest.mark.parametrize("packing", [None, False, True])
def test_the_weights_alone_may_not_fit(packing: bool | None) -> None:
    world = World()
    _, reason, _ = run(planned(world, T4, training={"packing": packing}))
    assert reason == "DoesNotFit"


def test_a_job_without_the_check_starts_although_it_cannot_fit() -> None:
    world = World()
    training = {"checkMemory": False}
    status, reason, _ = run(planned(world, T4, training=training))
    assert (status, reason) == ("False", "DoesNotFit")
    assert len(world.api.objects(CONFIG_MAPS)) == 1


def test_a_job_that_takes_over_a_run_is_not_refused() -> None:
    world = World()
    run(planned(world, T4, takeOver=True))
    assert len(world.api.objects(CONFIG_MAPS)) == 1


@pytest.mark.parametrize(
    ("size", "overrides", "expected"),
    [
        pytest.param(H100, {"gpus": 8, "training__globalBatchSize": 8}, "Fits", id="fits"),
        pytest.param(None, {}, "CapacityUnknown", id="no size"),
        pytest.param("Standard_Nowhere", {}, "CapacityUnknown", id="unknown size"),
        pytest.param(T4, {"model": {"source": "hf://a/b"}}, "ModelUnknown", id="unknown model"),
        pytest.param(
            "Standard_NV36ads_A10_v5",
            {
                "model": {"source": "hf://microsoft/Phi-3-mini-128k-instruct"},
                "method": {"type": "qlora", "quantization": "nf4"},
                "training": {"maxSeqLength": 131072},
            },
            "Tight",
            id="rows may be short",
        ),
    ],
)
def test_any_other_job_runs(size: str | None, overrides: dict[str, Any], expected: str) -> None:
    world = World()
    status, reason, _ = run(planned(world, size, **overrides))
    assert reason == expected
    assert status == ("True" if expected in ("Fits", "Tight") else "Unknown")
    assert len(world.api.objects(CONFIG_MAPS)) == 1


def test_a_job_on_a_cpu_has_no_forecast() -> None:
    world = World()

    async def reconciled() -> None:
        await world.apply()
        await world.settle()

    run(reconciled())
    assert "Planned" not in conditions(world)
