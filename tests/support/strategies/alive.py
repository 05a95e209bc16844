"""Count the bytes of new tensors, in a model of many small layers."""

from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Alive(TorchDispatchMode):
    """The most bytes that new storages took at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._storages: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if type(one) is torch.Tensor and one.device.type == "cpu":
                self._storages.add(one.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self._storages))
        return result


def deep_model(folder: Path) -> Path:
    """Save a model of many small layers, so that one weight is little of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(settings).save_pretrained(folder)
    return folder
