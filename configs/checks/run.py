"""What must hold between the sections of a config, so that a run fails before it starts anything and not after."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.checks.algorithms import algorithm_problems, assignment_problems
from configs.checks.environments import environment_problems, evaluation_problems
from configs.checks.judges import judge_problems
from configs.checks.sampling import greedy_problems, sampling_problems
from configs.checks.training import training_problems
from configs.errors import ConfigError
from configs.filters import RESERVED_NAMES, CustomFilter, filter_name
from configs.losses import DpoLoss, KtoLoss
from configs.run import RunConfig, only_teachers_sample, policy_scores
from configs.store import is_object_store
from configs.training import FP8_MULTIPLE

LOOPBACK = "lo"
"""The network interface that no other machine reaches: services that bind it are on the run's own."""
PARALLEL = ("--pipeline-parallel", "-pp", "--data-parallel", "-dp")
"""How arguments of vLLM begin that make other workers than those of tensor parallelism."""
SPECULATIVE = ("--speculative", "--spec-", "-sc")
"""How arguments of vLLM begin that have it guess tokens."""


def problems(config: RunConfig) -> list[str]:
    """Return one line for each thing in `config` that cannot work, whatever the machine."""
    checks = [
        _engine_problems(config),
        _placement_problems(config),
        _transfer_problems(config),
        _store_problems(config),
        _stream_problems(config),
        _fork_problems(config),
        training_problems(config),
        _filter_problems(config),
        algorithm_problems(config),
        assignment_problems(config),
        judge_problems(config),
    ]
    if config.kind in ("train", "evaluate") or (config.from_data and config.evaluation.evaluates_training):
        checks += [environment_problems(config), sampling_problems(config), evaluation_problems(config)]
    elif config.computes("rollout"):
        checks.append(environment_problems(config))
    if config.computes("rollout", "training"):
        checks.append(greedy_problems(config))
    if config.kind == "train" or config.from_data:
        checks.append(_row_problems(config))
    if config.kind == "sft":
        checks.append(_sft_problems(config))
    if config.kind == "dpo" or config.computes("training"):
        checks.append(_preference_problems(config))
    return [line for check in checks for line in check]


def require(config: RunConfig) -> RunConfig:
    """Return `config`, or raise ConfigError with all its problems."""
    if found := problems(config):
        raise ConfigError(found)
    return config


def missing_files(config: RunConfig) -> list[str]:
    """Return one line for each file that `config` names and that is absent or does not fit; a policy is a model."""
    lines = []
    if not config.model.path and not config.evaluation.policy and not config.external:
        lines.append("model.path: say which directory (or hub id) holds the starting weights")
    elif Path(config.model.path).expanduser().is_file():
        lines.append(f"model.path: {config.model.path} is a file; name the directory that holds it and its config.json")
    elif _is_local(config.model.path) and not Path(config.model.path).expanduser().is_dir():
        lines.append(f"model.path: there is no directory {config.model.path}")
    data = config.data.path  # whether a URL can be read is for its reader to find out
    if config.kind == "sft" and data and "://" not in data and not Path(data).expanduser().is_file():
        lines.append(f"data.path: there is no file {data}")
    return [*lines, *_directories_as_data(config), *_unfit_for_model(config)]


def _directories_as_data(config: RunConfig) -> Iterator[str]:
    # Before the version of the environment, which hashes all that a directory holds, the store of the run perhaps.
    for where, environment in config.served_environments.items():
        path = environment.taskset.get("path")
        if environment.taskset.get("id") == "own_data" and os.path.isdir(os.path.expanduser(str(path))):
            yield (
                f"{where}.taskset.path: {path} is a directory; want a data file. Name the file, or a pattern such as "
                f"{path}/*.jsonl"
            )


def require_files(config: RunConfig) -> None:
    """Raise ConfigError where a file that `config` names is missing. Meant to be called before anything starts."""
    if found := missing_files(config):
        raise ConfigError(found)


