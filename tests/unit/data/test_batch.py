"""Batches: targets never cross a document, and the real attention does not either."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_trainer.config import DataReport
from finetune_trainer.data.batch import collate, eval_batches
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.data.token_store import StoredTokens
from support.data.text_fixtures import tiny_model

PAD = 0


def dataset(*rows: tuple[list[int], list[int]]) -> TokenDataset:
    """Build a data set of (tokens, places of labels)."""
    masks = [np.isin(np.arange(len(tokens)), places) for tokens, places in rows]
    arrays = {
        "tokens": np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in rows]),
        "is_label": np.concatenate(masks),
        "lengths": np.asarray([len(tokens) for tokens, _ in rows], np.int32),
        "label_counts": np.asarray([mask.sum() for mask in masks], np.int32),
        "rows": np.arange(1, len(rows) + 1),
    }
    return TokenDataset([(StoredTokens(arrays, DataReport(), "rows"), 1.0)])


def random_rows(count: int, longest: int = 40) -> TokenDataset:
    random = np.random.default_rng(5)
    sizes = random.integers(2, longest, count, endpoint=True)
    return dataset(*((random.integers(3, 700, size).tolist(), [int(size) - 1]) for size in sizes))


THREE = dataset(([11, 12, 13], [1, 2]), ([21, 22], [1]), ([31, 32, 33, 34], [3]))


def test_targets_are_shifted_and_never_cross_documents() -> None:
    batch = collate(THREE, [(0, 1), (2,)], pad_to=None, pad_id=PAD)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22], [31, 32, 33, 34, PAD]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.targets.tolist() == [[12, 13, -100, 22, -100], [-100, -100, 34, -100, -100]]
    assert (batch.tokens, batch.label_tokens) == (9, 4)


def test_a_batch_carries_the_bounds_of_its_documents_and_the_places_of_its_labels() -> None:
    batch = collate(THREE, [(0, 1), (2,)], pad_to=None, pad_id=PAD)
    assert batch.cu_seq_lens.tolist() == [0, 3, 5, 9, 10]
    assert batch.cu_seq_lens.dtype == torch.int32
    assert batch.max_length == 4
    assert batch.label_positions.tolist() == [0, 1, 3, 7]
    assert collate(THREE, [()], pad_to=2, pad_id=PAD).cu_seq_lens.tolist() == [0, 2]


def test_padding_is_apart_and_no_longer_than_a_document_of_the_batch() -> None:
    batch = collate(THREE, [(0,)], pad_to=8, pad_id=PAD)
    assert batch.input_ids.tolist() == [[11, 12, 13, PAD, PAD, PAD, PAD, PAD]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.targets.tolist() == [[12, 13, *[-100] * 6]]


def test_an_empty_micro_batch_is_a_batch_without_labels() -> None:
    batch = collate(THREE, [(), ()], pad_to=None, pad_id=PAD)
    assert batch.input_ids.shape == (2, 2)
    assert (batch.tokens, batch.label_tokens) == (0, 0)
    assert set(batch.targets.flatten().tolist()) == {-100}


def test_a_pack_longer_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a pack of 7 tokens is longer than pad_to 6"):
        collate(THREE, [(0, 2)], pad_to=6, pad_id=PAD)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_every_row_once_over_all_ranks(world_size: int) -> None:
    rows = random_rows(400)
    batches = [
        list(eval_batches(rows, max_tokens_per_batch=200, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(mine) for mine in batches}) == 1
    seen = [batch for mine in batches for batch in mine]
    assert sum(batch.tokens for batch in seen) == rows.lengths.sum()
    assert sum(batch.label_tokens for batch in seen) == rows.label_counts.sum()
    assert all(batch.input_ids.numel() <= 200 for batch in seen)
    # Sorted by length: hardly any padding, and ranks of about equal work.
    assert sum(batch.input_ids.numel() for batch in seen) < 1.1 * rows.lengths.sum()


def test_evaluation_takes_a_row_longer_than_the_limit_alone() -> None:
    rows = random_rows(5, longest=40)
    longest = max(
        eval_batches(rows, max_tokens_per_batch=8, rank=0, world_size=1), key=lambda b: b.tokens
    )
    assert longest.input_ids.shape == (1, int(rows.lengths.max()))


@pytest.mark.parametrize("world_size", [1, 3])
def test_rounded_evaluation_has_few_shapes_and_sees_every_row_once(world_size: int) -> None:
    rows = random_rows(400)
    options: Any = {"max_tokens_per_batch": 200, "world_size": world_size, "round_to": 16}
    batches = [list(eval_batches(rows, rank=rank, **options)) for rank in range(world_size)]
    shapes = [[batch.input_ids.shape for batch in mine] for mine in batches]
    assert all(mine == shapes[0] for mine in shapes)
    assert set(shapes[0]) <= {(4, 48), (6, 32), (12, 16)}
    seen = [batch for mine in batches for batch in mine]
    assert sum(batch.tokens for batch in seen) == rows.lengths.sum()
    assert sum(batch.label_tokens for batch in seen) == rows.label_counts.sum()


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder: Path = tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=request.param).eval()


def last_document(model: Any, first_token: int, **options: Any) -> torch.Tensor:
    """Return the logits of the second document of a pack whose first begins with a token."""
    rows = dataset(([first_token, 5, 6, 7], [1]), ([8, 9, 10], [1]))
    batch = collate(rows, [(0, 1)], pad_to=10, pad_id=PAD)
    with torch.no_grad():
        output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, **options)
    logits: torch.Tensor = output.logits[0, 4:7]
    return logits


def test_a_document_does_not_see_the_one_before_it_in_its_pack(model: Any) -> None:
    changed = last_document(model, 100, use_cache=False)
    assert torch.equal(last_document(model, 200, use_cache=False), changed)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_cache": True}, id="with the cache"),
        pytest.param(
            {"use_cache": False, "attention_mask": torch.ones(1, 10, dtype=torch.long)},
            id="with a mask of ones",
        ),
    ],
)
def test_documents_leak_when_the_model_is_called_the_usual_way(
    model: Any, options: dict[str, Any]
) -> None:
    # The reason for the rule that `collate` states: should this fail, the rule can go.
    difference = last_document(model, 100, **options) - last_document(model, 200, **options)
    assert difference.abs().max() > 1e-3


def test_a_pack_gives_the_loss_of_its_documents_one_by_one(model: Any) -> None:
    rows = random_rows(6)

    def loss(packs: list[tuple[int, ...]]) -> float:
        total = 0.0
        for pack in packs:
            batch = collate(rows, [pack], pad_to=None, pad_id=PAD)
            with torch.no_grad():
                logits = model(
                    input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
                ).logits
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
            ).item()
        return total

    assert loss([(0, 1, 2), (3, 4, 5)]) == pytest.approx(
        loss([(index,) for index in range(6)]), rel=1e-5
    )
