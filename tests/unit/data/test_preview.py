"""The preview prints the rows as the trainer reads them, or the error of the run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import (
    CheckpointConfig,
    DataConfig,
    DatasetSource,
    JobRef,
    MethodConfig,
    ModelConfig,
    OutputConfig,
    TrainConfig,
    TrainingConfig,
)
from finetune_trainer.preview import main
from support.data.text_fixtures import family_tokenizer, tiny_tokenizer
from support.launch.launches import clean_environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def previewed(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    folder: Path,
    rows: str,
    *,
    rows_shown: int = 2,
    **data: Any,
) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the printed lines for a training file of this text."""
    path = folder / "rows.jsonl"
    path.write_text(rows)
    config = TrainConfig(
        job=JobRef(name="preview", uid="1"),
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            train=DatasetSource(path=str(path)), cache_dir=str(folder / "cache"), **data
        ),
        method=MethodConfig(type="full"),
        training=TrainingConfig(global_batch_size=2, epochs=1, learning_rate=1e-4),
        checkpoint=CheckpointConfig(dir=str(folder)),
        output=OutputConfig(dir=str(folder), format="merged"),
        run_dir=str(folder),
        termination_path=str(folder / "termination.json"),
    )
    config_path = folder / "config.json"
    config_path.write_text(config.to_json())
    code = main([str(config_path), "--rows", str(rows_shown)])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_shown_in_pieces_and_the_report_follows(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "Hi", "completion": "word " * count} for count in (1, 30, 2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    code, lines = previewed(capsys, model, tmp_path, text, max_seq_len=32)
    first, second, summary = lines
    assert code == 0
    assert first == {
        "index": 0,
        "where": f"{tmp_path}/rows.jsonl line 1",
        "pieces": [
            [
                ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False],
                ["word <|im_end|>", True],
                ["\n", False],
            ]
        ],
        "tokens": first["row_tokens"],
        "label_tokens": first["label_tokens"],
        "row_tokens": first["row_tokens"],
        "is_cut": False,
        "truncated": False,
        "sequences": 1,
    }
    assert (second["tokens"], second["truncated"]) == (32, True)
    assert second["row_tokens"] > 32
    assert summary["report"]["rows"] == 3
    assert summary["report"]["truncatedRows"] == 1
    assert summary["report"]["packs"] >= 1
    assert summary["total_steps"] >= 1
    [warning] = summary["warnings"]
    assert warning.startswith(f"the whole run has {summary['total_steps']} optimizer step")


def test_rows_that_a_share_holds_out_are_counted_and_not_shown(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"Question {n}?", "completion": "word"} for n in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    code, lines = previewed(capsys, model, tmp_path, text, rows_shown=20, eval_share=0.3)
    *shown, summary = lines
    assert code == 0
    assert summary["report"]["rows"] == len(shown) < 20
    assert summary["eval_report"]["rows"] == 20 - len(shown)

    code, lines = previewed(capsys, model, tmp_path, text, eval_share=1e-6)
    assert code == 65
    assert "holds out none of the 20 rows" in lines[-1]["error"]


def test_a_token_that_the_model_has_not_is_found_before_a_run(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    smaller = shutil.copytree(model, tmp_path / "smaller")
    (smaller / "config.json").write_text('{"model_type": "llama", "vocab_size": 40}')
    code, lines = previewed(capsys, smaller, tmp_path, '{"prompt": "Hi", "completion": "you"}\n')
    assert code == 78
    assert "but tokens of the model end at 39; use" in json.dumps(lines[-1])


def test_the_command_prints_the_same_without_torch(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"prompt": "Hi", "completion": f"{n}"}) + "\n" for n in range(9))
    _, expected = previewed(capsys, model, tmp_path, rows)
    shutil.rmtree(tmp_path / "cache")
    module = (sys.executable, "-X", "importtime", "-m", "finetune_trainer.preview")
    done = subprocess.run(
        [*module, str(tmp_path / "config.json"), "--rows", "2"],
        env=clean_environment(PYTHONWARNINGS="default"),
        capture_output=True,
        text=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "transformers" in imported
    assert "torch" not in imported


def test_a_row_without_labels_is_shown_as_left_out(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    mute = {"messages": [{"role": "user", "content": "Anyone?"}]}
    text = json.dumps(mute) + '\n{"prompt": "Hi", "completion": "Ho"}\n'
    _, [first, *_] = previewed(capsys, model, tmp_path, text)
    assert first["pieces"] == [[["<|im_start|>user\nAnyone?<|im_end|>\n", False]]]
    assert (first["sequences"], first["label_tokens"]) == (0, 0)


def test_a_space_that_is_learned_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    family_tokenizer("mistral-v2", "first").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    rows = '{"prompt": "Capital?", "completion": "Paris"}\n'
    _, [first, *_] = previewed(capsys, tmp_path / "model", tmp_path, rows)
    assert first["pieces"] == [[["<s>[INST] Capital? [/INST]", False], [" Paris</s>", True]]]


def test_a_turn_that_later_ones_change_is_a_sequence_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    family_tokenizer("harmony", "bytes").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    roles = ["user", "assistant"] * 2
    said = [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]
    rows = json.dumps({"messages": said}) + "\n"
    _, [first, *_] = previewed(capsys, tmp_path / "model", tmp_path, rows)
    learned = [[text for text, is_label in shown if is_label] for shown in first["pieces"]]
    header = "<|channel|>final<|message|>"
    assert learned == [[f"{header}b<|return|>"], [f"{header}d<|return|>"]]
    assert first["sequences"] == 2


def test_rows_that_write_out_special_tokens_are_counted_in_a_warning(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    rows = '{"prompt": "Hi<|im_end|>", "completion": "Ho"}\n{"prompt": "Hi", "completion": "Ho"}\n'
    _, lines = previewed(capsys, model, tmp_path, rows)
    [warning] = lines[-1]["report"]["warnings"]
    assert "1 of 2 rows write out special tokens" in warning
    _, lines = previewed(capsys, model, tmp_path, rows, allow_special_tokens=True)
    assert not lines[-1]["report"]["warnings"]


def test_columns_that_are_not_read_are_named(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "Hi", "completion": "Ho", "id": 1, "system_prompt": "Be brief."},
        {"prompt": "Hi", "completion": "Ho", "source": "hub", "history": [["a", "b"]]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    _, [*_, summary] = previewed(capsys, model, tmp_path, text)
    assert summary["unread_columns"] == ["id", "source", "history"]
    [warning] = summary["report"]["warnings"]
    assert "history in 1 of 2 rows is not read" in warning


def test_a_trainer_error_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    code, lines = previewed(capsys, model, tmp_path, '{"prompt": "Hi", "completion": }\n')
    assert code == 65
    assert lines == [
        {
            "error": f"spec.dataset.source {tmp_path}/rows.jsonl line 1 is not JSON: Expecting "
            "value at column 32; correct or delete the line"
        }
    ]


def test_a_file_that_is_no_configuration_is_an_error_in_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert main([str(path)]) == 78
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["error"].startswith(f"{path} is not a TrainConfig")
