"""Check a model by its class and configuration, before weights or rows are read.

Called by `rank` first. A model that cannot be trained on text is refused here; packing is turned
off for a model that is known not to separate the documents of a pack. `isolation` measures the
others.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.load import load_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families that need other inputs besides token ids, or do not predict the next token.
_NOT_TEXT_ALONE = {
    "blt": "reads bytes, cut into patches by a second model",
    "cpmant": "attends to all of its input at once",
    "gemma4_assistant": "drafts for another model, whose states it needs",
    "gemma4_unified_assistant": "drafts for another model, whose states it needs",
    "moshi": "generates speech and text at the same time",
    "moss_transcribe_diarize": "transcribes speech",
    "musicgen": "continues audio codes, several per step",
    "musicgen_melody": "continues audio codes, several per step",
    "reformer": "numbers tokens on a grid that each row must fill",
    "rwkv": "cannot be trained without a kernel of its own",
    "trocr": "reads images through a separate encoder",
    "xmod": "needs the language of each row",
    "xlnet": "predicts tokens in any order, with context on both sides",
}
# Packages that a family needs.
_PACKAGES = {"gemma3n": "timm"}
# Families that attend to later tokens unless their configuration says otherwise: encoders.
ENCODERS = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)
# Layers that read a single token, or the tokens that a mask admits. All others mix documents: they
# carry a state, select tokens or combine neighbouring tokens beyond the end of a document.
_MASKED_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
)


def resolve_packing(config: TrainConfig, warn: Callable[[str], None]) -> TrainConfig:
    """Return the configuration, without packing if this model does not allow it.

    Raises:
        ConfigError: the model cannot be trained, or not with the requested settings.
    """
    settings = load_settings(config.model)
    _refuse(config, settings)
    fault = _packing_fault(config, settings) if config.data.packing else None
    return config if fault is None else without_packing(config, fault, warn)


def without_packing(config: TrainConfig, fault: str, warn: Callable[[str], None]) -> TrainConfig:
    """Turn packing off and warn; `fault` is the reason.

    Raises:
        ConfigError: the job requests packing.
    """
    if config.data.is_packing_asked:
        raise ConfigError(f"spec.training.packing true: {fault}; set it to false, or remove it")
    warn(
        f"rows are not packed: {fault}. Each row is a sequence of its own, and "
        "spec.training.globalBatchSize counts rows; set spec.training.packing to false to silence "
        "this warning"
    )
    data = config.data.model_copy(update={"packing": False})
    return config.model_copy(update={"data": data})


def takes_positions(model_class: type) -> bool:
    """Whether the model's forward takes positions, which mark the start of documents."""
    names = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "position_ids" in names or "input_ids" not in names  # forward passes on all arguments


def _class_of(settings: "PretrainedConfig") -> Any:
    """Return the class of causal language model for these settings, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)


def _refuse(config: TrainConfig, settings: "PretrainedConfig") -> None:
    kind = settings.model_type
    field = f"spec.model.source {config.model.path} is of the family {kind}"
    if _class_of(settings) is None:
        raise ConfigError(
            f"{field}, for which transformers has no causal language model; use a decoder-only "
            "model"
        )
    if settings.is_encoder_decoder:
        raise ConfigError(
            f"{field}, an encoder-decoder model, whose decoder alone cannot continue text; use a "
            "decoder-only model"
        )
    if kind in _NOT_TEXT_ALONE:
        raise ConfigError(
            f"{field}, which {_NOT_TEXT_ALONE[kind]}; use a model that continues text alone"
        )
    if kind in _PACKAGES and find_spec(_PACKAGES[kind]) is None:
        raise ConfigError(f"{field}, which needs the package {_PACKAGES[kind]}; install it")
    text = settings.get_text_config()
    if setting := _attends_to_later(settings):
        raise ConfigError(
            f"{field}, and its config.json has {setting}: attention is not causal; use a "
            "decoder-only model, or its config.json"
        )
    if getattr(text, "output_router_logits", False):
        raise ConfigError(
            f"{field}, and its config.json has output_router_logits true: the router's own loss is "
            "not computed, because it is not a sum over micro-batches and ranks; set it to false"
        )
    _refuse_rotary(config, text)


def _attends_to_later(settings: "PretrainedConfig") -> str:
    """Return the setting that makes attention non-causal; empty if there is none."""
    text = settings.get_text_config()
    if settings.model_type in ENCODERS and not settings.is_decoder:
        return "is_decoder false"
    if settings.model_type == "xlm" and not settings.causal:
        return "causal false"
    if not getattr(text, "is_causal", True):
        return "is_causal false"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "use_bidirectional_attention"
    return ""


def _packing_fault(config: TrainConfig, settings: "PretrainedConfig") -> str | None:
    """Return why rows cannot share a sequence; None if no reason is known yet."""
    model_class, text = _class_of(settings), settings.get_text_config()
    name = model_class.__name__
    kinds = set(getattr(text, "layer_types", None) or ()) - _MASKED_LAYERS
    if model_class._is_stateful or kinds:
        what = f"layers ({', '.join(sorted(kinds))})" if kinds else "layers"
        return f"{name} has {what} that reach across the end of a document"
    if not takes_positions(model_class):
        return f"{name} takes no positions, which mark the start of documents"
    for form in _rotary(text):
        if form["rope_type"] == "longrope" and config.data.max_seq_len > _known(form, text):
            return (
                f"beyond {_known(form, text)} tokens the rotary scaling of {name} follows the "
                f"longest document (spec.training.maxSeqLength {config.data.max_seq_len})"
            )
    return None


def _refuse_rotary(config: TrainConfig, text: "PretrainedConfig") -> None:
    """Refuse rotary scaling that would make a row depend on others, packed or not."""
    longest = config.data.max_seq_len
    for form in _rotary(text):
        kind, known = form["rope_type"], _known(form, text)
        if longest <= known:
            continue
        field = f"spec.training.maxSeqLength {longest} exceeds {known}, above which"
        if "dynamic" in kind:
            raise ConfigError(
                f"{field} the model's rotary scaling ({kind}) depends on the longest row so far; "
                f"lower it to {known}"
            )
        if kind == "longrope" and config.training.micro_batch_size > 1:
            raise ConfigError(
                f"{field} the model's rotary scaling (longrope) depends on the longest row of a "
                f"micro-batch; lower it to {known}, or set spec.training.microBatchSize to 1"
            )


def can_be_sharded(settings: "PretrainedConfig") -> bool:
    """Whether FSDP finds the layers of the model, which its class names."""
    return bool(getattr(_class_of(settings), "_no_split_modules", None))


def needs_single_rows(config: TrainConfig, settings: "PretrainedConfig") -> bool:
    """Whether a row would depend on the others of its micro-batch, packed or not."""
    text = settings.get_text_config()
    return any(
        form["rope_type"] == "longrope" and config.data.max_seq_len > _known(form, text)
        for form in _rotary(text)
    )


def _rotary(text: "PretrainedConfig") -> Iterator[Mapping[str, Any]]:
    """Yield the forms of rotary positions: a single form, or one per kind of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    for form in [found, *(value for value in found.values() if isinstance(value, dict))]:
        if "rope_type" in form:
            yield form


def _known(form: Mapping[str, Any], text: "PretrainedConfig") -> int:
    """Return the length up to which scaling does not depend on the row."""
    lengths = (
        form.get("original_max_position_embeddings"),
        getattr(text, "original_max_position_embeddings", None),
        getattr(text, "max_position_embeddings", None),
    )
    return min((length for length in lengths if length), default=0)
