import base64
import re
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from finetune_operator.api.cel import check_rules
from finetune_operator.api.defaults import with_defaults
from finetune_operator.api.openapi import object_schema
from finetune_operator.api.v1alpha1.method import Offload, StrategySpec, StrategyType
from finetune_operator.api.v1alpha1.profile import GpuMetrics
from finetune_operator.planner.plan import make_plan
from finetune_operator.planner.train_config import (
    GARBAGE_EVERY_STEPS,
    Locations,
    derive_train_config,
)
from finetune_trainer.config import (
    CheckpointConfig,
    ControlConfig,
    DatasetSource,
    EarlyStopping,
    LoraSettings,
    MethodConfig,
    ModelConfig,
    ProfileConfig,
    StrategyConfig,
    TrainConfig,
    TrainingConfig,
    pack,
    unpack,
)
from support.api.builders import job

LOCATIONS = Locations(
    path_of=lambda uri: uri.replace("file://.", "/here"),
    run_dir="/runs/tiny",
    checkpoint_dir="/runs/tiny/checkpoints",
    output_dir="/runs/tiny/output",
    cache_dir="/cache",
    termination_path="/runs/tiny/termination.json",
)


def derived(locations: Locations = LOCATIONS, **overrides) -> TrainConfig:
    return derive_train_config(make_plan(job(**overrides)), 1, locations)


def test_train_config_survives_its_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(derived().to_json())
    assert TrainConfig.read(path) == derived()


@pytest.mark.parametrize(
    ("rdma", "is_required"), [("none", None), ("auto", None), ("required", True)]
)
def test_only_required_rdma_refuses_sockets(rdma: str, is_required: bool | None) -> None:
    assert derived(topology__rdma=rdma).world.rdma_required is is_required


def test_profiled_steps_and_ranks_reach_the_trainer() -> None:
    given = derived(
        topology={"processesPerNode": 2},
        training={"globalBatchSize": 4},
        observability__profile={"steps": "10-12", "ranks": [1], "stacks": True},
    )
    assert given.telemetry.profile == ProfileConfig(
        first_step=10, last_step=12, ranks=(1,), stacks=True
    )
    short = derived(observability__profile={"steps": "7"}).telemetry.profile
    assert short == ProfileConfig(first_step=7, last_step=7)
    # An elastic attempt on fewer nodes lacks the rank; the others still record.
    fewer = derived(observability__profile={"steps": "7", "ranks": [0, 5]}).telemetry.profile
    assert fewer is not None
    assert fewer.ranks == (0,)
    assert derived(observability__profile={"steps": "7", "ranks": [5]}).telemetry.profile == short


def test_train_config_states_the_world_it_expects():
    config = derived(topology={"nodes": 2, "processesPerNode": 3}, training={"globalBatchSize": 12})
    assert config.world.world_size == 6
    assert config.gradient_accumulation_steps == 2


def test_what_concerns_folders_reaches_the_trainer():
    assert not derived().take_over
    assert derived().listing_lag_seconds is None
    told = derived(replace(LOCATIONS, listing_lag_seconds=2.5), take_over=True)
    assert (told.take_over, told.listing_lag_seconds) == (True, 2.5)


@pytest.mark.parametrize(
    ("device", "source", "reads"),
    [
        ("cuda", "own", True),
        ("cuda", "dcgm", False),
        ("cuda", "none", False),
        ("cpu", "own", False),
    ],
)
def test_a_page_reads_the_gpus_that_a_run_has_and_that_nobody_else_reads(device, source, reads):
    config = derived(replace(LOCATIONS, gpu_metrics=GpuMetrics(source)))
    world = config.world.model_copy(update={"device": device})
    assert config.model_copy(update={"world": world}).reads_gpus is reads


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


def test_the_dtype_of_an_export_is_derived():
    full = {"type": "full"}
    assert derived(method=full).output.dtype is None
    assert derived(method=full, output={"dtype": "auto"}).output.dtype is None
    assert derived(method=full, output={"dtype": "float16"}).output.dtype == "float16"
    assert derived(output={"format": "both", "dtype": "bfloat16"}).output.dtype == "bfloat16"


