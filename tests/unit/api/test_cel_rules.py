"""Rules are evaluated where, when and on what the API server evaluates them."""

from typing import Any

import pytest

from finetune_operator.api.cel import check_rules
from finetune_operator.api.crd import custom_resource_definition, job_schema
from finetune_operator.api.manifest import read_manifests
from finetune_operator.api.one_rule import RULES
from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import Finding, show_path
from finetune_operator.api.structural import check_structure
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.topology import KubernetesSpec
from finetune_operator.api.validation import check_object, defaulted
from support.api import backend_names
from support.api.bad_manifests import BadManifest, bad_manifests
from support.api.builders import manifest


def ruled(rule: str, **more: Any) -> Schema:
    return {"x-kubernetes-validations": [{"rule": rule, "message": "is wrong"}], **more}


def problems(value: Any, old: Any = None) -> list[str]:
    before = None if old is None else defaulted(old)
    return [
        f"{show_path(one.path)} {one.message}" for one in check_object(defaulted(value), before)
    ]


def test_a_rule_that_raises_is_a_refusal_that_says_so() -> None:
    schema = ruled("1 / self.n == 1", type="object", properties={"n": {"type": "integer"}})
    (finding,) = check_rules({"n": 0}, schema)
    assert finding.message.startswith("is wrong (its rule cannot be evaluated: ")


def test_a_whole_number_in_a_number_field_is_a_double_to_its_rule() -> None:
    schema = ruled("self > 1.5", type="number")
    assert check_rules(2, schema) == []
    assert [one.message for one in check_rules(1, schema)] == ["1 is wrong"]


def test_rules_hold_at_every_list_item_and_map_value() -> None:
    item = ruled("self != 'x'", type="string")
    schema: Schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": item},
            "map": {"type": "object", "additionalProperties": item},
        },
    }
    value = {"list": ["a", "x"], "map": {"k": "x"}}
    assert [show_path(one.path) for one in check_rules(value, schema)] == ["list[1]", "map.k"]


def test_a_rule_does_not_see_unknown_fields() -> None:
    schema = ruled("!has(self.b)", type="object", properties={"a": {"type": "string"}})
    assert check_rules({"a": "x", "b": "y"}, schema) == []


def test_a_rule_that_reads_a_wrong_value_is_left_out_and_others_are_not() -> None:
    schema: Schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "x-kubernetes-validations": [
            {"rule": "self.a > 1", "message": "a"},
            {"rule": "self.b > 1", "message": "b"},
        ],
    }
    wrong = [Finding(("a",), "must be a whole number")]
    assert [one.message for one in check_rules({"a": "x", "b": 0}, schema, wrong)] == ["b"]


def test_a_rule_over_a_list_is_left_out_when_an_entry_is_wrong() -> None:
    items = {"type": "array", "items": {"type": "integer"}}
    schema = ruled("self.a.all(n, n > 1)", type="object", properties={"a": items})
    wrong = [Finding(("a", 0), "must be a whole number")]
    assert check_rules({"a": ["x"]}, schema, wrong) == []
    assert [one.message for one in check_rules({"a": [0]}, schema)] == ["is wrong"]


def test_rules_about_updates_are_silent_on_creation() -> None:
    assert check_rules({"a": 1}, ruled("self.a == oldSelf.a", type="object")) == []


def test_an_unchanged_part_is_not_judged_by_rules_that_came_later() -> None:
    schema: Schema = {
        "type": "object",
        "properties": {
            "spec": ruled("self.b != 1", type="object", properties={"b": {"type": "integer"}}),
            "list": {"type": "array", "items": ruled("self != 'x'", type="string")},
            "fixed": ruled("self == oldSelf", type="integer"),
        },
    }
    stored = {"spec": {"b": 1}, "list": ["x", "x"], "fixed": 1}
    assert len(check_rules(stored, schema)) == 3
    assert check_rules(stored | {"status": 1}, schema, old=stored) == []
    changed = stored | {"list": ["x"], "fixed": 2}
    paths = [show_path(one.path) for one in check_rules(changed, schema, old=stored)]
    assert paths == ["list[0]", "fixed"]


