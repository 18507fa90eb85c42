"""The memory plan of the learner against torch's tracker, which follows every tensor of a step that holds nothing."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.losses import GspoLoss, is_elementwise
from configs.training import LoraConfig, MuonOptimizer, TrainingConfig
from flows.services.gpus import parse_gpu
from flows.services.memory import CUDA_CHUNK_BYTES, layer_bytes, learner_memory, model_shape, selective_bytes
from tasks.learner import head
from tasks.learner.attention import ATTENTION, Segments, register_attention
from tasks.learner.fp8 import use_fp8
from tasks.learner.model import PolicyModel
from tasks.learner.recompute import recompute_layers
from tests.fixtures.varlen import varlen_on_cpu
from tests.tasks.learner.processes import run_ranks

SMALL, MIDDLE, LARGE, UNTIED = (model_shape(f"Qwen/Qwen3-{size}") for size in ("0.6B", "1.7B", "4B", "8B"))
CPU = torch.device("cpu")
AT_LENGTH = [pytest.mark.engine, pytest.mark.nightly]


def replace(shape, **widths):
    """Return a shape with other widths."""
    return shape.model_copy(update=widths)


def causal_model(shape, dtype=torch.float32):
    from transformers import AutoModelForCausalLM, Qwen3Config

    register_attention()
    config = Qwen3Config(**shape.model_dump(), use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def tracked_bytes(shape, settings, tokens, ranks):
    """Return the most that tensors take in the second row of a training step, by torch's tracker."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy = PolicyModel(causal_model(shape), settings.logprob_chunk or 1024).train()
            if settings.fp8:
                use_fp8(policy.layers())
            recompute_layers(policy.causal, policy.layers(), settings, CPU)
            half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for module in (*policy.layers(), policy):
                fully_shard(module, mesh=mesh, mp_policy=half)
            optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
            inputs = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
            others = torch.arange(tokens - 1), inputs[0][1:], torch.ones(tokens - 1)

            def row():
                row_inputs = *inputs, Segments((0, tokens // 2, tokens), CPU), *others
                if is_elementwise(settings.loss):
                    policy(*row_inputs, lambda logprobs, part: logprobs.sum())[0].backward()
                else:
                    logprobs, entropies = policy(*row_inputs)
                    (logprobs.sum() + entropies.sum()).backward()

            for parameter in policy.parameters():
                parameter.grad = torch.zeros_like(parameter)  # of an earlier row, and for the moments to be there
            optimizer.step()
            tracker = FSDPMemTracker(policy, optimizer)
            tracker.track_inputs((*inputs, *others))
            with tracker:
                row()
                optimizer.step()
            return tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    finally:
        dist.destroy_process_group()


def cases():
    """Shapes of real widths and few layers, which differ from all layers by a number of equal ones."""
    for shape, tokens in ((SMALL, 8192), (MIDDLE, 4096), (LARGE, 4096), (UNTIED, 2048)):
        for ranks in (1, 2, 8, 64):
            for recompute in (False, "selective", True):
                yield shape, 2, tokens, ranks, recompute, {}
    for shape, tokens in ((SMALL, 8192), (UNTIED, 2048)):
        for ranks in (1, 8):
            yield shape, 2, tokens, ranks, False, {"loss": GspoLoss()}  # whose gradients take another pass
    for shape, recompute in ((SMALL, False), (SMALL, "selective"), (LARGE, True)):
        yield shape, 2, 16384, 8, recompute, {"fp8": True, "logprob_chunk": 2048}
    yield LARGE, 2, 32768, 1, True, {"logprob_chunk": 2048}  # a layer computed again takes more than the head
    yield SMALL, 4, 16384, 8, False, {"logprob_chunk": 2048}
    for recompute in ("selective", True):
        yield SMALL, 5, 8192, 4, recompute, {"checkpoint_every": 2}
    yield LARGE, 4, 32768, 8, "selective", {"logprob_chunk": 2048}
    yield SMALL, 12, 16384, 8, "selective", {"logprob_chunk": 2048}
    yield UNTIED, 2, 32768, 16, True, {}


def case_parameters():
    """All cases; every eighth is of the tests that newcomers run, as a second is much for one of thousands."""
    for number, case in enumerate(cases()):
        name = f"{case[0].hidden_size}-{'-'.join(map(str, case[1:5]))}"
        yield pytest.param(case, id=name, marks=AT_LENGTH if number % 8 else [])


@pytest.mark.parametrize("case", list(case_parameters()))
def test_the_plan_is_within_five_percent_of_torchs_tracker(case, monkeypatch):
    # As on CUDA, where the products of the head are not computed from copies in float32.
    monkeypatch.setattr(head, "WITH_OUT_DTYPE", ("cpu",))
    shape, layers, tokens, ranks, recompute, others = case
    settings = TrainingConfig(gradient_checkpointing=recompute, **others)
    shape = replace(shape, num_hidden_layers=layers)
    with varlen_on_cpu():
        tracked = tracked_bytes(shape, settings, tokens, ranks)
    plan = learner_memory(shape, settings, tokens=tokens, ranks=ranks, recompute=recompute, compiled=False)
    assert plan.total - plan.parts["spare"] == pytest.approx(tracked, rel=0.05)


def saved_bytes(shape, compiled, recompute=False, tokens=256):
    """Return what a layer keeps of a token for its backward pass; compiled as inductor cuts forward from backward."""
    model = causal_model(replace(shape, num_hidden_layers=1, vocab_size=64), torch.bfloat16).train()
    layers = model.get_decoder().layers
    recompute_layers(model, layers, TrainingConfig(gradient_checkpointing=recompute), CPU)
    layer = layers[0]
    if compiled:
        torch._dynamo.reset()
        layer.compile(backend="aot_eager_decomp_partition", dynamic=True, fullgraph=True)
    own = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    angles = torch.ones(2, 1, tokens, shape.head_dim, dtype=torch.bfloat16)
    segments, kept = Segments((0, tokens // 2, tokens), CPU), {}
    own |= {angles.untyped_storage().data_ptr(), segments.cu_seqlens.untyped_storage().data_ptr()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    hidden = torch.randn(1, tokens, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=(angles[0], angles[1]), segments=segments)
    return sum(size for place, (size, _) in kept.items() if place not in own) / tokens


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=AT_LENGTH)])
def test_what_a_layer_keeps_of_a_token(compiled):
    narrow = replace(SMALL, hidden_size=512, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=2)
    # Compiling takes seconds.
    others = () if compiled else (replace(narrow, num_key_value_heads=4), replace(narrow, intermediate_size=512))
    for shape in (SMALL, narrow, *others):
        with varlen_on_cpu():
            assert saved_bytes(shape, compiled) == pytest.approx(layer_bytes(shape, compiled), rel=0.01)
            if compiled:  # what is not compiled keeps it where no hook sees it, but torch's tracker
                assert saved_bytes(shape, True, "selective") == pytest.approx(selective_bytes(shape, True), rel=0.01)


def test_a_model_that_is_known_has_the_parameters_of_the_real_one():
    with torch.device("meta"):
        for shape in (SMALL, UNTIED):
            assert causal_model(shape).num_parameters() == shape.parameters
    assert head.CHUNK_BYTES["cuda"] == CUDA_CHUNK_BYTES


def test_other_optimizers_and_adapters_take_less():
    totals = [
        learner_memory(LARGE, settings, tokens=8192, ranks=1, recompute=False, compiled=True).idle
        for settings in (TrainingConfig(), TrainingConfig(optimizer=MuonOptimizer()), TrainingConfig(lora=LoraConfig()))
    ]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3


@pytest.mark.engine
def test_a_rank_that_loads_takes_its_shard_and_what_is_gathered_of_a_few_layers(model_directory, tmp_path, monkeypatch):
    # Else malloc keeps what was gathered layer by layer.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    widths = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = replace(SMALL, **widths, num_hidden_layers=16, vocab_size=512)
    with torch.device("meta"):
        model = causal_model(shape)
    model.config.save_pretrained(tmp_path)
    stored = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in model.named_parameters()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    run_ranks(2, "tests.tasks.learner.loading", tmp_path, model_directory, tmp_path / "grown")
    host = learner_memory(shape, TrainingConfig(), tokens=1, ranks=2, recompute=False, compiled=False).host
    for rank in range(2):
        grown = int((tmp_path / f"grown.{rank}").read_text())
        assert 0.95 * host < grown < 1.05 * host + 4 * 4 * shape.layer_parameters


def test_a_model_of_32b_fits_eight_gpus_of_80_gib():
    shape = model_shape("Qwen/Qwen3-32B")
    settings = TrainingConfig(optimizer=MuonOptimizer())
    use = learner_memory(shape, settings, tokens=8192, ranks=8, recompute=True, compiled=True)
    assert use.total < parse_gpu("80GiB").usable
    assert use.host == pytest.approx(4 * 32.8e9 / 8, rel=0.01)
