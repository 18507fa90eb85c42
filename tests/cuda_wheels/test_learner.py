"""torch's CUDA build and FlashAttention 4: kernels, keywords and results that the learner uses are there."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from configs.losses import DppoLoss, GspoLoss
from tasks.learner import attention
from tasks.learner.client import ENVIRONMENT
from tasks.learner.distributed import ALONE
from tasks.learner.fp8 import RowwiseLinear, linear, use_fp8
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tests.fixtures.packed import batch_of, sample
from tests.fixtures.policies import CPU
from tests.fixtures.varlen import varlen_on_cpu
from tests.tasks.learner.ranks import plain_policy

pytestmark = pytest.mark.cuda_wheels
ARCHITECTURES = {"sm_90a": 132, "sm_100a": 148}
"""Of Hopper and Blackwell, with the number of multiprocessors."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_torch_calls_flash_attention_4_and_takes_what_it_returns(cuda_build, architecture):
    """Both passes are compiled; torch's own functions around them unpack the results."""
    variables = dict.fromkeys(("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH"), architecture)
    variables |= {"FLASH_ATTENTION_NUM_SMS": str(ARCHITECTURES[architecture]), "LD_LIBRARY_PATH": str(cuda_build)}
    argv = [sys.executable, "-m", "tests.cuda_wheels.compile_attention"]
    done = subprocess.run(argv, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    queries, keys = [500, 16, 128], [500, 8, 128]
    assert json.loads(done.stdout) == [[queries, [16, 500], queries, keys, keys]] * 2


def test_flash_attention_4_keeps_compiled_kernels_for_the_next_learner():
    from flash_attn.cute import cache_utils

    (name,) = [name for name in ENVIRONMENT if name.startswith("FLASH_ATTENTION")]
    assert f'os.getenv("{name}", "0") == "1"' in inspect.getsource(cache_utils) and ENVIRONMENT[name] == "1"


def test_a_warning_alone_would_leave_attention_s_backward_pass_without_an_order():
    library = (Path(torch.__file__).parent / "lib/libtorch_cuda.so").read_bytes()
    assert b"Flash Attention defaults to a non-deterministic algorithm. " in library
    assert b"call torch.use_deterministic_algorithms(True, warn_only=False)" in library


class Names(TorchDispatchMode):
    """Records the names of all operations, with their overloads."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss", "in_8_bits"), [(DppoLoss(), False), (GspoLoss(), False), (DppoLoss(), True)])
def test_every_operation_of_a_row_has_a_kernel_for_cuda(tmp_path, loss, in_8_bits):
    from tasks.learner.tiny import tiny_qwen3

    policy = plain_policy(tiny_qwen3(tmp_path / "policy", hidden=32, layers=2), torch.bfloat16)
    if in_8_bits:
        use_fp8(policy.layers())
    rows = batch_of([[sample("a", 9, 1), sample("b", 7, 2)]])
    with varlen_on_cpu(), Names() as names:
        accumulate_gradients(policy, rows, Objective(loss), ALONE, CPU)
    composites = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    wanted = {*names.found, "aten::mm.dtype", "aten::addmm.dtype_out", "aten::_foreach_norm.Scalar"} - {
        "torch_attn::_varlen_attn",
        "torch_attn::_varlen_attn_backward",
    }
    wanted |= {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert len(wanted) > 30
    assert ("aten::_scaled_mm_v2" in wanted) == in_8_bits
    assert {name for name in wanted if not any(has(name, key) for key in ("CUDA", *composites))} == set()


def test_products_in_8_bits_have_the_keywords_and_the_layouts_that_cuda_takes():
    """torch's own checks of operands for CUDA, on tensors without values."""
    keywords = {"output_dtype": torch.bfloat16, "use_fast_accum": True}
    inspect.signature(torch.nn.functional.scaled_mm).bind(*range(6), **keywords)
    with FakeTensorMode():
        new = {"device": "cuda", "dtype": torch.bfloat16}
        for tokens in (1, 37):
            states, weight, gradient = (torch.empty(*size, **new) for size in ((tokens, 64), (48, 64), (tokens, 48)))
            saved = SimpleNamespace(saved_tensors=(states, weight))
            assert linear(states, weight).shape == gradient.shape
            shapes = [each.shape for each in RowwiseLinear.backward(saved, gradient)]
            assert shapes == [states.shape, weight.shape]
        with pytest.raises(RuntimeError, match="divisible by 16"):
            linear(torch.empty(16, 40, **new), torch.empty(48, 40, **new))


def test_attention_is_called_by_keywords_that_it_has():
    keywords = {"scale": 1.0, "window_size": (-1, 0), **attention.GROUPED}
    inspect.signature(attention.varlen_attn).bind(*range(7), **keywords)
    assert attention.GROUPED == {"enable_gqa": True}
