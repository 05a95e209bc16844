"""The models of `ftctl chat` respond as the base and the trained model of the run did."""

import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.answers import answer
from finetune_trainer.chat.conversation import Conversation
from finetune_trainer.chat.models import load
from finetune_trainer.chat.screen import Screen
from finetune_trainer.chat.settings import RunSettings
from finetune_trainer.config import ChatConfig, LoraSettings, MethodConfig, ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.export import export
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import tiny_model

QUESTION = "What is a list?"
RELEASE = Path(__file__).parents[2] / "release_0_1_0"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


def exported(config: Any, model: Any, stops: Sequence[int] = ()) -> Path:
    """Export a model; return the folder of the first format."""
    fence, tokenizer = output_fence(config), load_tokenizer(config.model)
    folder, *_ = export(
        model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print, stops=stops
    )
    return Path(folder)


def responses(trained: Path, base: ModelConfig | None, **options: Any) -> dict[str, str]:
    """Return the response of each voice to the question."""
    config = ChatConfig(trained=str(trained), base=base, parent_pid=1, **options)
    models, found = load(config, RunSettings.of_export(trained)), {}
    for voice in models.voices:
        out = io.StringIO()
        alone = type(models)([voice], models.tokenizer, models.stops)
        conversation = Conversation(alone, Screen(out), lambda: False, max_new_tokens=48)
        conversation.prepare()
        conversation.ask(QUESTION)
        found[voice.name] = out.getvalue().removeprefix(f"{voice.name}: ").removesuffix("\n")
    return found


@pytest.mark.parametrize(
    ("method", "wanted", "tokens"),
    [
        pytest.param("lora", "adapter", (), id="adapter"),
        pytest.param("lora", "adapter", ("<|tool|>",), id="adapter with added tokens"),
        pytest.param("lora", "merged", ("<|tool|>",), id="merged with added tokens"),
        pytest.param("full", "merged", (), id="full"),
        pytest.param("bf16", "adapter", (), id="adapter in bf16"),
        pytest.param("nf4", "adapter", (), id="adapter of a base in nf4"),
        pytest.param("int8", "adapter", (), id="adapter of a base in int8"),
        pytest.param("nf4", "merged", (), id="merged into a base in nf4"),
    ],
)
def test_both_models_respond_as_in_the_run(
    base: Path, tmp_path: Path, method: str, wanted: str, tokens: tuple[str, ...]
) -> None:
    config = export_config(
        base,
        tmp_path / "output",
        method="full" if method == "full" else "lora",
        format=wanted,
        precision="bf16" if method == "bf16" else "fp32",
    )
    if method in ("nf4", "int8"):
        qlora = MethodConfig(type="qlora", quantization=method, lora=LoraSettings(r=4))
        config = config.model_copy(update={"method": qlora})
    model_config = config.model.model_copy(update={"add_tokens": tokens})
    config = config.model_copy(update={"model": model_config})
    model, tokenizer = trained_model(config, strength=0.2), load_tokenizer(config.model)
    if method == "full":
        before = answer(model, tokenizer, QUESTION)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    else:
        with model.disable_adapter():
            before = answer(model, tokenizer, QUESTION)
    after = answer(model, tokenizer, QUESTION)

    folder = exported(config, model)
    found = responses(folder, ModelConfig(path=str(base)))

    assert found == {"base": clean(before), "trained": clean(after)}
    assert before != after


def clean(text: str) -> str:
    """Return a text without control characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def test_learned_stops_end_the_responses_of_an_adapter(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output")
    tokenizer = load_tokenizer(config.model)
    model = trained_model(config, strength=0.2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    [first] = model(prompt).logits[0, -1:].argmax(-1).tolist()
    own = tokenizer.eos_token_id

    folder = exported(config, model, stops=(own, first))

    models = load(
        ChatConfig(trained=str(folder), base=config.model, parent_pid=1),
        RunSettings.of_export(folder),
    )
    assert models.stops == [own, first]
    assert {*models.voices[1].ends} == {own, first}
    assert responses(folder, config.model)["trained"] == clean(tokenizer.decode([first])).strip()


def test_an_export_of_release_0_1_0_responds(tmp_path: Path) -> None:
    for name in ("run-killed", "run-finished"):  # the base is in the first
        with tarfile.open(RELEASE / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "output"
    assert RunSettings.of_export(folder) == RunSettings(precision="fp32")
    found = responses(folder, ModelConfig(path=str(tmp_path / "model")))
    assert found["base"] != found["trained"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        pytest.param(
            "adapter_model.safetensors", None, "has no adapter_model.safetensors", id="pickle"
        ),
        pytest.param("adapter_config.json", {"r": 8}, "does not fit LlamaForCausalLM", id="sizes"),
        pytest.param(
            "adapter_config.json", {"peft_type": "IA3"}, "an adapter of type IA3", id="kind"
        ),
    ],
)
def test_an_adapter_that_does_not_belong_to_the_base_is_refused(
    base: Path, tmp_path: Path, file: str, content: dict[str, Any] | None, message: str
) -> None:
    config = export_config(base, tmp_path / "output")
    folder = exported(config, trained_model(config))
    path = folder / file
    if content is None:
        path.rename(folder / "adapter_model.bin")
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(ConfigError, match=message):
        responses(folder, config.model)
