"""Two families of `make parity-families`: one is packed, of the other each row has a sequence."""

from pathlib import Path

import pytest

from support.strategies.parity_families import compare


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_ten_steps_by_manifest_are_those_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    lines = compare(family, tmp_path, [True])
    assert len(lines) == 2, "full and LoRA"
    assert not [line for line in lines if "DIFFERS" in line]
