"""The lines that `ftctl run` prints load each kind of export as they are."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune_operator.cli.conclusion import outcome_of
from finetune_operator.cli.result import print_outcome
from finetune_trainer.config import Progress
from finetune_trainer.export import export
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import tiny_model

TOKENS = ("<|tool|>", "<|call|>")


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base", tied=request.param)


def printed_lines(output: Path, base: Path | None) -> str:
    """Return the lines of Python that the end of a run prints."""
    out = io.StringIO()
    print_outcome(Console(file=out, width=60), outcome_of(output, base, Progress()), chat="")
    return out.getvalue().partition("Load it with:")[2].strip()


def loaded(lines: str) -> Any:
    names: dict[str, Any] = {}
    exec(lines, names)
    return SimpleNamespace(**names)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.parametrize(
    ("method", "wanted", "tokens", "is_local"),
    [
        pytest.param("lora", "adapter", (), True, id="adapter of a folder"),
        pytest.param("lora", "adapter", (), False, id="adapter of a hub model"),
        pytest.param("lora", "adapter", TOKENS, True, id="added tokens, of a folder"),
        pytest.param("lora", "adapter", TOKENS, False, id="added tokens, of a hub model"),
        pytest.param("lora", "both", TOKENS, True, id="both"),
        pytest.param("lora", "merged", TOKENS, True, id="merged"),
        pytest.param("full", "merged", TOKENS, True, id="full"),
    ],
)
def test_printed_lines_load_the_trained_model(
    base: Path, tmp_path: Path, method: str, wanted: str, tokens: tuple[str, ...], is_local: bool
) -> None:
    config = export_config(base, tmp_path / "output", method=method, format=wanted)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"add_tokens": tokens})}
    )
    model, tokenizer = trained_model(config, strength=0.2), load_tokenizer(config.model)
    fence = output_fence(config)
    folder, *_ = export(model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print)
    got = loaded(printed_lines(Path(folder), base if is_local else None))
    assert got.tokenizer("<|tool|> it").input_ids == tokenizer("<|tool|> it").input_ids
    torch.testing.assert_close(probe_logits(got.model), probe_logits(model), rtol=0, atol=1e-4)
