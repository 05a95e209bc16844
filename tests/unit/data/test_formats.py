"""Fields with one meaning are read, by any of their names; others are counted and named."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import ColumnMap, DataConfig, DataFormat, DatasetSource
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.formats import Conversation, read_example
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.run_data import prepare_run
from finetune_trainer.data.sequences import prepare
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_tokenizer

USUAL = ColumnMap()
QUESTION = {"role": "user", "content": "Weather in Bern?"}
REPLY = {"role": "assistant", "content": "Sunny."}
WEATHER = {"name": "weather", "arguments": {"city": "Bern"}}
CALLS = [{"type": "function", "function": WEATHER}]
EARLIER = (
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
)


def read(
    row: dict[str, Any],
    data_format: DataFormat = DataFormat.CHAT,
    rules: Rules = Rules.CURRENT,
    columns: ColumnMap = USUAL,
) -> Conversation:
    found = read_example(Row("rows line 1", row), data_format, columns, rules)
    assert isinstance(found, Conversation)
    return found


def replied(**fields: Any) -> dict[str, Any]:
    """Return a row of two turns with more fields in the reply."""
    return {"messages": [QUESTION, REPLY | fields]}


def task(**fields: Any) -> dict[str, Any]:
    """Return an instruction with more columns."""
    return {"instruction": "Two?", "output": "2"} | fields


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(
            {"role": "assistant", "content": None, "function_call": WEATHER}, id="no content"
        ),
        pytest.param({"role": "assistant", "function_call": [WEATHER]}, id="a list"),
        pytest.param(
            {
                "role": "assistant",
                "content": "",
                "function_call": '{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}',
            },
            id="JSON text",
        ),
        pytest.param(
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"city": "Bern"}}',
            },
            id="the role of LLaMA-Factory",
        ),
    ],
)
def test_a_function_call_is_a_tool_call(turn: dict[str, Any]) -> None:
    result = {"role": "function", "name": "weather", "content": "sunny"}
    found = read({"messages": [QUESTION, turn, result, REPLY]})
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert found.messages[2] == result | {"role": "tool"}
    assert found.learned == (1, 3)


@pytest.mark.parametrize("call", [{}, {"name": None, "arguments": None}, "", []])
def test_an_empty_function_call_is_none(call: Any) -> None:
    assert read(replied(function_call=call)).messages[1] == REPLY


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        pytest.param(
            {"function_call": {"arguments": "{}"}}, "is not an object with a name", id="no name"
        ),
        pytest.param({"function_call": "weather"}, "function_call is not JSON", id="a word"),
        pytest.param(
            {"function_call": WEATHER, "tool_calls": CALLS},
            "has both function_call and tool_calls; delete",
            id="twice",
        ),
        pytest.param(
            {"mask": True}, 'has mask, which could mean learned or not; write "train"', id="mask"
        ),
        pytest.param(
            {"masked": "yes"}, "has masked 'yes'; write 0 to learn the turn, else 1", id="word"
        ),
        pytest.param(
            {"loss_weight": 0.5}, "has loss_weight 0.5; write 1 to learn the turn", id="half"
        ),
    ],
)
def test_a_field_of_a_turn_without_a_clear_meaning_is_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=r"rows line 1: column 'messages' turn 2") as error:
        read(replied(**fields))
    assert sentence in str(error.value)


@pytest.mark.parametrize("as_text", [False, True])
def test_functions_are_tools_unless_the_row_has_tools(as_text: bool) -> None:
    schema = {"name": "weather", "parameters": {}}
    tool = {"type": "function", "function": schema}
    given = '[{"name": "weather", "parameters": {}}]' if as_text else [schema]
    assert read(replied() | {"functions": given}).tools == (tool,)
    assert read(replied() | {"functions": given, "tools": []}).tools == (tool,)
    assert read(replied() | {"functions": [{"name": "f"}], "tools": [tool]}).tools == (tool,)


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([["One?", "1"]], id="pairs"),
        pytest.param('[["One?", "1"]]', id="JSON text, as in a CSV file"),
        pytest.param(list(EARLIER), id="messages"),
    ],
)
def test_history_is_earlier_turns_after_the_system_turn(history: Any) -> None:
    row = task(history=history, system_prompt="Count.")
    found = read(row, DataFormat.INSTRUCTION)
    assert found.messages == (
        {"role": "system", "content": "Count."},
        *EARLIER,
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    )
    assert found.learned == (2, 4)


@pytest.mark.parametrize("history", [["One?", "1"], [["One?"]], [["One?", None]]])
def test_history_that_is_not_pairs_is_refused(history: Any) -> None:
    with pytest.raises(DataError, match=r"column 'history' item 1 is not a pair of the user's"):
        read(task(history=history), DataFormat.INSTRUCTION)


@pytest.mark.parametrize("row", [replied(), {"prompt": "Hi", "completion": "Ho"}])
def test_a_system_prompt_is_the_system_turn(row: dict[str, Any]) -> None:
    brief = {"role": "system", "content": "Be brief."}
    assert read(row | {"system_prompt": "Be brief."}).messages[0] == brief
    longer = row | {"system": "Be brief.", "system_prompt": "Be long."}
    assert read(longer).messages[0] == brief
    assert len(read(longer).messages) == 3


def test_a_system_turn_of_the_messages_stays_the_only_one() -> None:
    messages = [{"role": "system", "content": "Be kind."}, QUESTION, REPLY]
    row = {"messages": messages, "system_prompt": "Be brief."}
    assert read(row).messages == tuple(messages)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: False} for name in ("train", "training", "train_on_turn", "loss", "loss_mask")),
        *({name: 0} for name in ("weight", "loss_weight", "step_loss_mask")),
        {"masked": True},
        {"train": True, "weight": 0},
    ],
    ids=str,
)
def test_a_turn_is_excluded_by_each_usual_name(fields: dict[str, Any]) -> None:
    found = read(replied(**fields))
    assert found.learned == ()
    assert found.messages == (QUESTION, REPLY), "templates do not see the field"
    inverted = {name: not value for name, value in fields.items() if name != "train"}
    assert read(replied(**inverted)).learned == (1,)


@pytest.mark.parametrize(
    "columns",
    [
        *({"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"masked": True}),
        *({"weight": "0"}, {"train": "False"}),
    ],
    ids=str,
)
def test_a_row_is_excluded_by_its_weight_in_every_format(columns: dict[str, Any]) -> None:
    assert read(replied() | columns).learned == ()
    assert read({"prompt": "Hi", "completion": "Ho"} | columns).learned == ()
    assert read(task(**columns), DataFormat.INSTRUCTION).learned == ()
    text = Row("rows line 1", {"text": "Once"} | columns)
    assert read_example(text, DataFormat.TEXT, ColumnMap()) == ""


@pytest.mark.parametrize("columns", [{"weight": 1}, {"weight": 72.5}, {"train": "a.csv"}], ids=str)
def test_a_row_with_another_weight_is_learned(columns: dict[str, Any]) -> None:
    assert read(replied() | columns).learned == (1,)


def test_a_configured_column_has_no_other_meaning() -> None:
    row = {"history": "Add 1 and 1.", "weight": "0"}
    configured = ColumnMap(instruction="history", output="weight")
    found = read(row, DataFormat.INSTRUCTION, columns=configured)
    assert [turn["content"] for turn in found.messages] == ["Add 1 and 1.", "0"]
    assert found.learned == (1,)


def test_the_rules_of_the_release_read_no_such_field() -> None:
    released = Rules.RELEASE_0_1_0
    row = replied(loss=False) | {"functions": [WEATHER], "system_prompt": "Hm", "weight": 0}
    found = read(row, rules=released)
    assert found == Conversation((QUESTION, REPLY | {"loss": False}), (1,))
    row = task(history=[["One?", "1"]])
    assert len(read(row, DataFormat.INSTRUCTION, released).messages) == 2
    with pytest.raises(DataError, match="has the role 'function'; use"):
        read({"messages": [{"role": "function", "content": "sunny"}]}, rules=released)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("plain"), template=None)


def labels(tokenizer: Any, row: dict[str, Any], data_format: DataFormat) -> int:
    data = DataConfig(
        train=DatasetSource(path="rows"), cache_dir="unused", format=data_format, packing=False
    )
    [encoded] = RowEncoder(data, tokenizer).encode([Row("rows line 1", row)])
    return sum(sum(part.is_label) for part in encoded.parts)


def test_an_excluded_row_has_no_label_without_a_chat_template(plain: Any) -> None:
    assert labels(plain, task(), DataFormat.INSTRUCTION)
    assert not labels(plain, task(weight=0), DataFormat.INSTRUCTION)
    assert not labels(plain, {"text": "Once", "train": False}, DataFormat.TEXT)


def test_history_is_refused_without_a_chat_template(plain: Any) -> None:
    with pytest.raises(DataError, match=r"line 1: the responses of its history .* chat template"):
        labels(plain, task(history=[["One?", "1"]]), DataFormat.INSTRUCTION)


def warnings(
    folder: Path, rows: list[dict[str, Any]], template: str = CHATML_TEMPLATE, **config: Any
) -> list[str]:
    """Return the warnings about rows in a file."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        train=DatasetSource(path=str(path)), cache_dir=str(folder / "cache"), **config
    )
    tokenizer = tiny_tokenizer(folder, template=template)
    return list(prepare(data, data.sources, tokenizer).report.warnings)


