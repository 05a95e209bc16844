"""A tokenizer and a two-layer model that tests build offline, in about a second.

The tokenizer is a byte-level BPE trained on the standard library's own documentation, with a
ChatML-like template that has no `{% generation %}` marks, as most real templates have none.
"""

import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from support.data.published_templates import FAMILIES

VOCAB_SIZE = 768
END_OF_TURN = "<|im_end|>"

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(folder: Path, *, template: str | None = CHATML_TEMPLATE) -> Any:
    """Save the tokenizer into `folder` and return it as `AutoTokenizer` reads it from there.

    `template=None` gives a tokenizer without a chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(_trained_bpe()),
        eos_token=END_OF_TURN,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=2048,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def save_tokenizer(folder: Path, class_name: str, pre_tokenizer: Any) -> None:
    """Save a byte-level tokenizer as a model of the hub has it: `tokenizer.json` and its class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the river of France in 2024, it isn't wide"] * 50, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": class_name, "eos_token": "<|endoftext|>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny_model(
    folder: Path,
    *,
    template: str | None = CHATML_TEMPLATE,
    seed: int = 0,
    tied: bool = False,
    hidden_size: int = 64,
) -> Path:
    """Save a random two-layer Llama with its tokenizer into `folder`; return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(folder, template=template)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


# How tokenizers put a space before a text: none (bytes), before the first part, before each, never,
# and before each by a normalizer, as those that sentencepiece's were converted to at first.
TOKENIZERS = ("bytes", "first", "always", "never", "prepend")


def family_tokenizer(family: str, kind: str) -> Any:
    """Return a tokenizer of one of `TOKENIZERS` with the template and tokens of a family."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    source = _trained_bpe().read_text() if kind == "bytes" else _metaspace(kind)
    given = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(source),
        bos_token=given.bos,
        eos_token=given.eos or given.stop,
        unk_token="<unk>",
        additional_special_tokens=list(given.special),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in given.added])
    tokenizer.chat_template = given.template
    return tokenizer


@cache
def _metaspace(scheme: str) -> str:
    """Return a tokenizer as sentencepiece makes them: words begin with a mark for their space."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    prepended = "always" if scheme == "prepend" else scheme
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepended)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepended)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[chr(code) for code in range(32, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)][:40], trainer)
    made = json.loads(tokenizer.to_str())
    known = made["model"]["vocab"]
    known |= {f"<0x{byte:02X}>": len(known) + byte for byte in range(256)}
    made["model"] |= {"byte_fallback": True, "fuse_unk": True}
    if scheme == "prepend":
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        parts = [{"type": "Prepend", "prepend": "▁"}, spaces]
        made |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": parts}}
    return json.dumps(made)


@cache
def _trained_bpe() -> Path:
    """Train once a machine: several test processes share the file, named by what made it."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256(f"{VOCAB_SIZE}{corpus}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"finetune-test-bpe-{os.getuid()}-{digest}.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<|endoftext|>", "<|im_start|>", END_OF_TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        tokenizer.save(str(draft))
        draft.replace(path)
    return path
