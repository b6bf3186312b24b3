"""A tiny Qwen2.5-VL of Transformers, with weights made here, gives each document in a pack the logits that it has
alone: by segments, by positions and by ``cu_seqlens``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock import Loader, Packs

transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

IMAGE, VOCABULARY, CAPACITY = 90, 96, 40
GRIDS = [[(1, 4, 4)], [], [(1, 4, 6), (1, 4, 4)], [(1, 6, 4)], [], [], [(1, 4, 4)]]
TEXT = [5, 9, 4, 3, 40, 1, 7]
PATCH = 3 * 2 * 2 * 2
DECLARED: dict[str, Any] = {
    "pixel_values": torch.empty(0, PATCH),
    "image_grid_thw": torch.empty(0, 3, dtype=torch.int64),
}


def varlen(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float,
    cu_seq_lens_q: Any,
    max_length_q: int,
    **_: Any,
) -> Any:
    """Attention of variable length as flash-attn defines it, in plain torch: the batch is one row of places, cut at the
    borders."""
    heads, (batch, _, length, _) = query.shape[1], query.shape
    groups = heads // key.shape[1]
    flat = [
        one.transpose(0, 1).reshape(one.shape[1], -1, one.shape[-1]).repeat_interleave(many, 0)
        for one, many in ((query, 1), (key, groups), (value, groups))
    ]
    out = torch.full_like(flat[0], float("nan"))  # what belongs to no sequence is never written
    for begin, end in zip(cu_seq_lens_q.tolist(), cu_seq_lens_q[1:].tolist(), strict=False):
        assert end - begin <= max_length_q
        parts = [one[:, begin:end] for one in flat]
        out[:, begin:end] = scaled_dot_product_attention(*parts, is_causal=True, scale=scaling)
    return out.reshape(heads, batch, length, -1).permute(1, 2, 0, 3), None


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    transformers.AttentionInterface.register("varlen in torch", varlen)
    text = {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        **{
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        **{"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256},
    }
    vision = {
        **{
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 2,
        },
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1]},
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=91
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on products as small as these, more of them mostly wait
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield transformers.Qwen2_5_VLForConditionalGeneration(config).eval().double()
    torch.set_num_threads(threads)


class Chats:
    """Texts with pictures between the words, as the processor of Qwen makes them, with their positions: for the mask,
    in time, height and width."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.rows = rows

    def __len__(self) -> int:
        return len(GRIDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        words = [rng.integers(3, 80, TEXT[index])]
        for picture in GRIDS[index]:
            words += [np.full(np.prod(picture) // 4, IMAGE), rng.integers(3, 80, 1)]
        input_ids = torch.from_numpy(np.concatenate(words))
        sample = {"input_ids": input_ids, "labels": input_ids.clone()}
        if GRIDS[index]:
            grid = torch.tensor(GRIDS[index])
            pixels = rng.normal(size=(int(grid.prod(1).sum()), PATCH)).astype(np.float32)
            sample |= {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": grid}
        positions, _ = self.model.model.get_rope_index(
            input_ids[None], (input_ids[None] == IMAGE).int(), image_grid_thw=sample.get("image_grid_thw")
        )
        whole = torch.cat([torch.arange(len(input_ids))[None], positions[:, 0]])
        return {**sample, "position_ids": whole[4 - self.rows :]}


def pictures(batch: dict[str, Any]) -> dict[str, Any]:
    """The pictures as the model wants them: none at all, if there are none."""
    return {name: batch[name] for name in DECLARED} if len(batch["image_grid_thw"]) else {}


def by_segments(batch: dict[str, Any]) -> dict[str, Any]:
    segments = batch["segment_ids"]
    mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
    return {"attention_mask": mask}


def by_borders(batch: dict[str, Any]) -> dict[str, Any]:
    borders, longest = batch["cu_seqlens"], batch["max_seqlen"]
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


WAYS: dict[str, Any] = {
    "a mask of segments": (3, by_segments, "sdpa"),
    "positions of 4 rows": (4, lambda batch: {}, "sdpa"),
    "cu_seqlens": (3, by_borders, "varlen in torch"),
}


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Any]:
    """The logits of each document, without a pack."""
    model.set_attn_implementation("sdpa")
    found = []
    for chat in (Chats(model, 3)[index] for index in range(len(GRIDS))):
        media = pictures({"image_grid_thw": (), **chat})
        with torch.no_grad():
            found.append(model(chat["input_ids"][None], position_ids=chat["position_ids"][:, None], **media).logits[0])
    return found


@pytest.mark.parametrize(
    ("way", "batch_size"), [*((way, 1) for way in WAYS), ("cu_seqlens", 3), ("positions of 4 rows", 3)]
)
def test_a_document_in_a_pack_has_the_logits_that_it_has_alone(
    model: Any, alone: list[Any], way: str, batch_size: int
) -> None:
    """With and without pictures, and gradients are finite. Seen to fail: positions that start anew in each document; no
    mask; padding that belongs to no sequence; the pictures of one document given to the next."""
    rows, arguments, attention = WAYS[way]
    model.set_attn_implementation({"text_config": attention, "vision_config": "sdpa"})
    chats, counts = Chats(model, rows), list(map(len, GRIDS))
    packs = Packs(
        list(map(len, alone)),
        CAPACITY,
        along=DECLARED,
        also={"image_grid_thw": (counts, 2)},
        cu_seqlens=True,
        pad={"labels": -100},
    )
    seen: list[int] = []
    without = 0
    with Loader.from_dataset(chats, batch_size, groups=packs, shuffle=True, seed=2) as loader:
        for batch in loader:
            model.zero_grad()
            without += not pictures(batch)
            positions = batch["position_ids"].movedim(1, 0)
            logits = model(
                batch["input_ids"], position_ids=positions, use_cache=False, **pictures(batch), **arguments(batch)
            ).logits
            documents = iter(batch["documents"].tolist())
            for row, segments in zip(logits, batch["segment_ids"], strict=True):
                for number in range(1, int(segments.max()) + 1):
                    document = next(documents)
                    assert (row[segments == number] - alone[document]).abs().max() < 1e-5
                    seen.append(document)
            logits[batch["labels"] != -100].square().mean().backward()
            assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())
    assert sorted(seen) == list(range(len(chats)))
    assert without or batch_size > 1