def test_unread_turns_masks_and_tools_are_one_warning_with_counts(tmp_path: Path) -> None:
    rows = [replied() | {"id": number, "source": "hub"} for number in range(5)]
    rows[0]["history"] = [["One?", "1"]]
    rows[1] |= {"history": [["One?", "1"]], "chosen": [REPLY]}
    rows[2]["messages"] = [QUESTION, REPLY | {"thinking_blocks": [{"text": "hm"}], "refusal": ""}]
    [warning] = warnings(tmp_path, rows)
    assert warning == (
        f"spec.dataset.source {tmp_path}/rows.jsonl: chosen in 1 of 5 rows is not read, history in "
        "2 of 5 rows is not read, thinking_blocks in 1 of 5 rows is not read; move to messages, "
        "tools or train what the model should learn from, or delete it"
    )


@pytest.mark.parametrize(
    ("row", "config", "name"),
    [
        pytest.param(task(tools=[WEATHER]), {"format": "instruction"}, "tools", id="tools"),
        pytest.param({"text": "a", "messages": [REPLY]}, {"format": "text"}, "messages", id="t"),
        pytest.param(replied() | {"weight": 0.5}, {}, "weight", id="half a weight"),
        pytest.param(replied(refusal="No."), {}, "refusal", id="refusal"),
        pytest.param(replied(trainable=False), {}, "trainable", id="another mask"),
        pytest.param(replied(function_calls=[{"name": "f"}]), {}, "function_calls", id="calls"),
        pytest.param(
            {"messages": [{"role": "system", "content": "a", "tools": [WEATHER]}, QUESTION, REPLY]},
            {},
            "tools",
            id="tools of a turn",
        ),
        pytest.param({"prompt": "a", "completion": "b", "label": False}, {}, "label", id="label"),
        pytest.param(replied() | {"images": ["a.png"]}, {}, "images", id="images"),
        pytest.param(replied() | {"functions": ["f"]}, {}, "functions", id="names of functions"),
        pytest.param(
            {"messages": [{"role": "system", "content": "a"}, QUESTION, REPLY]}
            | {"system_prompt": "b"},
            {},
            "system_prompt",
            id="a second system turn",
        ),
    ],
)
def test_each_kind_of_unread_field_is_named(
    tmp_path: Path, row: dict[str, Any], config: dict[str, Any], name: str
) -> None:
    [warning] = warnings(tmp_path, [row], **config)
    assert f"rows.jsonl: {name} in 1 of 1 rows is not read; move" in warning


