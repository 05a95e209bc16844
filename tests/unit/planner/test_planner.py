import pytest

from finetune_operator.api.problems import InvalidJobError
from finetune_operator.api.v1alpha1.method import ActivationCheckpointing, StrategyType
from finetune_operator.api.v1alpha1.status import PlanStatus
from finetune_operator.api.v1alpha1.training import Precision
from finetune_operator.planner.plan import Plan, make_plan, with_choice
from support.api.builders import job


def test_plan_states_every_choice_and_why_it_was_made():
    small = job(training={"globalBatchSize": 4}, topology={"processesPerNode": 2})
    assert make_plan(small) == Plan(
        job=small,
        nodes=1,
        processes_per_node=2,
        device="cpu",
        strategy=StrategyType.DDP,
        precision=Precision.FP32,
        activation_checkpointing=ActivationCheckpointing.NONE,
        compiles=False,
        micro_batch_size=1,
        reasons=(
            "strategy ddp: every rank holds the whole model, and only gradients are exchanged",
            "precision fp32: the default on a cpu device",
            "activation checkpointing none: it costs time and saves only memory",
            "micro-batch 1: a pack already fills maxSeqLength",
        ),
    )


def test_plan_takes_the_precision_that_8_bit_moments_need_also_on_a_cpu():
    plan = make_plan(job(method={"type": "full"}, training={"optimizer": "adamw8bit"}))
    assert (plan.device, plan.precision) == ("cpu", Precision.BF16)
    assert "precision bf16: adamw8bit keeps parameters in it" in plan.reasons


def test_plan_has_no_reason_for_what_the_manifest_chose():
    plan = make_plan(
        job(
            strategy={"type": "ddp", "activationCheckpointing": "full"},
            training={"precision": "bf16", "microBatchSize": 2, "globalBatchSize": 4},
        )
    )
    assert plan.reasons == ()
    assert (plan.precision, plan.micro_batch_size) == (Precision.BF16, 2)


@pytest.mark.parametrize(
    ("topology", "world_size", "device"),
    [
        pytest.param({"gpusPerNode": 0, "processesPerNode": None}, 1, "cpu", id="one CPU process"),
        pytest.param({"gpusPerNode": 0, "processesPerNode": 2, "nodes": 2}, 4, "cpu", id="2 x 2"),
        pytest.param({"gpusPerNode": 4, "processesPerNode": None}, 4, "cuda", id="one GPU a rank"),
    ],
)
def test_plan_counts_ranks(topology, world_size, device):
    plan = make_plan(job(training={"globalBatchSize": 8}, topology=topology))
    assert (plan.world_size, plan.device) == (world_size, device)


@pytest.mark.parametrize(
    ("batch", "packing", "expected"),
    [
        pytest.param(32, True, 1, id="a pack fills a sequence"),
        pytest.param(32, False, 8, id="largest divisor up to 8"),
        pytest.param(12, False, 6, id="12 rows of one rank"),
        pytest.param(7, False, 7, id="a prime share"),
    ],
)
def test_plan_chooses_the_micro_batch(batch, packing, expected):
    plan = make_plan(job(training={"globalBatchSize": batch, "packing": packing}))
    assert plan.micro_batch_size == expected
    assert plan.gradient_accumulation_steps * expected * plan.world_size == batch


def test_plan_refuses_a_batch_that_ranks_cannot_share_and_names_the_next_ones():
    uneven = job(
        training={"globalBatchSize": 100, "microBatchSize": 4},
        topology={"nodes": 2, "gpusPerNode": 8, "processesPerNode": None},
    )
    with pytest.raises(InvalidJobError) as refused:
        make_plan(uneven)
    assert str(refused.value) == (
        "spec.training.globalBatchSize 100 is not a multiple of 64 "
        "(2 nodes x 8 processes x micro-batch 4); use 64 or 128"
    )


GPUS = {"gpusPerNode": 4, "processesPerNode": None}
CHOICE = PlanStatus(
    strategy="fsdp",
    precision="fp16",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    activation_checkpointing="selective",
    usable_bytes=2**34,
)


def gpu_plan(**overrides):
    return make_plan(job(topology=GPUS, **{"training": {"globalBatchSize": 32}, **overrides}))


def test_plan_leaves_open_settings_of_gpus_to_the_trainer():
    plan = gpu_plan()
    assert plan.auto == ("strategy", "activationCheckpointing", "microBatchSize", "precision")
    assert plan.reasons[0].startswith(
        "strategy, activationCheckpointing, microBatchSize, precision"
    )
    some = gpu_plan(strategy={"type": "fsdp"}, training={"precision": "bf16", "globalBatchSize": 4})
    assert some.auto == ("activationCheckpointing", "microBatchSize")
    narrow = gpu_plan(method={"type": "full"}, training={"optimizer": "adamw8bit"})
    assert "precision" not in narrow.auto
    assert make_plan(job()).auto == ()


def test_later_attempts_get_the_choice_as_explicit_values():
    plan = gpu_plan()
    chosen = with_choice(plan, CHOICE.model_copy(update={"digest": plan.digest}))
    assert chosen.auto == ()
    assert (chosen.strategy, chosen.precision) == (StrategyType.FSDP, Precision.FP16)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (2, 4)
    assert chosen.activation_checkpointing is ActivationCheckpointing.SELECTIVE
    assert "chosen by the trainer" in chosen.reasons[0]


def test_a_plan_of_0_1_0_stays():
    old = PlanStatus(
        strategy="ddp", precision="bf16", micro_batch_size=1, gradient_accumulation_steps=8
    )
    chosen = with_choice(gpu_plan(), old)
    assert (chosen.auto, chosen.strategy) == ((), StrategyType.DDP)
    assert chosen.activation_checkpointing is ActivationCheckpointing.NONE


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"method": {"type": "full"}}, id="method"),
        pytest.param({"training": {"maxSeqLength": 64, "globalBatchSize": 32}}, id="row length"),
        pytest.param({"topology": {**GPUS, "nodes": 2}}, id="world"),
        pytest.param({"strategy": {"activationCheckpointing": "full"}}, id="strategy"),
    ],
)
def test_the_trainer_chooses_again_when_a_field_or_the_world_changes(changed):
    stored = CHOICE.model_copy(update={"digest": gpu_plan().digest})
    values = {"topology": GPUS, "training": {"globalBatchSize": 32}, **changed}
    assert with_choice(make_plan(job(**values)), stored).auto
    same = gpu_plan(training={"globalBatchSize": 32, "learningRate": 1e-5})
    assert not with_choice(same, stored).auto


def test_an_explicit_value_takes_precedence_over_an_earlier_choice():
    asked = gpu_plan(training={"globalBatchSize": 32, "microBatchSize": 8})
    chosen = with_choice(asked, CHOICE.model_copy(update={"digest": asked.digest}))
    assert chosen.micro_batch_size == 8
    assert chosen.strategy is StrategyType.FSDP


def test_a_plan_of_an_attempt_of_0_1_0_leaves_no_setting_open():
    training = {"globalBatchSize": 32, "packing": False}
    plan = make_plan(job(topology=GPUS, training=training), leaves_open=False)
    assert (plan.auto, plan.strategy, plan.precision) == ((), StrategyType.DDP, Precision.BF16)
    assert plan.micro_batch_size == 8