def test_an_adapter_over_a_quantized_base_is_exported_as_an_adapter():
    assert derived(method={"type": "qlora"}).output.format == "adapter"


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        pytest.param({}, 86_400, id="a day on nodes that stay"),
        pytest.param({"capacity": "spot"}, 7_200, id="two hours on spot"),
        pytest.param({"capacity": "spotPreferred"}, 7_200, id="two hours where spot may be"),
        pytest.param(
            {"capacity": "spot", "checkpoint": {"meanTimeBetweenFailures": 600}}, 600, id="said"
        ),
    ],
)
def test_a_job_without_an_interval_says_how_often_it_fails(overrides, seconds):
    checkpoint = derived(**overrides).checkpoint
    assert (checkpoint.every_steps, checkpoint.every_seconds) == (None, None)
    assert checkpoint.mean_time_between_failures == seconds


def test_an_interval_of_the_manifest_is_taken_as_it_is():
    assert derived(checkpoint={"everySteps": 5, "keep": 3}).checkpoint == CheckpointConfig(
        dir="/runs/tiny/checkpoints", every_steps=5, keep=3
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        pytest.param(
            {"type": "qlora"},
            MethodConfig(type="qlora", lora=LoraSettings(), quantization="nf4"),
            id="qlora is 4-bit unless said",
        ),
        pytest.param(
            {"type": "qlora", "quantization": "int8", "lora": {"r": 4}},
            MethodConfig(type="qlora", lora=LoraSettings(r=4), quantization="int8"),
            id="int8",
        ),
        pytest.param(
            {"type": "lora", "lora": {"rslora": True, "dora": True, "targetModules": ["q_proj"]}},
            MethodConfig(lora=LoraSettings(rslora=True, dora=True, target_modules=("q_proj",))),
            id="variants of adapters",
        ),
        pytest.param(
            {"type": "full", "freeze": ["model.embed_tokens.*"]},
            MethodConfig(type="full", freeze=("model.embed_tokens.*",)),
            id="frozen modules",
        ),
    ],
)
def test_train_config_trains_what_the_method_says(method, expected):
    assert derived(method=method).method == expected


def test_train_config_has_the_strategy_of_the_manifest():
    sharded = {"type": "fsdp", "offload": "cpu", "replicas": 2, "reshardAfterForward": False}
    sharded["activationCheckpointing"] = "selective"
    assert derived(strategy=sharded).strategy == StrategyConfig(
        type="fsdp",
        offload="cpu",
        replicas=2,
        reshard_after_forward=False,
        activation_checkpointing="selective",
    )
    on_disk = {"type": "zero3", "offload": "nvme", "nvmePath": "/mnt/nvme"}
    assert derived(strategy=on_disk).strategy == StrategyConfig(
        type="zero3", offload="nvme", nvme_path="/mnt/nvme"
    )


def test_train_config_has_the_training_of_the_manifest():
    config = derived(
        dataset={"evalSource": "file://./eval.jsonl"},
        training={
            "precision": "fp16",
            "compile": True,
            "attention": "flex",
            "deterministic": True,
            "collectGarbageEverySteps": 7,
            "expandableSegments": False,
            "checkMemory": False,
            "liger": True,
            "float8": True,
            "evalEverySteps": 5,
            "earlyStopping": {"patience": 2, "minDelta": 0.5},
        },
    )
    assert config.data.eval == DatasetSource(path="/here/eval.jsonl")
    assert config.training == TrainingConfig(
        global_batch_size=4,
        max_steps=10,
        learning_rate=1e-4,
        precision="fp16",
        compile=True,
        is_compile_asked=True,
        attention="flex",
        deterministic=True,
        collect_garbage_every_steps=7,
        check_memory=False,
        liger=True,
        float8=True,
        eval_every_steps=5,
        early_stopping=EarlyStopping(patience=2, min_delta=0.5),
    )


