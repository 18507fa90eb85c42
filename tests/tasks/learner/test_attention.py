"""Attention by segments and by torch's kernel is that under the dense block mask; what would be wrong is refused."""

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from tasks.learner.attention import Segments, activate_attention, largest_difference, packed_attention
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.protocol import LearnerError
from tests.fixtures.policies import CPU, assert_near, attention_states
from tests.fixtures.varlen import varlen_on_cpu

pytestmark = pytest.mark.engine

# The last two are computed together, and the shorter one is padded.
BORDERS = (0, 3, 4, 10, 17)


SEGMENTS = Segments(BORDERS, CPU)


def call(leaves, **changes):
    arguments = {"scaling": 0.3, "segments": SEGMENTS, "attention_mask": None} | changes
    return packed_attention(torch.nn.Identity(), *leaves, **arguments)[0]


def dense_mask(window=17):
    segment = torch.tensor([0] * 3 + [1] + [2] * 6 + [3] * 7)
    before = torch.arange(17)[:, None] - torch.arange(17)
    return (segment[:, None] == segment[None]) & (before >= 0) & (before < window)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 7])
def test_equals_the_dense_mask(kv_heads, window, kernel):
    leaves = query, key, value = attention_states(kv_heads)
    allowed = dense_mask(window or 17)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=0.3, enable_gqa=True)
    ours = call(leaves, sliding_window=window)
    assert_near(ours, dense.transpose(1, 2), 1e-14)
    assert kernel in (None, [7]), "one call for the whole row, which names the longest segment"
    weights = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weights).sum(), leaves)
    theirs = torch.autograd.grad((dense.transpose(1, 2) * weights).sum(), leaves)
    assert_near(mine, theirs, 1e-13)


@pytest.mark.parametrize("window", [17, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_soft_caps_and_sinks_are_those_of_the_formula(window, softcap, sinks):
    leaves = query, key, value = attention_states()
    s_aux = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True) if sinks else None
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1)) * 0.3
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    weights = scores.exp() * dense_mask(window)
    total = weights.sum(-1, keepdim=True) + (s_aux.exp()[:, None, None] if sinks else 0)
    dense = torch.einsum("bhqk,bhkd->bqhd", weights / total, value.repeat_interleave(2, 1))
    ours = call(leaves, sliding_window=window, softcap=softcap, s_aux=s_aux)
    assert_near(ours, dense, 1e-14)
    leaves = [*leaves, s_aux] if sinks else leaves
    mine, theirs = (torch.autograd.grad(out.cos().sum(), leaves, retain_graph=True) for out in (ours, dense))
    assert_near(mine, theirs, 1e-13)


def test_values_may_be_narrower_than_keys(kernel):
    query, key, value = attention_states()
    narrow = call((query, key, value[..., :5]))
    assert_near(narrow, call((query, key, value))[..., :5], 1e-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": None}, "no segment borders"),
        ({"attention_mask": torch.ones(1, 17)}, "got a mask"),
        ({"segments": Segments((0, 4), CPU)}, "one row of 4 tokens"),
        ({"dropout": 0.1}, "no dropout"),
    ],
)
def test_fails_closed(changes, message):
    leaves = attention_states()
    with pytest.raises(ValueError, match=message):
        call(leaves, **changes)


def test_ranks_that_share_a_row_have_the_sinks_of_their_heads():
    assert ContextGroup(None, 1, 2).own_heads(torch.arange(4)).tolist() == [2, 3]


def test_a_kernel_is_compared_with_segments_before_it_is_trusted(monkeypatch):
    with varlen_on_cpu():
        assert largest_difference(CPU, torch.float32) < 1e-5
        assert largest_difference(CPU, torch.bfloat16) < 0.05
        plain = torch.nn.attention.varlen.varlen_attn

        def leaky(*args, window_size, **kwargs):
            return plain(*args, window_size=(-1, -1), **kwargs)

        monkeypatch.setattr("tasks.learner.attention.varlen_attn", leaky)
        assert largest_difference(CPU, torch.float32) > 0.05


def test_a_kernel_that_stands_in_for_all_fused_ones_is_not_compared_with_itself(monkeypatch):
    """As the hooks of versions 3 and 4 do: torch's attention of one segment calls them, too, in half precision."""
    plain, product = torch.nn.attention.varlen.varlen_attn, scaled_dot_product_attention

    def hooked(*args, scale, **kwargs):
        return plain(*args, scale=0.2, **kwargs)

    def fused(query, *args, scale, **kwargs):
        replaced = torch.backends.cuda.flash_sdp_enabled() or query.dtype == torch.bfloat16
        return product(query, *args, scale=0.2 if replaced else scale, **kwargs)

    monkeypatch.setattr("tasks.learner.attention.varlen_attn", hooked)
    monkeypatch.setattr("tasks.learner.attention.scaled_dot_product_attention", fused)
    with varlen_on_cpu():
        assert largest_difference(CPU, torch.bfloat16) > 0.05


def test_on_the_cpu_there_is_one_attention():
    assert activate_attention("auto", CPU) == "segments"
    with pytest.raises(LearnerError, match="which needs CUDA"):
        activate_attention("fa3", CPU)


def test_what_is_asked_for_must_be_installed():
    device = torch.device("cuda")
    assert activate_attention("fa2", device) == "fa2"
    for name, package in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        with pytest.raises(LearnerError, match=f"learner.attention is {name}, but {package} is not installed"):
            activate_attention(name, device)


def test_a_version_that_does_not_work_is_not_used_and_the_log_says_why(monkeypatch, caplog):
    def broken():
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("tasks.learner.attention.ATTENTION_PACKAGES", {"fa4": "json.tool"})
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", broken)
    with pytest.raises(LearnerError, match="fa4"):
        activate_attention("fa4", torch.device("cuda"))
    assert "RuntimeError: no kernel image" in caplog.text
    assert current_flash_attention_impl() is None
