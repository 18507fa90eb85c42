"""Attention by segments equals attention under the dense block mask, and refuses what it would compute wrongly."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tasks.learner.model import Segments, packed_attention

pytestmark = pytest.mark.engine

# The last two are computed together, and the shorter one is padded.
BORDERS = (0, 3, 4, 10, 17)


def states(kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, BORDERS[-1], 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]


def segments():
    return Segments(BORDERS, torch.tensor(BORDERS, dtype=torch.int32))


def call(**changes):
    query, key, value = states()
    arguments = {"scaling": 0.3, "segments": segments(), "attention_mask": None} | changes
    return packed_attention(torch.nn.Identity(), query, key, value, **arguments)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_dense_mask(kv_heads):
    query, key, value = states(kv_heads)
    segment = torch.tensor([0] * 3 + [1] + [2] * 6 + [3] * 7)
    position = torch.arange(17)
    allowed = (segment[:, None] == segment[None]) & (position[:, None] >= position[None])
    dense = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=0.3, enable_gqa=True)
    ours, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3, segments=segments())
    torch.testing.assert_close(ours, dense.transpose(1, 2), rtol=0, atol=1e-14)
    weights = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((dense.transpose(1, 2) * weights).sum(), (query, key, value))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": None}, "no segment borders"),
        ({"attention_mask": torch.ones(1, 17)}, "got a mask"),
        ({"segments": Segments((0, 4), torch.tensor((0, 4)))}, "one row of 4 tokens"),
        ({"sliding_window": 6}, "sliding window"),
        ({"dropout": 0.1}, "no dropout"),
        ({"softcap": 50.0}, "soft cap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
    ],
)
def test_fails_closed(changes, message):
    call()
    call(sliding_window=7)
    with pytest.raises(ValueError, match=message):
        call(**changes)