def _unfit_for_model(config: RunConfig) -> Iterator[str]:
    file = Path(config.model.path or "no model").expanduser() / "config.json"
    model = model_config(config.model.path)
    positions, layers = model.get("max_position_embeddings"), layers_with_state(model)
    key, longest = _longest_sample(config)
    if isinstance(positions, int) and longest > positions:
        yield f"{key}: {longest} is longer than the model's max_position_embeddings, {positions} ({file})"
    if not (config.from_data or config.computes("training")):
        return
    if layers and config.learner.context_parallel > 1:
        yield (
            f"learner.context_parallel: the model has layers of {layers} ({file}), which carry a state along a row "
            "that ranks cannot share; set it to 1"
        )
    if config.training.compile is True and (layers or model.get("attn_logit_softcapping")):
        yield (
            f"training.compile: {layers or 'attention with a soft cap'} ({file}) runs segment by segment, which cannot "
            "be compiled once for all rows; leave it at auto"
        )
    yield from _unfit_for_learner(config, model, bool(model.get("sees")))


def _unfit_for_learner(config: RunConfig, model: dict[str, Any], sees: bool) -> Iterator[str]:
    """Yield what the learner would refuse when it loads the model, with the values of its config.json."""
    ranks, width = config.learner.context_parallel, model.get("hidden_size")
    for name, is_set in (("training.lora", config.training.lora), ("learner.context_parallel", ranks > 1)):
        if sees and is_set:
            yield f"{name}: the model sees, and such models are trained whole and with whole rows; leave {name} out"
    heads = model.get("num_attention_heads")
    keys = model.get("num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(keys, int) and (heads % ranks or (keys % ranks and ranks % keys)):
        yield (
            f"learner.context_parallel: {ranks} ranks cannot share the model's {heads} attention heads and {keys} of "
            "keys and values evenly; take a divisor of both"
        )
    if config.training.fp8 and isinstance(width, int) and width % FP8_MULTIPLE:
        yield (
            f"training.fp8: the model's hidden_size, {width}, is no multiple of {FP8_MULTIPLE}, as products in 8 bits "
            "need; leave it false"
        )


def model_config(path: str) -> dict[str, Any]:
    """Return config.json of the text model in a directory, and whether it `sees`; empty where there is none."""
    try:
        config = json.loads((Path(path or "no model").expanduser() / "config.json").read_text(encoding="utf-8"))
        names = ("architectures", "quantization_config")
        of_whole: dict[str, Any] = {"sees": "vision_config" in config} | {name: config.get(name) for name in names}
        model: dict[str, Any] = of_whole | config.get("text_config", config)
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # whoever loads it says so
    # Configs of Qwen2 have a window that they do not use.
    return model | ({} if model.get("use_sliding_window", True) else {"sliding_window": None})


def layers_with_state(model: Mapping[str, Any]) -> str:
    """Return the kinds of layers of a model's config that carry a state along a text, such as linear_attention."""
    kinds = {str(kind) for kind in (*(model.get("layer_types") or ()), *(model.get("layers_block_type") or ()))}
    kinds |= {"mamba"} if "M" in (model.get("hybrid_override_pattern") or "") else set()  # of NVIDIA's checkpoints
    attention = {kind for kind in kinds if kind.endswith(("full_attention", "sliding_attention", "chunked_attention"))}
    return ", ".join(sorted(kinds - attention - {"attention", "mlp", "moe"}))


def _is_local(path: str) -> bool:
    # A hub id is `owner/name`: relative, of two parts, with nothing of that name here.
    return path.startswith(("/", ".", "~")) or path.count("/") > 1


def _engine_problems(config: RunConfig) -> Iterator[str]:
    for index, argument in enumerate(config.engine.extra_arguments):
        if argument.replace("_", "-").startswith("--trust-remote-code"):
            yield (
                f"engine.extra_arguments.{index}: {argument} runs code that lies beside a model's weights, on this "
                "machine and unseen; leave it out, and take a model that transformers itself knows"
            )
    if config.records_experts and any(each.startswith(SPECULATIVE) for each in config.engine.extra_arguments):
        yield (
            "training.router_replay: 'rollout' records the experts of each token, and an engine that speculates also "
            "computes tokens that it drops; leave it off, or leave the speculation out of engine.extra_arguments"
        )
    if config.engine.quantization and config.engine.url:
        yield "engine.quantization: an engine of others (engine.url) has its own; set it there, and here null"
    if config.engine.quantization and config.engine.dtype == "float32":
        yield "engine.quantization: fp8 quantises weights in half precision alone; leave engine.dtype at auto"
    least, most = config.engine.bounds
    if not 1 <= least <= config.engine.num_replicas <= most:
        yield (
            f"engine.replicas: {config.engine.replicas} does not fit a run that begins with "
            f"{config.engine.num_replicas} engines; write a number from 1 on, or the fewest and the most, as [1, 4]"
        )


def _placement_problems(config: RunConfig) -> Iterator[str]:
    """Yield what cannot work of where engine and learner compute, on CUDA."""
    engine, learner = ({each for each in text.split(",") if each} for text in (config.engine.gpus, config.learner.gpus))
    if learner and len(learner) < config.learner.processes:
        yield f"learner.gpus: {config.learner.gpus!r} are fewer than learner.processes, {config.learner.processes}"
    here = config.training.device == "cuda" and not config.engine.url and config.placement.services == "local"
    replicas = config.engine.num_replicas if here else 1
    if replicas > 1 and (not engine or (len(engine) % replicas and replicas % len(engine))):
        yield (
            f"engine.replicas: {replicas} need as many GPUs for each, or as many of them on each GPU, and engine.gpus "
            f"is {config.engine.gpus!r}; name them, for example engine.gpus={','.join(map(str, range(replicas)))}"
        )
    if here and config.shares_gpu and config.rollout.max_off_policy_steps:
        yield (
            f"rollout.max_off_policy_steps: {config.rollout.max_off_policy_steps} lets the engine sample while the "
            "learner trains, and both have the same GPU, which slows each by the other; take 0, or give them GPUs of "
            "their own, for example engine.gpus=0 and learner.gpus=1"
        )


def _transfer_problems(config: RunConfig) -> Iterator[str]:
    """Yield why policies cannot go from the learner's memory to the engine's."""
    engine, way, device = config.engine, config.engine.weight_transfer, config.training.device
    if way == "file" or config.kind in ("evaluate", "replay"):
        return
    others = [each for each in engine.extra_arguments if each.startswith(("--quantization", "--dtype"))]
    others += [engine.quantization] if engine.quantization else []
    several = config.learner.nodes > 1
    parallel = [each for each in engine.extra_arguments if each.startswith(PARALLEL)]
    right = {"cpu": "gloo", "auto": way}.get(device, "nccl" if several or not config.shares_gpu else "ipc")
    unfit = {
        "the engine is someone else's (engine.url)": engine.url,
        "engines may join (engine.replicas is a range)": engine.is_elastic,
        "training.lora publishes adapters": config.training.lora,
        f"no checksum proves {others or engine.dtype}": others or engine.dtype == "float16",
        f"{device} with engine.gpus {engine.gpus!r} and learner.gpus {config.learner.gpus!r} takes {right}": way
        != right,
        f"only tensor parallel workers are counted, and there is {parallel}": parallel,
        "learner and engine share a GPU": several and way == "nccl" and config.shares_gpu,
    }
    for what, is_so in unfit.items():
        if is_so:
            yield f"engine.weight_transfer: {way!r} cannot hand policies over: {what}. Take file, which always can"


def _store_problems(config: RunConfig) -> Iterator[str]:
    """Yield why machines could not hand weights on, which lie in directories of the store, to each other."""
    where = ""
    if config.placement.services == "local" and config.learner.nodes > 1:
        where = f"learner.nodes: {config.learner.nodes}"
    elif config.placement.services == "pools" and config.placement.interface != LOOPBACK:
        where = "placement.services: pools"
    tables_alone = config.kind == "replay" and not (config.computes("rollout") or config.computes("training"))
    if where and is_object_store(config.store) and not config.external and not tables_alone:
        yield (
            f"{where}, but the store is {config.store}: engine and learner hand weights on in directories of the "
            "store, and those of an object store are copies on the run's own machine; name a store in a file system "
            "that all machines have at the same path, or keep engine and learner on one machine"
        )


def _stream_problems(config: RunConfig) -> Iterator[str]:
    """Yield what a stream of rollouts cannot do: a step of it takes what ends first, of whichever step's examples."""
    if not config.rollout.recompute_states and config.rollout.weight_update != "keep":
        yield "rollout.recompute_states: false is for rollout.weight_update 'keep'; states are computed again otherwise"
    if config.keeps_turns and config.streams and config.engine.url:
        yield (
            "rollout.keep_turns: a rollout of a stream may go on with a newer policy after a crash, and the engine of "
            "someone else (engine.url) does not say which policy sampled which token; take false, and no "
            "teacher with a chat API"
        )
    if config.keeps_turns and any(entry.address for entry in config.served_environments.values()):
        yield (
            "rollout.keep_turns: environments of someone else (environments.N.address) do not pass turns on; take "
            "false, and no teacher with a chat API"
        )
    if config.rollout.weight_update != "wait" and config.kind == "train":
        yield from _weight_update_problems(config)
    if config.rollout.stale != "wait" and config.kind == "train":
        yield from _stale_problems(config)
    if not config.streams:
        return
    if config.oversampling and config.rollout.stale == "wait":
        yield (
            f"assignment.oversampling: {config.oversampling:g} assigns more groups than steps of a stream can take, "
            "and with rollout.stale 'wait' each would be waited for; take rollout.stale=drop"
        )
    unfit = {
        "an algorithm has rollouts scored by the policy that sampled them, which is not served any more": (
            policy_scores(config)
        ),
        "teachers sample all environments, so that no rollout can be off-policy": only_teachers_sample(config),
    }
    for what, is_so in unfit.items():
        if is_so:
            yield (
                f"rollout.max_off_policy_steps: {config.rollout.max_off_policy_steps} lets steps take their rollouts "
                f"from one stream, but {what}; take 0 or 1"
            )


def _fork_problems(config: RunConfig) -> Iterator[str]:
    if config.fork and not re.fullmatch(r"[^:]+:[0-9]{1,9}", config.fork):
        yield f"fork: {config.fork!r}: name a recorded run and the step to go on from as RUN:STEP, for example demo:3"
    if config.fork and config.kind != "train":
        yield f"fork: a run of kind {config.kind} starts from model.path; only a training run goes on from a step"
    if config.fork and (config.stateful or config.assignment.sampler.stateful):
        yield (
            f"fork: {config.fork} names a policy, and the algorithm or assignment.sampler carries more from step to "
            "step; take ones without state"
        )


def _stale_problems(config: RunConfig) -> Iterator[str]:
    """Yield why no group can come to be stale."""
    stale, update = config.rollout.stale, config.rollout.weight_update
    unfit = {
        "no rollouts are under way then: rollout.max_off_policy_steps is below 2": not config.streams,
        f"with rollout.weight_update {update!r} and as many groups as the steps take, none is under way any more when "
        "it comes to be too old; take rollout.weight_update=keep, or assignment.oversampling above 1": (
            config.streams and update != "keep" and not config.oversampling
        ),
    }
    for what, is_so in unfit.items():
        if is_so:
            yield f"rollout.stale: {stale!r} says what becomes of groups that are too old for any step, but {what}"


def _weight_update_problems(config: RunConfig) -> Iterator[str]:
    """Yield why no weights can be exchanged while rollouts are under way."""
    update = config.rollout.weight_update
    unfit = {
        "no rollouts are under way then: rollout.max_off_policy_steps is below 2": not config.streams,
        "training.lora serves each policy as an adapter, whose requests end with it": (
            update == "keep" and config.training.lora is not None
        ),
        "the engine of someone else (engine.url) does not say which policy sampled which token": (
            update == "keep" and bool(config.engine.url)
        ),
        "environments of someone else (environments.N.address) do not pass on which policy sampled which token": (
            update == "keep" and any(each.address for each in config.environments)
        ),
    }
    for what, is_so in unfit.items():
        if is_so:
            yield f"rollout.weight_update: {update!r} says what becomes of rollouts under way, but {what}; take 'wait'"


def _filter_problems(config: RunConfig) -> Iterator[str]:
    for index, item in enumerate(config.filtering.filters):
        if isinstance(item, CustomFilter) and item.name in RESERVED_NAMES:
            yield f"filtering.filters.{index}.name: {item.name!r} has a meaning of its own in verdicts and metrics"
    counts = Counter(filter_name(item) for item in config.filtering.filters)
    for name, count in counts.items():
        if count > 1:
            yield f"filtering.filters: {name!r} is there {count} times"
    if not any(item.type == "errored" for item in config.filtering.filters):
        yield "filtering.filters: 'errored' may not be left out; errored traces must be in no baseline"


def _longest_sample(config: RunConfig) -> tuple[str, int]:
    """Return the key that bounds the tokens of a sample, and the bound."""
    if config.kind == "sft":
        return "data.max_length", config.data.max_length
    return "engine.max_model_len", config.engine.max_model_len


def _row_problems(config: RunConfig) -> Iterator[str]:
    key, longest = _longest_sample(config)
    if config.packing.tokens_per_row < longest:
        yield (
            f"packing.tokens_per_row: a row of {config.packing.tokens_per_row} tokens cannot hold the longest sample, "
            f"{key} {longest}"
        )


def _preference_problems(config: RunConfig) -> Iterator[str]:
    """Yield what keeps pairs of rollouts from the losses that compare them."""
    loss, compares = config.training.loss, isinstance(config.training.loss, DpoLoss | KtoLoss)
    if config.kind == "dpo":
        if not config.data.runs:
            yield 'data.runs: name the runs of the store whose rollouts are compared, for example data.runs=["demo"]'
        if config.assignment.group_size != 2:
            yield f"assignment.group_size: a pair has 2 rollouts, not {config.assignment.group_size}"
    types = {where: algorithm.type for where, algorithm in config.used_algorithms.items()}
    if compares or config.pairs or config.kind == "dpo":
        yield from (
            f"{where}.type: {name!r} makes no pairs for the loss {loss.type!r}; the losses dpo and kto go with the "
            "algorithm preferences, and no other"
            for where, name in types.items()
            if (name == "preferences") != compares or not compares
        )
    if compares and not config.packing.zero_advantages:
        yield f"packing.zero_advantages: false leaves out tokens that the loss {loss.type} adds up; set it to true"
    if compares and (loss.tis or loss.sequence_mask):
        yield f"training.loss: {loss.type} has no importance ratio; leave tis and sequence_mask out"


def _sft_problems(config: RunConfig) -> Iterator[str]:
    if not config.data.path:
        yield "data.path: a run of kind sft needs a JSONL or Parquet file"
    for where, algorithm in config.used_algorithms.items():
        if algorithm.type != "supervised":
            yield f"{where}.type: a run of kind sft needs 'supervised'; it is {algorithm.type!r}"
    if any(item.type == "zero_advantage" and item.enforce for item in config.filtering.filters):
        yield "filtering.filters: 'zero_advantage' would leave out every demonstration; none of them has an advantage"