FREE: dict[str, Any] = {
    "suspend": True,
    "ttlSecondsAfterFinished": 60,
    "deadlines": {"activeSeconds": 60},
    "restartPolicy": {"maxRestarts": 9, "maxDisruptions": 1},
    "topology.nodes": 2,
    "observability": {"statusIntervalSeconds": 30},
}
BOUND: dict[str, Any] = {
    "model.source": "file://./other",
    "dataset.source": "file://./other.jsonl",
    "method": {"type": "full"},
    "strategy.type": "ddp",
    "training.seed": 1,
    "topology.gpusPerNode": 1,
    "topology.maxNodes": 4,
    "checkpoint.keep": 3,
    "output.format": "merged",
    "restartPolicy.restartsInPlace": 1,
    "restartPolicy.rules": [{"onClass": "Error", "action": "Fail"}],
    "restartPolicy.backoff": {"baseSeconds": 1},
    "queue.name": "team",
    "podTemplate.spec": {"nodeSelector": {"a": "b"}},
    "backend.local": {"threadsPerProcess": 1},
}


@pytest.mark.parametrize("field", FREE)
def test_what_binds_no_attempt_changes_at_any_time(field: str) -> None:
    assert problems(manifest(**{field: FREE[field]}), old=manifest()) == []


@pytest.mark.parametrize("field", BOUND)
def test_what_binds_an_attempt_changes_only_while_suspended(field: str) -> None:
    changed = manifest(**{field: BOUND[field]})
    (problem,) = problems(changed, old=manifest())
    start = f"spec cannot change while the job is not suspended: spec.{field.split('.')[0]}"
    assert problem.startswith(start)
    assert problems(changed, old=manifest(suspend=True)) == []


def test_an_optional_field_cannot_be_removed_either() -> None:
    (problem,) = problems(manifest(), old=manifest(**{"queue.name": "team"}))
    assert problem == (
        "spec cannot change while the job is not suspended: spec.queue; "
        "set spec.suspend: true first"
    )


def test_every_field_that_may_not_change_is_named() -> None:
    changed = manifest(training__seed=1, topology__max_nodes=4, queue__name="team")
    (problem,) = problems(changed, old=manifest())
    assert ": spec.training spec.topology.maxNodes spec.queue; set" in problem


@pytest.mark.parametrize("status", [{"phase": "Running"}, {"progress": {"step": 2}}])
def test_a_write_of_the_status_is_never_held_against_the_spec(status: dict[str, Any]) -> None:
    before = manifest() | {"status": {"progress": {"step": 1}}}
    assert problems(manifest() | {"status": {"progress": {"step": 1}, **status}}, old=before) == []


@pytest.mark.parametrize("field", ["backend.type", "managedBy"])
def test_who_runs_a_job_never_changes(field: str) -> None:
    found = problems(manifest(**{field: "other"}), old=manifest(suspend=True))
    assert [one for one in found if f"spec.{field} " in one and "after creation" in one]


def on_hub(backend: dict[str, Any] | None, **spec: Any) -> dict[str, Any]:
    made = manifest(model__source="hf://a/b", dataset__source="hf://a/c", backend=None, **spec)
    if backend is not None:
        made["spec"]["backend"] = backend
    return made


@pytest.mark.parametrize(("old", "new", "field"), backend_names.CHANGES)
def test_both_names_of_a_backend_are_one(
    old: dict[str, Any] | None, new: dict[str, Any] | None, field: str
) -> None:
    found = problems(on_hub(new), old=on_hub(old))
    assert [field in one for one in found] == ([True] if field else [])


@pytest.mark.parametrize("alike", backend_names.SAME.values(), ids=backend_names.SAME)
def test_jobs_that_name_a_backend_differently_are_the_same_job(
    alike: list[dict[str, Any] | None],
) -> None:
    specs = [FineTuneJob.model_validate(on_hub(one)).spec for one in alike]
    assert {one.backend.type for one in specs} == {"kubernetes"}
    settings = [one.backend.kubernetes or KubernetesSpec() for one in specs]
    assert all(one == settings[0] for one in settings)


def test_the_two_names_of_a_backend_exclude_each_other() -> None:
    (problem,) = problems(on_hub({"aks": {}, "kubernetes": {}}))
    assert problem == (
        "spec.backend.aks is another name of kubernetes, which is set, too; remove aks"
    )


