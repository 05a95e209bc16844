"""A data folder is one set of rows, or is refused with the names of its files."""

from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DataFormat, DatasetSource
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.run_data import prepare_run
from finetune_trainer.data.sequences import prepare
from finetune_trainer.data.source import FileRows, open_rows
from finetune_trainer.errors import DataError
from support.data.text_fixtures import tiny_tokenizer

ROW = '{"text": "a"}\n'
PRETTY = '{\n  "text": "a"\n}\n'


def files_of(
    folder: Path, files: dict[str, str], rules: Rules = Rules.CURRENT, name: str = "train"
) -> list[str]:
    """Write files by relative path, open the folder and return the files that are read."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    source = DatasetSource(path=str(folder))
    rows = open_rows(source, name=name, cache_dir=folder.parent / "cache", rules=rules)
    assert isinstance(rows, FileRows)
    return [file.name for file in rows.files]


def refusal(folder: Path, files: dict[str, str], name: str = "train") -> str:
    """Return the sentence for a new run; the rules of the release read the folder."""
    with pytest.raises(DataError) as error:
        files_of(folder, files, name=name)
    assert files_of(folder, {}, Rules.RELEASE_0_1_0)
    return str(error.value)


def rows_in(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, ROW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["part-0.jsonl", "part-1.jsonl"], id="shards"),
        pytest.param(["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], id="train"),
        pytest.param(["train.jsonl", "more.jsonl"], id="train and more"),
        pytest.param(["train_sft.jsonl", "trainset.json"], id="two names of train"),
        pytest.param(["test-0.jsonl", "eval-0.jsonl"], id="test only"),
        pytest.param(["dev.jsonl", "valid.jsonl"], id="validation only"),
        pytest.param(["llm-eval-train.jsonl", "contest.jsonl", "latest.csv"], id="other words"),
        pytest.param(["0001.json", "0002.json"], id="a row in each file"),
    ],
)
def test_files_of_one_split_are_read_together(folder: Path, names: list[str]) -> None:
    assert files_of(folder, rows_in(*names)) == sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        ["test.jsonl", "train.jsonl"],
        ["dev.csv", "train.csv"],
        ["Train.jsonl", "Valid.jsonl"],
        ["eval.json.gz", "training.jsonl"],
        ["part-0.jsonl", "test.jsonl"],
        ["my_testset.jsonl", "my_trainset.jsonl"],
        ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"],
        ["test_sft.jsonl", "train_sft.jsonl"],
        ["test.jsonl", "validation.jsonl"],
        ["heldout.jsonl", "rows.jsonl"],
    ],
    ids=" ".join,
)
def test_files_of_several_splits_are_refused_by_name(folder: Path, names: list[str]) -> None:
    sentence = refusal(folder, rows_in(*names))
    assert sentence == (
        f"spec.dataset.source {folder} holds several splits ({'; '.join(names)}), which would be "
        "read as one or not at all; name the file or the folder of a single split in "
        "spec.dataset.source, and held-out rows in spec.dataset.evalSource"
    )


def test_many_shards_are_named_by_the_first_of_each_split(folder: Path) -> None:
    names = [f"{split}-{number}.jsonl" for split in ("test", "train") for number in range(9)]
    sentence = refusal(folder, rows_in(*names))
    assert "(test-0.jsonl, test-1.jsonl, test-2.jsonl and 6 more; train-0.jsonl, " in sentence


@pytest.mark.parametrize(
    ("name", "field"),
    [("eval", "spec.dataset.evalSource"), ("also[0]", "spec.dataset.also[0].source")],
)
def test_the_refusal_names_the_field_of_the_source(folder: Path, name: str, field: str) -> None:
    sentence = refusal(folder, rows_in("test.jsonl", "train.jsonl"), name)
    assert sentence.startswith(f"{field} {folder} holds several splits")
    assert f"of a single split in {field}" in sentence


def test_a_folder_of_the_training_split_beside_files_is_refused(folder: Path) -> None:
    names = rows_in("test.jsonl", "train/part-0.jsonl")
    assert "(test.jsonl; train/)" in refusal(folder, names)
    assert files_of(folder, {}, name="eval") == ["test.jsonl"]


def test_other_folders_beside_files_are_not_read(folder: Path) -> None:
    names = rows_in("train.jsonl", "test/part-0.jsonl", "runs/metrics.jsonl")
    assert files_of(folder, names) == ["train.jsonl"]


def test_rows_may_be_in_a_file_named_metadata(folder: Path) -> None:
    assert files_of(folder, rows_in("metadata.jsonl")) == ["metadata.jsonl"]


@pytest.mark.parametrize(
    "name",
    ["held_out", "hold-out", "tests", "evals", "evaluate", "validate", "testA", "myTest"],
)
def test_other_spellings_of_held_out_files_are_splits(folder: Path, name: str) -> None:
    assert "several splits" in refusal(folder, rows_in("train.jsonl", f"{name}.jsonl"))


def test_the_folders_of_the_splits_are_named_of_a_folder_without_files(folder: Path) -> None:
    with pytest.raises(DataError, match=r"file itself, only test/, train/ does; name the folder"):
        files_of(folder, rows_in("train/0.jsonl", "test/0.jsonl", "docs/README.md"))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        pytest.param({"metadata.json": ROW, "rows.jsonl": ROW}, "metadata.json", id="metadata"),
        pytest.param({"dataset_infos.json": ROW}, "dataset_infos.json", id="alone"),
        pytest.param({"metadata.jsonl": ROW, "0.jsonl": ROW}, "metadata.jsonl", id="lines"),
        pytest.param({"0001.json": ROW, "metadata.json": ROW}, "metadata.json", id="all objects"),
        pytest.param({"config.json": PRETTY, "rows.jsonl": ROW}, "config.json", id="config"),
        pytest.param({"stats.json": ROW, "rows.csv": "text\na\n"}, "stats.json", id="one line"),
        pytest.param({"a.json": f"[{ROW}]", "info.json": "\n" + PRETTY}, "info.json", id="array"),
    ],
)
def test_files_that_hold_no_rows_are_refused(
    folder: Path, files: dict[str, str], named: str
) -> None:
    sentence = refusal(folder, files)
    assert sentence == (
        f"spec.dataset.source {folder} has files that do not hold rows ({named}); delete them, or "
        "name one file of rows, or a folder without other files, in spec.dataset.source"
    )


def test_lines_in_a_json_file_are_rows(folder: Path) -> None:
    files = {"lines.json": ROW * 2, "array.json": f"[{ROW}]", "rows.jsonl": ROW}
    assert files_of(folder, files) == ["array.json", "lines.json", "rows.jsonl"]


def test_a_malformed_json_file_keeps_its_own_sentence(folder: Path) -> None:
    files: dict[str, Any] = {"lines.json": '{"text": }\n' + ROW, "rows.jsonl": ROW}
    assert files_of(folder, files) == ["lines.json", "rows.jsonl"]


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_folder_of_save_to_disk_is_refused(folder: Path, is_dict: bool) -> None:
    import datasets

    saved: Any = datasets.Dataset.from_list([{"text": "a"}])
    if is_dict:
        saved = datasets.DatasetDict(train=saved)
    saved.save_to_disk(str(folder))
    sentence = refusal(folder, {})
    names = (
        "dataset_dict.json"
        if is_dict
        else "dataset_info.json, state.json, data-00000-of-00001.arrow"
    )
    assert sentence == (
        f"spec.dataset.source {folder} was written by save_to_disk ({names}), whose files cannot "
        "be read; write each split with datasets.load_from_disk and to_json, and name the file of "
        "one split in spec.dataset.source"
    )


def test_a_run_with_a_checkpoint_reads_the_folder_as_before(folder: Path, tmp_path: Path) -> None:
    files_of(folder, rows_in("test.jsonl", "train.jsonl"), Rules.RELEASE_0_1_0)
    data = DataConfig(
        train=DatasetSource(path=str(folder)), cache_dir=str(tmp_path), format=DataFormat.TEXT
    )
    tokenizer = tiny_tokenizer(tmp_path)
    before = prepare(data, data.sources, tokenizer, rules=Rules.RELEASE_0_1_0)
    warnings: list[str] = []
    found = prepare_run(data, lambda rules: tokenizer, before.fingerprint, warnings.append)
    assert (found.train.fingerprint, found.rules) == (before.fingerprint, Rules.RELEASE_0_1_0)
    [warning] = warnings
    assert "holds several splits (test.jsonl; train.jsonl)" in warning
    assert "but a new run would not" in warning