def test_train_config_has_the_defaults_of_gpus():
    on_gpus = derived(topology={"gpusPerNode": 2}, strategy={"type": "fsdp"})

    assert on_gpus.training.compile
    assert not on_gpus.training.is_compile_asked
    assert on_gpus.training.expandable_segments
    assert on_gpus.training.collect_garbage_every_steps == GARBAGE_EVERY_STEPS
    assert on_gpus.strategy.prefetch == 1
    on_cpus = derived(topology={"gpusPerNode": 0}).training
    assert not (on_cpus.compile)
    assert not (on_cpus.expandable_segments)
    assert on_cpus.collect_garbage_every_steps == 0
    assert not derived(topology={"gpusPerNode": 2}, strategy={"type": "zero2"}).training.compile


def test_train_config_turns_the_defaults_of_gpus_off():
    asked = derived(
        topology={"gpusPerNode": 2},
        strategy={"type": "fsdp", "prefetch": 0, "reduceEachMicroBatch": False},
        training={
            "compile": False,
            "expandableSegments": False,
            "collectGarbageEverySteps": 0,
            "attention": "varlen",
        },
        checkpoint={"enabled": False},
    )

    assert not (asked.training.compile)
    assert not (asked.training.expandable_segments)
    assert asked.training.collect_garbage_every_steps == 0
    assert asked.training.attention == "varlen"
    assert (asked.strategy.prefetch, asked.strategy.reduce_each_micro_batch) == (0, False)
    assert not asked.checkpoint.enabled


ON_GPUS: dict[str, dict[str, Any]] = {
    "method": {"type": "full"},
    "topology": {"gpusPerNode": 2},
    "strategy": {"type": "fsdp"},
}


