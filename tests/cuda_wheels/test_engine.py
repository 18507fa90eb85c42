"""vLLM's CUDA build: flags, routes, classes and attributes that the engine's process uses are there."""

import ast
import asyncio
import inspect
import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import load
from configs.training import LoraConfig
from flows.services.gpus import parse_gpu
from flows.services.memory import memory_plan
from tasks.inference.engine import client, command, read_back
from tasks.learner.tiny import tiny_qwen3

pytestmark = pytest.mark.cuda_wheels


def attributes_of(cls):
    """Return the names that a class and those above it have, or give to `self`."""
    sources = [textwrap.dedent(inspect.getsource(part)) for part in cls.__mro__ if part is not object]
    return {*dir(cls), *re.findall(r"\bself\.(\w+)", " ".join(sources))}


def attributes_read(function, name):
    """Return what a function, or the methods of a class, read of the expression `name`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in reads if ast.unparse(node.value) == name}


@pytest.fixture(scope="module")
def arguments(h200, tmp_path_factory):
    """The engine's command line as vLLM's own parser has it, with every option that the product gives on CUDA."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model = tiny_qwen3(tmp_path_factory.mktemp("model") / "policy", max_positions=4096)
    config = load(
        ["qwen3_gpu"], [f"model.path={model}", "engine.sleep=true", "engine.metrics=true", "engine.weight_transfer=ipc"]
    )
    memory = memory_plan(config, parse_gpu("H200")).engine_arguments
    options = {"lora": LoraConfig(rank=3), "memory": memory}
    argv, variables = command.command(config.engine, config.model, model, "report", **options)
    os.environ |= variables | {"VLLM_API_KEY": "key"}
    middleware = [f"tasks.inference.engine.{name}" for name in ("guard.KeyGuard", "token_policies.PolicyHeader")]
    own = argv[argv.index("--key-variable") + 2 :]
    own += ["--seed", "1", "--middleware", middleware[0], "--middleware", middleware[1], "--host", "::1", "--port", "1"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(own)
    validate_parsed_serve_args(parsed)
    return parsed


@pytest.fixture(scope="module")
def config(arguments):
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def test_the_engine_of_a_gpu_has_another_model_runner_than_that_of_the_cpu(config):
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"
    assert config.model_config.hf_config.head_dtype == "float32" and config.model_config.enable_sleep_mode


@pytest.mark.parametrize("runner", ["gpu.model_runner", "gpu_model_runner"])
def test_what_workers_are_asked_for_is_there_in_both_runners(h200, runner):
    from importlib import import_module

    from vllm.v1.worker.gpu_worker import Worker

    reads = attributes_read(read_back.ReadBack, "self.model_runner")
    assert "get_model" in reads
    assert reads - attributes_of(import_module(f"vllm.v1.worker.{runner}").GPUModelRunner) == set()
    assert {name for name in vars(read_back.ReadBack) if not name.startswith("__")} & {*dir(Worker)} == set()
    inspect.signature(Worker.reload_weights).bind(None, weights_iterator=iter(()))
    inspect.signature(Worker.reload_weights).bind(None, weights_path="")


def test_the_layers_whose_parts_are_summed_have_what_is_read_of_them(h200):
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    layers = (linear.QKVParallelLinear, linear.RowParallelLinear, vocab_parallel_embedding.VocabParallelEmbedding)
    reads = attributes_read(read_back._own_parts, "module")
    assert "num_kv_head_replicas" in reads
    assert reads - set().union(*map(attributes_of, layers)) == set()
    assert "num_org_elements" in dir(vocab_parallel_embedding.VocabParallelEmbeddingShardIndices)


def test_every_route_that_is_called_is_there(arguments, config):
    from vllm.entrypoints.launchers.app import build_app

    from tasks.inference.engine.routes import add_routes

    add_routes()
    app = build_app(arguments, ("generate",), config.model_config)
    calls = re.findall(r'_(?:post|request)\((?:"(GET|POST)", )?"(/[\w/]+)"', Path(client.__file__).read_text())
    sender = Path(command.__file__).parents[2] / "learner/weight_sender.py"
    calls += [("POST", f"/{route}") for route in re.findall(r'_call\("(\w+)"', sender.read_text())]
    served = {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    assert len(calls) > 19
    assert {(method or "POST", path) for method, path in calls} - served == set()
    assert {"/health", "/metrics"} <= {route.path for route in app.routes}


def test_policies_are_sent_as_the_engines_for_ipc_and_nccl_take_them(config):
    import torch
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine

    from tasks.learner import weight_sender
    from tasks.learner.distributed import ALONE

    assert config.weight_transfer_config.backend == "ipc"
    assert "ipc_handles_pickled" in inspect.signature(ipc_engine.IPCWeightTransferUpdateInfo).parameters
    engines = {"ipc": ipc_engine.IPCTrainerWeightTransferEngine, "nccl": nccl_engine.NCCLTrainerWeightTransferEngine}
    largest = SimpleNamespace(shape=(2**29, 4), dtype=torch.bfloat16)
    source = SimpleNamespace(world=ALONE, metadata=lambda: [largest])
    for backend, engine in engines.items():
        info = weight_sender._init_info(backend, source, 2)
        assert isinstance(info, engine.init_info_cls) and (info.backend, info.packed) == (backend, True)
        assert backend != "ipc" or info.packed_buffer_size_bytes >= 2**32, "the largest tensor has room"
        inspect.signature(engine.trainer_init).bind(info, client=None, source=None)
        assert {"client", "source", "send_weights"} <= attributes_of(engine)


def test_the_client_of_the_engine_is_made_and_served_as_it_can_be(h200):
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve

    from tasks.inference.engine.token_policies import PolicyTrackingLLM

    names = ("usage_context", "disable_log_stats", "enable_log_requests", "aggregate_engine_logging")
    inspect.signature(PolicyTrackingLLM.from_vllm_config).bind(None, **dict.fromkeys(names))
    inspect.signature(build_and_serve).bind("engine", "url", "socket", "arguments")
    inspect.signature(PolicyTrackingLLM.shutdown).bind(None, timeout=1)
    needed = {"output_processor", "engine_core", "collective_rpc", "is_paused", "reset_mm_cache"}
    assert needed - attributes_of(PolicyTrackingLLM) == set()


def test_tokens_are_counted_where_both_runners_send_them(h200):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    from tasks.inference.engine.token_policies import PolicyLog, PolicyTrackingLLM

    engine, processor = object.__new__(PolicyTrackingLLM), OutputProcessor(None, log_stats=False)
    engine.policies, engine.output_processor = PolicyLog(), processor
    for name in "ab":
        parameters = (None, SamplingParams(detokenize=False), None, 0.0, None, None, None)
        request = EngineCoreRequest(f"{name}-01234567", [1, 2, 3], *parameters, external_req_id=name)
        processor.add_request(request, None)
    processor.process_outputs([EngineCoreOutput("a-01234567", [4, 5])])

    async def count():
        """As vLLM's handler of outputs does: it reads each entry of the queue."""
        engine.engine_core = SimpleNamespace(outputs_queue=(queue := asyncio.Queue()))
        counting = asyncio.create_task(engine.count_tokens())
        marker = await queue.get()
        assert not marker.outputs and marker.scheduler_stats is None
        return await counting

    assert asyncio.run(count()) == {"a": 2, "b": 0}
    engine.policies.current = "next"
    assert engine.policies.spans("a", 5) == [("", 2), ("next", 3)]


def test_metrics_have_the_names_that_are_read(h200):
    from vllm.v1.metrics import loggers

    from tasks.inference.engine import metrics

    names = {name.removesuffix("_total") for name in (*metrics.COUNTERS, *metrics.GAUGES, *metrics.HISTOGRAMS)}
    assert {name for name in names if f'"{name}"' not in inspect.getsource(loggers)} == set()
