"""Pack a configuration into one environment variable, for a service that takes no file.

JSON, zlib, base64: characters that no shell and no template changes, and a fraction of the length.
"""

import base64
import binascii
import zlib

from finetune_trainer.config.train import TrainConfig

ENV_TRAIN_CONFIG = "FINETUNE_TRAIN_CONFIG"  # a packed TrainConfig


def pack(config: TrainConfig) -> str:
    """Return the text for `unpack`; Linux accepts 131,071 bytes of NAME=TEXT."""
    text = config.model_dump_json(by_alias=True, exclude_none=True)
    return base64.b64encode(zlib.compress(text.encode(), level=9)).decode("ascii")


def unpack(text: str) -> TrainConfig:
    """Return the configuration in a text from `pack`.

    Raises:
        ValueError: The text is not from `pack`.
        pydantic.ValidationError: The unpacked text is not a TrainConfig.
    """
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"not a packed configuration ({error})") from error
    return TrainConfig.model_validate_json(packed)
