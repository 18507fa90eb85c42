"""Low-rank adapters (LoRA), trained and stored in place of all weights, with peft's layers and in peft's format.

A policy of this kind is a directory with `adapter_config.json`, `adapter_model.safetensors` and `base.json`, which
names the policy below: the one whose frozen weights the adapter is added to.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.training import LoraConfig
from storage.policies.manifest import BASE_FILE, adapter_base
from tasks.learner.digest import over_base, tensors_sha256, weights_sha256
from tasks.learner.expert_adapters import NESTED, adapt_experts, stored_name
from tasks.learner.protocol import LearnerError
from tasks.learner.shards import EXPERTS

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
EXPERTS_NAME = EXPERTS.strip(".")
PREFIX = "base_model.model."
"""peft's prefix to the names that modules have in the model."""


@dataclass(frozen=True)
class Adapter:
    """An adapter and the frozen weights below it."""

    settings: LoraConfig
    base_key: str
    """Key of the policy below."""
    base_sha256: str
    base_directory: Path
    stored: Path | None
    """Directory of the adapter; None for a new one, whose product B A is still zero."""

    @property
    def weights_sha256(self) -> str:
        """The digest of the policy as stored; that of the base for a new adapter, which changes nothing yet."""
        return over_base(self.base_sha256, weights_sha256(self.stored)) if self.stored else self.base_sha256

    def sha256_of(self, values: dict[str, Tensor]) -> str:
        """Return the digest of the policy of the base and these unsharded tensors, by peft's names."""
        return over_base(self.base_sha256, tensors_sha256({name: value.numpy() for name, value in values.items()}))


def open_adapter(policy_key: str, directory: Path, base: Path | None, settings: LoraConfig | None) -> Adapter | None:
    """Return the adapter in `directory`, whose base is in `base`, or a new one over the weights in `directory`.

    None where neither an adapter is stored nor `settings` ask for one.

    Raises LearnerError where an adapter is stored and none is to be trained, where its base is not what it was trained
    on, or where its settings differ: its log-probs would not be the policy's.
    """
    if adapter_base(directory) is None:
        return Adapter(settings, policy_key, _base_digest(directory), directory, None) if settings else None
    base_info, stored = (json.loads((directory / name).read_text()) for name in (BASE_FILE, CONFIG_FILE))
    merge = "export it merged (stagecoach export RUN --format weights --to DIR) and start from that (model.path=DIR)"
    if settings is None or (stored["r"], stored["lora_alpha"]) != (settings.rank, settings.alpha):
        raise LearnerError(
            f"{directory} is an adapter of rank {stored['r']} and alpha {stored['lora_alpha']:g}, which is not what "
            f"training.lora says; nothing was loaded. Train it with its own settings, or {merge}"
        )
    digest = _base_digest(base) if base else "none"
    if base is None or digest != base_info["weights_sha256"]:
        raise LearnerError(
            f"the adapter in {directory} was trained on weights {base_info['weights_sha256'][:12]}, and {base} holds "
            f"{digest[:12]}; nothing was loaded. Put policy {base_info['policy_key']} back from a copy"
        )
    return Adapter(settings, base_info["policy_key"], digest, base, directory)


def attach(causal: Any, adapter: Adapter, stored: dict[str, Any]) -> None:
    """Freeze a model on the meta device, that is not sharded yet, and put the adapter into it, on the CPU.

    What the model is read from, by name, gets the adapter's values, and the names that weights have below it.

    A new one is initialised from the seed of its settings alone. Raises LearnerError when the model has no linear map
    of a name in the settings, when a name is that of its embedding or its output head, or when the stored adapter is
    for other modules.
    """
    from peft import inject_adapter_in_model

    wanted, settings = adapter.settings.target_modules, _for_peft(causal, adapter.settings, stored)
    fused = [module for name, module in causal.named_modules() if _is_experts(name, module, wanted)]
    # An adapter is put where the weight below it is. For as long, that is a number on the CPU in its place.
    base = [(module, *named) for module in causal.modules() for named in module.named_parameters(recurse=False)]
    for module, name, parameter in base:
        setattr(module, name, nn.Parameter(torch.zeros(()).expand(parameter.shape)))
    # From a seed of its own: where an adapter begins must not depend on what drew random numbers before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            if settings.target_modules:
                inject_adapter_in_model(_peft_config(settings), causal)
        except ValueError as error:
            raise LearnerError(f"training.lora.target_modules: {error}") from error
        for module in fused:
            adapt_experts(module, settings.rank, settings.alpha / settings.rank)
    for module, name, parameter in base:
        setattr(module, name, parameter.requires_grad_(False))
    names = {name.rpartition(".")[2]: name for name in wanted} if isinstance(wanted, tuple) else {}
    absent = [names[name] for name in names.keys() - {*_module_names(tensors(causal))}]
    if absent:
        raise LearnerError(f"training.lora.target_modules: no linear map is named {', '.join(sorted(absent))}")
    # By module and not by name: families name their embedding and head differently.
    if any(hasattr(edge, "lora_A") for edge in (causal.get_input_embeddings(), causal.get_output_embeddings())):
        raise LearnerError(
            f"training.lora.target_modules: {', '.join(wanted)} has the embedding or the output head in it, which "
            "cannot have an adapter; nothing was loaded. Name maps of the layers alone, or take all-linear"
        )
    if adapter.stored:
        _load_values(causal, adapter.stored)
    for name, parameter in causal.named_parameters():
        below = name.replace(".base_layer.", ".")
        if parameter.requires_grad:
            stored[name] = parameter.detach()
        elif below in stored:
            stored[name] = stored.pop(below)


