"""Every causal family of transformers learns what it would alone, or is refused before weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.families import ENCODERS, resolve_packing
from finetune_trainer.model.isolation import check_isolation
from finetune_trainer.model.load import load_model
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from support.launch.launches import train_config
from support.model.every_family import (
    FAMILIES,
    NAMES,
    PADDED,
    PADDED_DECODERS,
    REFUSED,
    alone,
    gradient,
    tiny_model,
    tiny_settings,
    write_settings,
)
from support.model.model_families import isolate, joined, pack, sequences
from support.strategies import parity_families


def test_the_corpus_has_every_family_of_the_installed_transformers() -> None:
    assert sorted([*FAMILIES["packed"], *PADDED, *REFUSED]) == NAMES
    assert transformers.__version__.startswith(f"{FAMILIES['transformers']}.")
    assert FAMILIES["compared"] == list(parity_families.FAMILIES)


CPU = torch.device("cpu")
LENGTHS = (9, 4, 7)


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(name, {}, id=name) for name in NAMES]
    + [
        pytest.param(name, {"is_decoder": True}, id=f"{name}, a decoder")
        for name in sorted(ENCODERS)
    ],
)
def test_a_family_learns_as_alone_or_is_refused_by_its_configuration(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = tiny_settings(name, **changes)
    path = str(write_settings(settings, tmp_path))
    config = train_config(tmp_path, model={"path": path}, data={"max_seq_len": 32})
    said: list[str] = []
    if name in REFUSED and not changes:
        wanted = rf"^spec.model.source .* the family {name}, .*{re.escape(REFUSED[name])}.*; "
        with pytest.raises(ConfigError, match=wanted):
            resolve_packing(config, said.append)
        return
    config = resolve_packing(config, said.append)
    model = tiny_model(settings)
    batch = pack([LENGTHS])
    documents = sequences(batch, LENGTHS)
    expected = alone(model, [d[0] for d in documents], [d[2] for d in documents])

    isolate(model, torch.float32)
    module = CausalLoss(model)

    def evaluate(inputs):
        with torch.no_grad():
            return module(**inputs)

    config = check_isolation(
        config, module, evaluate, device=CPU, any_rank=lambda vote: vote, warn=said.append
    )
    padded = PADDED_DECODERS if changes else PADDED
    assert (config.data.packing, len(said)) == ((False, 1) if name in padded else (True, 0))
    assert changes or PADDED.get(name, "") in "".join(said)
    in_rows = joined(batch, [[document] for document in documents])
    for made in [batch, in_rows] if config.data.packing else [in_rows]:
        module.zero_grad()
        loss = module(**loss_inputs(made, CPU))
        loss.backward()
        assert loss.item() == pytest.approx(expected[0], rel=1e-5)
        assert (gradient(model) - expected[1]).norm() / expected[1].norm() <= 1e-4


# What their classes for text alone do not load is of a larger model.
NOT_BY_ITSELF = {"emu3", "mllama"}


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in NAMES if n not in {*REFUSED, *NOT_BY_ITSELF}])
def test_what_a_family_saves_is_not_refused_as_incomplete(name: str, tmp_path: Path) -> None:
    tiny_model(tiny_settings(name)).save_pretrained(tmp_path)
    config = train_config(tmp_path, model={"path": str(tmp_path)}, data={"max_seq_len": 32})
    assert load_model(config, CPU).get_input_embeddings() is not None