@pytest.mark.parametrize(
    "status", [{"phase": "Running"}, {"observedGeneration": 2}, {"ledger": {"recoveries": 1}}]
)
def test_specs_are_not_compared_if_the_status_changed(status: dict[str, Any]) -> None:
    """The API server resets the spec in such a write (`test_crd_on_api_server.py`)."""
    before = manifest() | {"status": {"phase": "Starting", "ledger": {"recoveries": 0}}}
    after = manifest(training__seed=1) | {"status": {**before["status"], **status}}
    assert problems(after, old=before) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"training__globalBatchSize": 100, "topology": {"nodes": 2, "processesPerNode": 8}},
            "spec.training.globalBatchSize 100 must be a multiple of nodes x processes x "
            "micro-batch (2 x 8 x 1); use 96 or 112",
        ),
        (
            {"training__globalBatchSize": 1, "topology__nodes": 2},
            "spec.training.globalBatchSize 1 must be a multiple of nodes x processes x micro-batch "
            "(2 x 1 x 1); use 2",
        ),
        (
            {
                "topology": {"gpusPerNode": 2, "processesPerNode": None},
                "strategy__tensorParallel": 3,
                "training__globalBatchSize": 8,
            },
            "spec.strategy.tensorParallel 3 times pipelineParallel must divide nodes x processes; "
            "change one of them",
        ),
    ],
)
def test_batch_and_ranks_must_fit(overrides: dict[str, Any], says: str) -> None:
    made = manifest(**overrides)
    if made["spec"]["topology"].get("processesPerNode") is None:
        made["spec"]["topology"].pop("processesPerNode", None)
    assert says in problems(made)


def test_tensor_parallel_ranks_share_one_batch() -> None:
    made = manifest(training__globalBatchSize=3, topology__nodes=4, strategy__tensorParallel=4)
    assert problems(made) == []


def test_a_job_may_go_on_with_one_process_that_may_not_begin_with_one() -> None:
    sharded = manifest(strategy__type="fsdp")
    says = 'spec.strategy.type "fsdp" requires at least two processes, but topology has one'
    assert [one.partition(";")[0] for one in problems(sharded)] == [says]
    assert problems({**sharded, "status": {"attempt": 1}}) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({}, None, id="possible"),
        pytest.param({"strategy__type": "fsdp", "topology__nodes": 2}, None, id="sharded"),
        pytest.param({"training__precision": "fp32"}, "keeps parameters in bf16", id="fp32"),
        pytest.param(
            {"method__type": "lora"}, "requires method type full, because parameters", id="adapters"
        ),
        pytest.param(
            {"strategy__type": "zero2", "topology__nodes": 2},
            "is not supported by DeepSpeed",
            id="ZeRO",
        ),
    ],
)
def test_8_bit_moments_are_for_full_fine_tuning_in_bf16(changes, says) -> None:
    settings = {"method__type": "full", "training__optimizer": "adamw8bit", **changes}
    found = problems(manifest(**settings))
    assert len(found) == (says is not None)
    assert all(f'spec.training.optimizer "adamw8bit" {says}' in one for one in found), found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2"])
def test_a_quantized_base_goes_with_every_strategy_but_zero3(strategy: str) -> None:
    made = manifest(method__type="qlora", strategy__type=strategy, topology__nodes=2)
    assert problems(made) == []


def spec_with(rules: list[Any]) -> Schema:
    """The schema of the spec with these rules, and with none on its parts."""

    def bare(node: Schema) -> Schema:
        made = {key: one for key, one in node.items() if key != RULES}
        if "properties" in made:
            made["properties"] = {key: bare(one) for key, one in made["properties"].items()}
        return made | ({"items": bare(made["items"])} if "items" in made else {})

    return bare(job_schema()["properties"]["spec"]) | {RULES: rules}


@pytest.mark.parametrize("bad", bad_manifests(), ids=lambda bad: bad.file.stem)
def test_one_rule_of_the_crd_refuses_what_the_rules_of_the_spec_refuse(bad: BadManifest) -> None:
    crd = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    separate = job_schema()["properties"]["spec"][RULES]
    merged = crd["properties"]["spec"][RULES]
    assert len(merged) == 1
    for read in read_manifests([str(bad.file)]).manifests:
        value = defaulted(read.value)
        if check_structure(value, job_schema()):
            continue  # the API server evaluates no rule
        sentences = [
            f"{rule['fieldPath'][1:]} {rule['message']}. "
            for rule in separate
            if check_rules(value["spec"], spec_with([rule]))
        ]
        found = [finding.message for finding in check_rules(value["spec"], spec_with(merged))]
        assert found == (["".join(sentences)] if sentences else [])
