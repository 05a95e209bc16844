"""Write tiny models whose files are quantised in the formats of published models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = 128  # both sides of a block of fp8 with one scale


def write_fp8(folder: Path, plain: str = "lm_head") -> dict[str, Tensor]:
    """Replace linear weights by fp8 and scales, as DeepSeek-V3 has them; return exact values.

    Weights with `plain` in their name stay in bfloat16.
    """
    stored, exact = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in ("embed", "lm_head", plain)):
            stored[name] = tensor.bfloat16()
            exact[name] = stored[name].float()
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scales = torch.full((rows, columns), 2.0**-9)
        stored[name] = (tensor * 2**9).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".weight_scale_inv")] = scales
        exact[name] = stored[name].float() * 2.0**-9
    settings = {"weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write(folder, stored, {"quant_method": "fp8", **settings})
    return exact


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Replace the experts by random blocks of mxfp4, as gpt-oss has them; return exact values."""
    stored, exact = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor.bfloat16()
            exact[name] = stored[name].float()
            continue
        experts, width, out = tensor.shape
        shape = (experts, out, width // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator)
        scales = torch.randint(116, 121, shape, generator=generator)
        stored[f"{name}_blocks"] = blocks.to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = torch.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], -1).flatten(-2)
        exact[name] = (numbers * torch.exp2(scales[..., None] - 127)).flatten(-2).mT
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    settings = {"modules_to_not_convert": [*names, "model.embed_tokens", "lm_head"]}
    _write(folder, stored, {"quant_method": "mxfp4", **settings})
    return exact


def _write(folder: Path, stored: dict[str, Tensor], quantization: dict[str, object]) -> None:
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(settings))
