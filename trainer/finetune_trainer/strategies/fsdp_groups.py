"""Choose the groups that FSDP gathers: each decoder layer, the embedding and the head.

Called by `fsdp`. All other modules, such as the last norm, are in the root's group, which stays
gathered from the beginning of forward to the end of backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.ends import untied_embedding_and_head
from finetune_trainer.model.loss import CausalLoss, base_of


@dataclass(frozen=True)
class Groups:
    """Modules that have a group of their own, besides the root.

    Attributes:
        layers: Decoder layers in order.
        embedding: None if another module shares the weight.
        head: The last module of forward and the first of backward; None if another module shares
            the weight.
    """

    layers: tuple[nn.Module, ...]
    embedding: nn.Module | None
    head: nn.Module | None

    @property
    def in_order(self) -> list[nn.Module]:
        """All modules in the order of forward."""
        return [part for part in (self.embedding, *self.layers, self.head) if part is not None]

    def arrange(self, *, retains_weights: bool) -> None:
        """Set when the groups are gathered and resharded.

        The head stays gathered for its backward pass, which directly follows forward. The backward
        pass of an embedding needs no weight.

        Args:
            retains_weights: Whether weights stay gathered from the first micro-batch's forward to
                the last one's backward.
        """
        for part in self.in_order:
            stays_gathered = retains_weights or part is self.head
            cast(FSDPModule, part).set_reshard_after_forward(not stays_gathered, recurse=False)
        if self.embedding is not None and _is_table(self.embedding):
            cast(FSDPModule, self.embedding).set_unshard_in_backward(False)
        if self.head is not None:
            # By default torch retains the gathering buffer, as large as the weight, until the next
            # group is gathered; the head has no next group.
            self.head.register_forward_pre_hook(_unshard_early, prepend=True)
            last, head = cast(FSDPModule, self.layers[-1]), cast(FSDPModule, self.head)
            last.set_modules_to_forward_prefetch([head])


def choose_groups(module: CausalLoss) -> Groups:
    """Return the groups of a model.

    Raises:
        ConfigError: the model has no layers to shard.
    """
    base: Any = base_of(module.model)
    names = getattr(base, "_no_split_modules", None) or ()
    layers = tuple(part for part in module.model.modules() if type(part).__name__ in names)
    if not layers:
        raise ConfigError(
            "spec.strategy.type fsdp cannot find the layers of this model, which has none of its "
            "_no_split_modules; use zero3 or ddp"
        )
    return Groups(layers, *untied_embedding_and_head(base, layers))


def set_prefetch(groups: Sequence[FSDPModule], count: int) -> None:
    """Prefetch the weights of `count` groups; 0 leaves it to torch's implicit prefetch.

    By default torch gathers the next group when the host reaches it, which on a GPU is early enough
    only while the host is ahead. Each prefetched group costs the memory of its gathered weights.
    """
    if not count:
        return
    for index, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(list(groups[index + 1 : index + 1 + count]))
        earlier = groups[max(0, index - count) : index]
        group.set_modules_to_backward_prefetch(list(reversed(earlier)))


def _unshard_early(head: nn.Module, args: tuple[Any, ...]) -> None:
    """Unshard the head before FSDP's own hook, which frees the gathering buffer early."""
    cast(FSDPModule, head).unshard()


def _is_table(embedding: nn.Module) -> bool:
    """Whether the module only looks up rows; adapters also multiply by their weights."""
    owners = [part for part in embedding.modules() if part._parameters]
    return all(isinstance(part, nn.Embedding) and len(part._parameters) == 1 for part in owners)
