"""`ftctl init` writes a manifest that a run accepts, or asks; in the process of the test."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.api.v1alpha1.method import MethodType
from finetune_operator.api.validation import load_job
from finetune_operator.cli.init_draft import Wish, drafted
from finetune_operator.cli.init_numbers import estimated
from finetune_operator.cli.init_places import place_of
from finetune_operator.cli.trainer_process import BASE, Ask
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import ColumnMap, DataFormat, Inspection, RowLengths
from support.data.inspected import ask_here
from support.data.row_shapes import ASKED, DETECTED, TURNS
from support.data.text_fixtures import tiny_tokenizer
from support.local.fake_nvidia_smi import H100, T4, fake_nvidia_smi


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path, context: int = 2048, **tokenizer: Any) -> Path:
    tiny_tokenizer(folder, **tokenizer)
    settings = {"model_type": "llama", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def pair(number: int, words: int = 9) -> dict[str, str]:
    return {"prompt": f"What is {number}?", "completion": f"{number} " * words}


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def init(
    model: Path | str,
    data: Path | str,
    folder: Path,
    *,
    found: Sequence[str] = (),
    ask: Ask = ask_here,
    **wish: Any,
) -> tuple[str, dict[str, Any], list[str]]:
    """Return the manifest as text and as a value, and the warnings; it passes every check.

    `found` are the GPUs that `nvidia-smi` shows.
    """
    asked = Wish(place_of(str(model), "--model"), place_of(str(data), "--data"), **wish)
    environ = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    if found:
        environ["PATH"] = fake_nvidia_smi(folder, found)
    text, warnings = drafted(asked, ask, environ, lambda: len(found))
    file = folder / "checked.yaml"
    file.write_text(text)
    load_job(file, default_backend="local")
    return text, yaml.safe_load(text)["spec"], warnings


@pytest.mark.parametrize(("rows", "shape", "columns", "unread"), DETECTED)
def test_each_shape_becomes_a_manifest(
    model: Path,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    shape: str,
    columns: str,
    unread: str,
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows * 4)
    if "tools" in rows[0]:  # which the template of this model does not show
        with pytest.raises(
            FineTuneError, match="tools, which the model's chat template leaves out"
        ):
            init(model, data, tmp_path)
        return
    text, spec, _ = init(model, data, tmp_path)
    named = dict(one.split("=") for one in columns.split(",") if one)
    assert spec["dataset"]["format"] == shape
    assert spec["dataset"].get("columns", {}) == named
    assert all(column in text for column in unread.split())


@pytest.mark.parametrize(("rows", "reason", "options"), ASKED)
def test_each_offered_option_becomes_a_manifest(
    model: Path,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    reason: str,
    options: tuple[str, ...],
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows * 4)
    with pytest.raises(FineTuneError, match=re.escape(reason)):
        init(model, data, tmp_path)
    for option in options:
        chosen = ColumnMap(**dict(one.split("=") for one in option.split(",")))
        init(model, data, tmp_path, columns=chosen)


def test_few_rows_get_enough_steps_and_held_out_rows(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "50 rows.jsonl", [pair(number) for number in range(50)])
    text, spec, warnings = init(model, data, tmp_path)
    assert init(model, data, tmp_path)[0] == text  # the same bytes
    assert warnings == []
    steps = re.search(r"epochs: \d+ +# (\d+) steps", text)
    assert steps is not None
    assert int(steps[1]) >= 20
    assert spec["training"]["globalBatchSize"] == 1
    held_out = re.search(r"evalShare: 0\.\d+ +# (\d+) rows held out", text)
    assert held_out is not None
    assert 5 <= int(held_out[1]) <= 15
    assert "50 rows are few" in text
    assert spec["observability"]["samplePrompts"] == ["What is 0?"]
    assert spec["dataset"]["source"] == f"file://{data}"


def test_many_rows_get_a_larger_batch_and_a_smaller_share(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [pair(number, 40) for number in range(1_500)])
    _, spec, _ = init(model, data, tmp_path)
    assert spec["dataset"]["evalShare"] == 0.05
    assert spec["training"]["epochs"] == 2
    assert spec["training"]["globalBatchSize"] >= 4


@pytest.mark.parametrize(
    ("words", "context", "length"),
    [
        pytest.param(9, 2048, 256, id="short rows"),
        pytest.param(150, 2048, 512, id="longer rows"),
        pytest.param(900, 1024, 1024, id="rows above the context"),
        pytest.param(9, 100, 100, id="a small context"),
    ],
)
def test_the_length_holds_the_rows_within_the_context(
    tmp_path: Path, words: int, context: int, length: int
) -> None:
    model = write_model(tmp_path, context)
    data = write_rows(tmp_path / "rows.jsonl", [pair(number % 7, words) for number in range(30)])
    text, spec, warnings = init(model, data, tmp_path)
    assert spec["training"]["maxSeqLength"] == length
    if length == 1024:
        assert re.search(r"maxSeqLength: 1024 .*\d rows longer and truncated", text)
        assert [one for one in warnings if "were cut to 1024 tokens" in one]


def test_long_texts_are_split(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "word " * 3_000}] * 12)
    text, spec, _ = init(model, data, tmp_path)
    assert spec["dataset"]["longRows"] == "split"
    assert "samplePrompts" not in text


@pytest.mark.parametrize("count", [1, 5])
def test_hardly_any_rows_are_trained_on_whole(model: Path, tmp_path: Path, count: int) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [pair(number) for number in range(count)])
    text, spec, _ = init(model, data, tmp_path)
    assert "evalShare" not in text
    assert spec["training"]["epochs"] == 10


def test_too_few_steps_are_a_warning(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [pair(number) for number in range(10)])
    _, spec, warnings = init(model, data, tmp_path, gpus=8, method=MethodType.FULL)
    assert spec["topology"] == {"gpusPerNode": 8}
    assert spec["training"]["globalBatchSize"] == 8
    assert spec["method"] == {"type": "full"}
    assert float(spec["training"]["learningRate"]) == 1e-5
    assert [one for one in warnings if one.startswith("the whole run has ")]


def test_files_of_splits_become_sources(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "validation", "test"):
        write_rows(folder / f"{name}.jsonl", [pair(number) for number in range(30)])
    (folder / "dataset_info.json").write_text("{}")
    _, spec, _ = init(model, folder, tmp_path, output=tmp_path / "jobs.yaml")
    assert spec["dataset"]["source"] == "file://./data/train.jsonl"
    assert spec["dataset"]["evalSource"] == "file://./data/validation.jsonl"
    assert "evalShare" not in spec["dataset"]


def test_folders_of_splits_become_sources(model: Path, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for part in range(2):
            rows = [pair(number) for number in range(part, 30)]
            write_rows(tmp_path / "data" / name / f"{part}.jsonl", rows)
    (tmp_path / "jobs").mkdir()
    output = tmp_path / "jobs" / "job.yaml"
    _, spec, _ = init(model, tmp_path / "data", tmp_path, output=output)
    assert spec["dataset"]["source"] == "file://../data/train"
    assert spec["dataset"]["evalSource"] == "file://../data/test"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        pytest.param(["a.jsonl", "b.csv"], r"holds \.csv and \.jsonl files", id="two types"),
        pytest.param(
            ["train-0.jsonl", "train-1.jsonl", "test.jsonl"],
            "move the files of each split into a folder",
            id="several files of a split",
        ),
        pytest.param(["readme.md"], "holds no .* file; add one", id="no rows"),
    ],
)
def test_a_folder_that_no_path_divides_is_refused(
    model: Path, tmp_path: Path, files: list[str], reason: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in files:
        write_rows(folder / name, [pair(1)])
    with pytest.raises(FineTuneError, match=reason):
        init(model, folder, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "packs"),
    [
        pytest.param([300] * 101, 1_000, id="a row per pack"),
        pytest.param([256] * 101, 500, id="two rows per pack"),
        pytest.param([100, *[400] * 100], 1_000, id="rows that leave no room"),
        pytest.param([2] * 101, 4, id="many rows per pack"),
    ],
)
def test_packs_are_estimated_from_the_lengths(tokens: list[int], packs: int) -> None:
    lengths = RowLengths(percentiles=tuple(tokens), mean=sum(tokens) / len(tokens))
    found = Inspection(
        train="rows.jsonl",
        format=DataFormat.CHAT,
        names=("messages",),
        rows=1_000,
        total_rows=1_000,
        characters=1,
        lengths=lengths,
    )
    counts = estimated(found, 512)
    assert not counts.is_exact
    assert counts.packs == pytest.approx(packs, rel=0.02)


def test_without_a_tokenizer_lengths_are_estimates(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [pair(number) for number in range(50)])
    text, spec, _ = init("hf://org/model", data, tmp_path)
    assert spec["model"]["source"] == "hf://org/model"
    assert "(estimated from the size of the text)" in text
    assert "not known: HF_HUB_OFFLINE is set." in text
    assert re.search(r"epochs: \d+ +# about \d+ steps", text)
    with pytest.raises(FineTuneError, match="--data org/rows: HF_HUB_OFFLINE is set, and"):
        init("hf://org/model", "org/rows", tmp_path)


def test_a_model_without_chat_template_gets_an_option(tmp_path: Path) -> None:
    model = write_model(tmp_path, template=None)
    data = write_rows(tmp_path / "rows.jsonl", [pair(number) for number in range(50)])
    option = "instruction=prompt,output=completion"
    with pytest.raises(FineTuneError, match=f"no chat template, .*\n.*--columns {option}"):
        init(model, data, tmp_path)
    chosen = ColumnMap(instruction="prompt", output="completion")
    _, spec, _ = init(model, data, tmp_path, columns=chosen)
    assert spec["dataset"]["format"] == "instruction"


def test_special_tokens_of_the_model_in_texts_are_a_question(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"Number {number}<|endoftext|>"} for number in range(50)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(FineTuneError, match="50 of 50 texts write special tokens of the model"):
        init(model, data, tmp_path)
    _, spec, _ = init(model, data, tmp_path, columns=ColumnMap(text="text"))
    assert spec["dataset"]["allowSpecialTokens"] is True


def rows_of(folder: Path) -> Path:
    return write_rows(folder / "rows.jsonl", [pair(number) for number in range(300)])


def asked_modules(asked: list[str]) -> Ask:
    """Return `ask_here` that appends the modules to `asked`."""

    def ask(module: str, *arguments: Any) -> list[dict[str, Any]]:
        asked.append(module)
        return ask_here(module, *arguments)

    return ask


def test_a_job_that_fits_shows_the_memory_of_a_step(tmp_path: Path) -> None:
    asked = list[str]()
    text, spec, warnings = init(
        "meta-llama/Llama-3.1-8B",
        rows_of(tmp_path),
        tmp_path,
        found=[H100, H100],
        ask=asked_modules(asked),
    )
    assert warnings == []
    assert spec["method"] == {"type": "lora"}
    comment = r"gpusPerNode: 2 +# found 2; a step takes \d\d\.\d of 79\.1 GiB per GPU\n"
    assert re.search(comment, text)
    assert BASE not in asked  # its shape is built in


def test_lora_becomes_qlora_if_only_qlora_fits(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.1-8B"
    text, spec, warnings = init(model, rows_of(tmp_path), tmp_path, found=[T4])
    assert warnings == []
    assert spec["method"] == {"type": "qlora"}
    assert re.search(r"type: qlora +# with lora a step takes \d\d\.\d of 14\.6 GiB per GPU\n", text)
    assert re.search(r"gpusPerNode: 1 +# found 1; a step takes \d\.\d of 14\.6 GiB", text)


@pytest.mark.parametrize(
    ("model", "method", "verb", "advice"),
    [
        pytest.param(
            "meta-llama/Llama-3.1-8B",
            MethodType.LORA,
            "may not fit",
            "the cheapest change that fits is spec.method.type qlora with ",
            id="the user has chosen",
        ),
        pytest.param(
            "meta-llama/Llama-3.1-70B",
            None,
            "does not fit",
            "use more or larger GPUs, or a smaller model",
            id="large",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_a_warning(
    tmp_path: Path, model: str, method: MethodType | None, verb: str, advice: str
) -> None:
    text, spec, [warning] = init(model, rows_of(tmp_path), tmp_path, found=[T4], method=method)
    assert spec["method"] == {"type": "lora"}
    assert re.search(r"gpusPerNode: 1 +# found 1\n", text)
    assert f"the job {verb} on this machine: it needs " in warning
    assert ("checkMemory" in warning) == (verb == "does not fit")
    assert f"of 14.6 GiB per GPU; {advice}" in warning


def test_the_trainer_reads_an_unknown_model_once(model: Path, tmp_path: Path) -> None:
    asked = list[str]()
    text, _, _ = init(model, rows_of(tmp_path), tmp_path, found=[H100], ask=asked_modules(asked))
    assert asked.count(BASE) == 1
    assert re.search(r"gpusPerNode: 1 +# found 1; a step takes \d\d\.\d of 79\.1 GiB", text)


def test_a_model_that_cannot_be_read_has_no_forecast(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "config.json").write_text(json.dumps({"model_type": "vit"}))
    text, _, warnings = init(model, rows_of(tmp_path), tmp_path, found=[H100])
    assert warnings == []
    assert re.search(r"gpusPerNode: 1 +# found 1\n", text)


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        pytest.param([], 1, id="no GPU here"),
        pytest.param([H100], 2, id="more GPUs than here"),
        pytest.param([H100], 0, id="a job on the CPU"),
        pytest.param([H100.replace("81559", "[N/A]")], 1, id="memory unknown"),
    ],
)
def test_gpus_that_are_not_known_have_no_forecast(
    tmp_path: Path, found: Sequence[str], gpus: int
) -> None:
    model = "meta-llama/Llama-3.1-8B"
    text, _, warnings = init(model, rows_of(tmp_path), tmp_path, found=found, gpus=gpus)
    assert warnings == []
    assert re.search(rf"gpusPerNode: {gpus} +# --gpus {gpus}\n", text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "holds no rows", id="empty"),
        pytest.param(b'{"text": "\xff"}\n', "line 1 is not UTF-8 text", id="not UTF-8"),
        pytest.param(b'{"text": "a"}\n[1]\n', "line 2 is a JSON list", id="not an object"),
        pytest.param(b'{"text": ""}\n', "none of the 1 rows has a text", id="an empty text"),
    ],
)
def test_a_file_without_rows_is_refused(
    model: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(FineTuneError, match=reason):
        init(model, tmp_path / "rows.jsonl", tmp_path)


def test_names_that_yaml_would_change_are_quoted(model: Path, tmp_path: Path) -> None:
    rows = [{"a: b": f"No. {n} #1", "yes": f"{n}!"} for n in range(20)]
    data = write_rows(tmp_path / "7 rows: 'a' #1.jsonl", rows)
    columns = ColumnMap(prompt="a: b", completion="yes")
    _, spec, _ = init(model, data, tmp_path, columns=columns)
    assert spec["dataset"]["source"] == f"file://{data}"
    assert spec["dataset"]["columns"] == {"prompt": "a: b", "completion": "yes"}
    assert spec["observability"]["samplePrompts"] == ["No. 0 #1"]


def test_conversations_count_their_turns(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": TURNS * n} for n in range(1, 30)])
    text, _, _ = init(model, data, tmp_path)
    assert "format chat (column messages), 2 to 58 turns." in text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param("both", "is a folder here, and could also be a name on the hub", id="both"),
        pytest.param("org/both", r"write \./org/both or hf://org/both", id="both with a slash"),
        pytest.param("absent.jsonl", "absent.jsonl does not exist", id="absent"),
        pytest.param("hf://a/b/c", "is not a name on the hub", id="no name of the hub"),
        pytest.param("file://x/y", "names a host", id="a host"),
        pytest.param("s3://a/b", "cannot be read here", id="another scheme"),
    ],
)
def test_a_place_that_is_unclear_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, reason: str
) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "org" / "both").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FineTuneError, match=reason):
        place_of(given, "--data")


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        pytest.param("./both", "file://./both", id="a path"),
        pytest.param("both/", "file://./both", id="a folder"),
        pytest.param("file://./both", "file://./both", id="a URI"),
        pytest.param("rows.jsonl", "file://./rows.jsonl", id="a file of rows"),
        pytest.param("org/model", "hf://org/model", id="a name on the hub"),
        pytest.param("hf://both", "hf://both", id="a URI of the hub"),
    ],
)
def test_a_place_becomes_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, uri: str
) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert place_of(given, "--data").uri(Path()) == uri
