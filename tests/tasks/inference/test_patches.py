"""Patches of libraries do what they say, and are still needed."""

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config
from tasks.inference.environments.host import MAX_REFUSALS, local_servers, refuses
from tasks.inference.patches import skip_absent_adapters
from tasks.runtime.torchvision_operators import declare_torchvision_operators

pytestmark = pytest.mark.engine

PROGRAM = """
import json, sys
from renderers import base
from tasks.inference.patches import load_tokenizers_from_cache, skip_absent_adapters

if sys.argv[1] == "patched":
    load_tokenizers_from_cache()
tokenizer = base.load_tokenizer("some/model")
print(json.dumps([tokenizer.name_or_path, tokenizer.encode("ab", add_special_tokens=False)]))
"""


@pytest.fixture
def hub():
    """The address of a hub that has nothing, and the paths that it is asked for."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            paths.append(self.path)
            self.send_error(404)

        do_GET = do_HEAD

        def log_message(self, *_):
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()


def keep_in_cache(directory, cache):
    """Put a model's files into a cache of the hub as `some/model`; return their snapshot."""
    snapshot = cache / "models--some--model" / "snapshots" / "0a1b"
    shutil.copytree(directory, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0a1b")
    return snapshot


def test_a_cached_tokenizer_is_loaded_without_a_request_and_renderers_still_make_one(models, tmp_path, hub):
    keep_in_cache(models["a"], tmp_path / "hub")
    address, paths = hub
    variables = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}

    def requests(which):
        paths.clear()
        argv = [sys.executable, "-c", PROGRAM, which]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True)
        if which == "patched":
            assert json.loads(done.stdout) == ["some/model", [97, 98]], done.stderr
        return [*paths]

    assert requests("patched") == []
    assert requests("as it is"), "renderers ask the hub no more: remove the patch"


def test_the_cpu_build_gives_rows_without_an_adapter_the_last_one(monkeypatch):
    """Where the first half fails, the engine does it right by itself: remove the patch."""
    import torch
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(8, 4, "cpu")
    wrapper.update_metadata(LoRAMapping((0, 7, 0), (0, 7, 0), is_prefill=True), [7], 1, 16)
    factor, rows = torch.ones(1, 1, 2, 4), torch.ones(3, 4)
    monkeypatch.setattr(PunicaWrapperCPU, "add_shrink", PunicaWrapperCPU.add_shrink)  # put back after the test

    def shrunk():
        out = torch.zeros(1, 3, 2)
        wrapper.add_shrink(out, rows, (factor,), 1.0)
        return out[0].tolist()

    assert shrunk() == [[4.0, 4.0]] * 3
    skip_absent_adapters()
    assert shrunk() == [[0.0, 0.0], [4.0, 4.0], [0.0, 0.0]]


def test_verifiers_has_no_seam_for_what_is_patched():
    """Where one of these fails, verifiers has a hook of its own: remove the patch."""
    from verifiers.v1.configs.client import BaseClientConfig
    from verifiers.v1.interception.server import InterceptionServerConfig
    from verifiers.v1.serve.types import RunRequest

    assert RunRequest.model_fields.keys() == {"task_data", "client", "model", "sampling"}, "play_episodes_with"
    fields = {"base_url", "api_key_var", "headers", "headers_from_env", "timeout"}
    assert BaseClientConfig.model_fields.keys() == fields, "call_models_with"
    fields = InterceptionServerConfig.model_fields
    assert not any("body" in name or "bytes" in name for name in fields), "bound_requests_of_agents"


def test_verifiers_serves_an_environment_on_whose_shared_tool_server_has_ended():
    """Where this fails, verifiers ends with its tool servers or restarts them: remove `watch_served_environments`."""
    from verifiers.v1.utils.loaders import load_environment

    section = EnvironmentConfig(name="calc", taskset={"id": "sample_calc_tools"}).model_dump()
    env = load_environment(verifiers_config(section))

    async def serve():
        async with env.serving():
            ((_, host, port),) = local_servers(env._shared_tools)
            assert not await refuses(host, port)
            for process in psutil.Process().children(recursive=True):
                if any("sample_calc_tools.server" in part for part in process.cmdline()):
                    process.kill()
            for _ in range(MAX_REFUSALS):
                while not await refuses(host, port):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.1)

    asyncio.run(serve())


def test_the_cpu_build_drops_the_matrices_that_it_packs():
    """Where this fails, they are there to be summed: remove `keep_packed_checksums`."""
    import torch

    declare_torchvision_operators()
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.numel() == 0


def test_the_cpu_build_packs_experts_at_the_first_load_alone():
    """Where this fails, vLLM packs them after each load: remove `pack_experts_again`."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    always, _, first = inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel).partition("if not is_weight_update:")
    assert "fused_experts.process_weights_after_loading(layer)" in first and "fused_experts" not in always
