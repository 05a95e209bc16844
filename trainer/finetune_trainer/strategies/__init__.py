"""How ranks share one model; each engine is named in one file here and nowhere else."""

from finetune_trainer.config import TrainConfig
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World


def create(config: TrainConfig, world: World) -> Strategy:
    """Return the strategy `config` asks for; its engine is imported only now."""
    from finetune_trainer.strategies.ddp import DdpStrategy

    engines: dict[str, type[Strategy]] = {"ddp": DdpStrategy}
    return engines[config.strategy.type](config, world)