def _for_peft(causal: Any, settings: LoraConfig, stored: dict[str, Any]) -> LoraConfig:
    """Return settings of the linear maps alone; raises LearnerError where one is an expert's."""
    wanted = settings.target_modules
    experts = {name.removesuffix(".weight").rpartition(".")[2] for name in stored if EXPERTS in name}
    if wanted == "all-linear":
        if not experts:
            return settings
        # peft would take experts and routers for linear maps
        linear = (name for name, module in causal.get_decoder().named_modules() if isinstance(module, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in linear} - experts)
    else:
        names = [name for name in wanted if not name.endswith(EXPERTS_NAME)]
    if fused := experts & {*wanted}:
        raise LearnerError(
            f"training.lora.target_modules: {', '.join(sorted(fused))} are maps of experts, which are fused here; "
            "nothing was loaded. Name their module, mlp.experts, or maps of attention; all-linear leaves experts"
        )
    return settings.model_copy(update={"target_modules": tuple(names)})


def tensors(causal: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors by the names that peft stores them under, sharded as they are."""
    # peft calls the one adapter of a model `default` in memory and leaves that word out of its files.
    trained = ((name, parameter) for name, parameter in causal.named_parameters() if parameter.requires_grad)
    return {PREFIX + stored_name(name).replace(".default.", "."): parameter.detach() for name, parameter in trained}


def write(directory: Path, values: dict[str, Tensor], adapter: Adapter) -> None:
    """Write unsharded tensors, by peft's names, as an adapter, with the name and digest of its base."""
    from safetensors.torch import save_file

    whole = {name: value.contiguous() for name, value in values.items()}
    save_file(whole, directory / WEIGHTS_FILE, {"format": "pt"})
    config = _peft_config(adapter.settings).to_dict()
    config |= {
        # By name also where all linear maps are adapted: what counts as one differs between versions of peft.
        "target_modules": [name for name in _module_names(values) if name != EXPERTS_NAME],
        "base_model_name_or_path": adapter.base_key,
        "inference_mode": True,
    }
    if EXPERTS_NAME in _module_names(values):
        config["target_parameters"] = [f"{EXPERTS_NAME}.{matrix}" for matrix in NESTED]
    _write_json(directory / CONFIG_FILE, config)
    _write_json(directory / BASE_FILE, {"policy_key": adapter.base_key, "weights_sha256": adapter.base_sha256})


@torch.no_grad()
def _load_values(causal: nn.Module, directory: Path) -> None:
    from safetensors.torch import load_file

    values, own = load_file(directory / WEIGHTS_FILE), tensors(causal)
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in own.items()}:
        raise LearnerError(
            f"the adapter in {directory} is for the modules {_module_names(values)}, training.lora for "
            f"{_module_names(own)}; nothing was loaded. Train it with its own settings"
        )
    for name, value in own.items():
        value.copy_(values[name])


def _base_digest(directory: Path) -> str:
    try:
        return weights_sha256(directory)
    except ValueError as error:
        raise LearnerError(f"{directory} is not a model directory: {error}; nothing was loaded") from error


def _module_names(values: dict[str, Tensor]) -> list[str]:
    """Return the last parts of the names of the modules that have an adapter."""
    modules = (name.partition(".lora_")[0].removesuffix(".base_layer") for name in values)
    return sorted({module.rpartition(".")[2] for module in modules})


def _is_experts(name: str, module: nn.Module, wanted: str | tuple[str, ...]) -> bool:
    """Whether a module has matrices of experts, and is named for adapters."""
    names = tuple(each for each in wanted if each.endswith(EXPERTS_NAME)) if isinstance(wanted, tuple) else ()
    return name.endswith(names) and any(weight.ndim == 3 for weight in module.parameters(recurse=False))


def _peft_config(settings: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    modules: Any = settings.target_modules
    return PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type] # divided by the rank, whole or not
        # Like all dropout here: the log-probs of the update must be those of the published policy.
        lora_dropout=0.0,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type=TaskType.CAUSAL_LM,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # Sorted, because peft keeps sets in its config: equal adapters have equal files.
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=sorted) + "\n")
