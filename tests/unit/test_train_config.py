import pytest
from pydantic import ValidationError

from builders import job
from finetune_operator.planner.plan import make_plan
from finetune_operator.planner.train_config import Locations, derive_train_config
from finetune_trainer.config import DatasetSource, TrainConfig

LOCATIONS = Locations(
    model="/models/base",
    train=DatasetSource(path="/data/train.jsonl"),
    eval=None,
    run_dir="/runs/tiny",
    checkpoint_dir="/runs/tiny/checkpoints",
    output_dir="/runs/tiny/output",
    cache_dir="/cache",
    termination_path="/runs/tiny/termination.json",
)


def derived(**overrides) -> TrainConfig:
    return derive_train_config(make_plan(job(**overrides)), 1, LOCATIONS)


def test_train_config_survives_its_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(derived().to_json())
    assert TrainConfig.read(path) == derived()


def test_train_config_states_the_world_it_expects():
    config = derived(topology={"nodes": 2, "processesPerNode": 3}, training={"globalBatchSize": 12})
    assert config.world.world_size == 6
    assert config.gradient_accumulation_steps == 2


def test_train_config_holds_no_auto():
    text = derived().to_json().replace('"resumeFrom": "auto"', "")
    assert '"auto"' not in text


def test_train_config_refuses_an_unknown_key_by_name():
    text = derived().to_json().replace('"seed":', '"sead":')
    with pytest.raises(ValidationError, match="sead"):
        TrainConfig.model_validate_json(text)


def test_train_config_refuses_a_batch_its_world_cannot_share():
    text = derived().to_json().replace('"nprocPerNode": 1', '"nprocPerNode": 3')
    with pytest.raises(
        ValidationError, match=r"spec\.training\.globalBatchSize 4 is not a multiple of 3"
    ):
        TrainConfig.model_validate_json(text)


def test_train_config_refuses_a_fraction_of_a_warm_up_step():
    text = derived(training={"warmup": 5}).to_json()
    assert TrainConfig.model_validate_json(text).training.warmup == 5
    broken = text.replace('"warmup": 5.0', '"warmup": 5.5')
    with pytest.raises(
        ValidationError, match=r"spec\.training\.warmup 5\.5 is neither .* use 5 or 6"
    ):
        TrainConfig.model_validate_json(broken)


def test_full_fine_tuning_exports_the_whole_model_and_lora_the_adapter():
    assert derived(method={"type": "full"}).output.format == "merged"
    assert derived().output.format == "adapter"


def test_a_job_without_an_interval_still_gets_checkpoints():
    assert derived().checkpoint.every_seconds == 600
    assert derived(checkpoint={"everySteps": 5}).checkpoint.every_seconds is None


def test_train_config_refuses_an_adapter_of_full_fine_tuning():
    text = derived(method={"type": "full"}).to_json().replace('"merged"', '"adapter"')
    with pytest.raises(
        ValidationError, match=r"spec\.output\.format adapter needs spec\.method\.type"
    ):
        TrainConfig.model_validate_json(text)