def settings_that_turn_a_default_off() -> list[str]:
    """Return the settings and values in the last column of docs/reference/defaults.md."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "defaults.md"
    text = page.read_text(encoding="utf-8")
    section = text.partition("## On a GPU")[2].partition("\n## ")[0]
    rows = [line.rsplit("|", 2)[1] for line in section.splitlines() if line.startswith("|")]
    found = (one for row in rows for one in re.findall(r"`(\w+\.\w+: \w+)`", row))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("setting", settings_that_turn_a_default_off())
def test_train_config_turns_off_what_the_table_of_defaults_says(setting):
    section, field, value = re.split(r"[.:] ?", setting)
    asked = {**ON_GPUS, section: {**ON_GPUS.get(section, {}), field: yaml.safe_load(value)}}
    before, after = (derived(**one).model_dump(by_alias=True)[section] for one in (ON_GPUS, asked))
    assert [name for name in before if before[name] != after[name]] == [field]


def test_the_table_of_defaults_names_settings():
    assert len(settings_that_turn_a_default_off()) >= 11


def test_train_config_has_the_8_bit_optimizer():
    assert (
        derived(
            method={"type": "full"}, training={"optimizer": "adamw8bit", "precision": "bf16"}
        ).training.optimizer
        == "adamw8bit"
    )


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        ("training", {"precision": "fp32"}, r"training\.precision bf16, not fp32"),
        ("training", {"precision": "fp64"}, r"training\.precision bf16, not fp64"),
        ("method", {"type": "lora", "lora": {}}, r"method\.type full, not lora"),
        ("strategy", {"type": "zero2"}, r"strategy\.type fsdp or ddp, not zero2"),
    ],
)
def test_train_config_refuses_8_bit_moments_where_they_cannot_be(section, changes, reason):
    made = derived(
        method={"type": "full"}, training={"optimizer": "adamw8bit", "precision": "bf16"}
    ).model_dump()
    made[section] |= changes
    said = rf"spec\.training\.optimizer adamw8bit needs spec\.{reason}; or use adamw"
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate(made)


def test_train_config_has_the_model_and_the_control_of_the_manifest():
    config = derived(
        model={
            "chatTemplate": "{{ messages }}",
            "chatTemplateArguments": {"think": "false", "depth": "2", "mood": "0.5", "who": "2 am"},
            "addTokens": ["<call>"],
        },
        dataset={"allowSpecialTokens": True},
        restartPolicy={"restartsInPlace": 2},
        deadlines={"hangSeconds": 90},
    )
    assert config.model == ModelConfig(
        path="/here/model",
        chat_template="{{ messages }}",
        chat_template_arguments={"think": False, "depth": 2, "mood": 0.5, "who": "2 am"},
        add_tokens=("<call>",),
    )
    assert config.data.allow_special_tokens
    assert config.data.special_tokens == ("<call>",)
    assert config.world.restarts_in_place == 2
    assert config.control == ControlConfig(hang_seconds=90)


def test_a_share_of_the_rows_is_sent_alone_and_a_job_without_one_sends_no_share():
    config = derived(
        dataset={"evalShare": 0.1, "also": [{"source": "hf://org/rows", "weight": 0.5}]},
        training={"evalEverySteps": 5, "earlyStopping": {"patience": 2}},
    )
    assert config.data.eval is None
    assert config.data.eval_share == 0.1
    assert [one.weight for one in config.data.held_out] == [1.0, 1.0]
    assert "evalShare" not in derived().to_json()


def test_train_config_has_what_the_backend_found_for_it():
    url = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
    config = derived(
        replace(LOCATIONS, scheduled_events_url=url),
        dataset={"also": [{"source": "hf://org/rows", "weight": 0.5}]},
        method={"lora": {"startFrom": "file://./adapters/a"}},
        checkpoint={"resumeFrom": "file://./checkpoints/step-1"},
    )
    assert config.data.also == (DatasetSource(path="org/rows", is_hub=True, weight=0.5),)
    assert config.method.lora == LoraSettings(start_from="/here/adapters/a")
    assert config.checkpoint.resume_from == "/here/checkpoints/step-1"
    assert config.control.scheduled_events_url == url


def strategies() -> list[dict[str, Any]]:
    """Every strategy with every combination of the settings that depend on it."""
    options: list[dict[str, Any]] = []
    types = [one for one in StrategyType if one is not StrategyType.AUTO]
    for type_, offload, path, replicas, reshard in product(
        types, Offload, (None, "/nvme"), (1, 2), (None, True)
    ):
        made = {"type": type_, "offload": offload, "nvmePath": path, "replicas": replicas}
        made["reshardAfterForward"] = reshard
        options.append({key: value for key, value in made.items() if value is not None})
    return options


def test_kubectl_and_the_trainer_refuse_the_same_strategies():
    schema = object_schema(StrategySpec)
    verdicts = {True: 0, False: 0}
    for strategy in strategies():
        try:
            StrategyConfig.model_validate(strategy)
            is_taken = True
        except ValidationError:
            is_taken = False
        assert (check_rules(with_defaults(strategy, schema), schema) == []) is is_taken, strategy
        verdicts[is_taken] += 1
    # fsdp: 2 offloads x 2 replicas x 2 reshards; ddp 1; zero1 and zero2 2 each; zero3 4
    assert verdicts == {True: 17, False: 143}


def test_train_config_refuses_an_adapter_of_full_fine_tuning():
    text = derived(method={"type": "full"}).to_json().replace('"merged"', '"adapter"')
    with pytest.raises(
        ValidationError, match=r"spec\.output\.format adapter needs spec\.method\.type"
    ):
        TrainConfig.model_validate_json(text)


def test_a_configuration_travels_as_one_word_that_no_shell_or_template_touches():
    odd = 'it\'s {{ x }} ${{inputs.x}} `a` "b" \\ \n' * 100
    config = derived(observability={"samplePrompts": [odd, "Grüße 🙂"]})
    packed = pack(config)
    assert unpack(packed) == config
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert len(packed) < len(config.to_json()) / 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("{}", id="JSON"),
        pytest.param(base64.b64encode(zlib.compress(b"{}")[:-4]).decode(), id="cut off"),
        pytest.param("YWJj", id="not compressed"),
    ],
)
def test_what_is_no_packed_configuration_is_said_so(text):
    with pytest.raises(ValueError, match="not a packed configuration"):
        unpack(text)


def test_a_packed_configuration_of_another_version_is_refused_by_its_key():
    text = derived().to_json().replace('"seed":', '"sead":')
    with pytest.raises(ValidationError, match="sead"):
        unpack(base64.b64encode(zlib.compress(text.encode())).decode())
