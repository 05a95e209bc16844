"""A run with tokens that its model has not ends before the model is loaded, and is not repeated."""

from pathlib import Path

from finetune_trainer.config import ExitCode, ModelConfig
from finetune_trainer.model.load import load_tokenizer
from support.data.text_fixtures import CHATML_TEMPLATE, VOCAB_SIZE
from support.launch.forked_ranks import Ranks
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs


def test_a_template_with_a_token_that_the_model_lacks_is_a_mistake_of_the_manifest(
    tmp_path: Path,
) -> None:
    model = write_inputs(tmp_path) / "model"
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    turns = [f"<|turn {number}|>" for number in range(VOCAB_SIZE)]
    tokenizer.add_tokens(turns, special_tokens=True)
    tokenizer.save_pretrained(model)
    template = CHATML_TEMPLATE.replace("<|im_start|>", turns[-1])
    config = train_config(
        tmp_path,
        model={"path": str(model), "chat_template": template},
        data={"max_seq_len": 64},
    )
    ranks = Ranks(config)
    assert ranks.codes() == [ExitCode.CONFIG] * 2
    assert f" of spec.dataset.source has the token '{turns[-1]}'" in ranks.termination().message
    assert not list((tmp_path / "checkpoints").glob("step-*"))
