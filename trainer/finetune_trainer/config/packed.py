"""A configuration as the text of one environment variable, for a service that takes no file.

JSON, zlib, base64: letters that no shell and no template touches, and a fraction of the length.
"""

import base64
import binascii
import zlib

from finetune_trainer.config.train import TrainConfig

ENV_TRAIN_CONFIG = "FINETUNE_TRAIN_CONFIG"  # a packed TrainConfig


def pack(config: TrainConfig) -> str:
    """Return the text that `unpack` takes back; Linux takes 131,071 bytes of NAME=TEXT."""
    text = config.model_dump_json(by_alias=True, exclude_none=True)
    return base64.b64encode(zlib.compress(text.encode(), level=9)).decode("ascii")


def unpack(text: str) -> TrainConfig:
    """Return the configuration in a text that `pack` made.

    Raises:
        ValueError: it is no such text.
        pydantic.ValidationError: what is in it is not a TrainConfig.
    """
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it is no packed configuration ({error})") from error
    return TrainConfig.model_validate_json(packed)