def test_what_is_read_or_empty_is_not_warned_of(tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace(
        "message['content'] +", "message['content'] + (message.refusal or '') +"
    )
    rows = [
        replied(refusal="No.") | {"weight": 1, "system_prompt": "Hm", "tools": []},
        replied() | {"prompt": "Hi", "prompt_id": "7", "category": "chat", "chosen": []},
        replied() | {"label": 3},
    ]
    assert warnings(tmp_path, rows, template) == []


@pytest.mark.parametrize("call", [{"name": "", "arguments": ""}, {"name": None}, {}])
def test_an_empty_call_of_a_table_is_no_call(call: dict[str, Any]) -> None:
    assert "tool_calls" not in read(replied(function_call=call)).messages[-1]


@pytest.mark.parametrize("call", [True, 3, float("nan"), "[" * 5_000])
def test_a_call_of_another_type_is_refused(call: Any) -> None:
    with pytest.raises(DataError, match="function_call"):
        read(replied(function_call=call))


def test_a_run_with_a_checkpoint_learns_what_it_learned_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [*EARLIER, QUESTION, REPLY | {"loss": False}]}))
    data = DataConfig(train=DatasetSource(path=str(path)), cache_dir=str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer(tmp_path)
    before = prepare(data, data.sources, tokenizer, rules=Rules.RELEASE_0_1_0)
    sentences: list[str] = []
    found = prepare_run(data, lambda rules: tokenizer, before.fingerprint, sentences.append)
    assert found.train.fingerprint == before.fingerprint
    assert "some rows give other tokens now; this run has a checkpoint" in sentences[0]
    new = prepare_run(data, lambda rules: tokenizer, None, sentences.append)
    assert sum(new.train.label_counts) < sum(before.label_counts)
    assert len(sentences) == 1
