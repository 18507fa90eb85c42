"""Low-rank adapters: what is trained and stored in place of all weights, in peft's own format.

The layers are peft's. A policy of this kind is a directory with `adapter_config.json`, `adapter_model.safetensors` and
`base.json`, which names the policy whose weights the adapter is laid over.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.lora import LoraConfig
from storage.policies.adapters import BASE_FILE, base_in
from tasks.learner.digest import over_base, tensors_sha256, weights_sha256
from tasks.learner.errors import LearnerError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the name that a module has in the model."""


@dataclass(frozen=True)
class Adapter:
    """An adapter and the frozen weights that it is laid over."""

    settings: LoraConfig
    base_key: str
    """Key of the policy below."""
    base_sha256: str
    base_directory: Path
    stored: Path | None
    """Directory of the adapter; None for one that changes nothing yet."""

    @property
    def weights_sha256(self) -> str:
        """The digest of the policy as it was stored; that of the base where nothing is changed yet."""
        return over_base(self.base_sha256, weights_sha256(self.stored)) if self.stored else self.base_sha256

    def sha256_of(self, values: dict[str, Tensor]) -> str:
        """Return the digest of the policy that whole tensors, by peft's names, make of the base."""
        return over_base(self.base_sha256, tensors_sha256({name: value.numpy() for name, value in values.items()}))


def opened(policy_key: str, directory: Path, base: Path | None, settings: LoraConfig | None) -> Adapter | None:
    """Return the adapter in `directory`, whose base lies in `base`, or a new one on the weights there; None for none.

    Raises LearnerError when an adapter is there and none is to be trained, when its base is not what it was trained on,
    or when its settings are others: its log-probs would not be the policy's.
    """
    if base_in(directory) is None:
        return Adapter(settings, policy_key, _digest(directory), directory, None) if settings else None
    named, stored = (json.loads((directory / name).read_text()) for name in (BASE_FILE, CONFIG_FILE))
    merge = "export it merged (stagecoach export RUN --format weights --to DIR) and start from that (model.path=DIR)"
    if settings is None or (stored["r"], stored["lora_alpha"]) != (settings.rank, settings.alpha):
        raise LearnerError(
            f"{directory} is an adapter of rank {stored['r']} and alpha {stored['lora_alpha']:g}, which is not what "
            f"training.lora says; nothing was loaded. Train it with its own settings, or {merge}"
        )
    found = _digest(base) if base else "none"
    if base is None or found != named["weights_sha256"]:
        raise LearnerError(
            f"the adapter in {directory} was trained on weights {named['weights_sha256'][:12]}, and {base} holds "
            f"{found[:12]}; nothing was loaded. Put policy {named['policy_key']} back from a copy"
        )
    return Adapter(settings, named["policy_key"], found, base, directory)


def attach(causal: Any, adapter: Adapter) -> None:
    """Freeze a model that is not sharded yet and put the adapter into it.

    A new one is drawn from the seed of its settings alone. Raises LearnerError when the model has no linear map of a
    name in the settings, when a name is that of its embedding or its output head, whatever the family calls them, or
    when the stored adapter is for other modules.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapter.settings.seed)
        try:
            inject_adapter_in_model(_peft_config(adapter.settings), causal)
        except ValueError as error:
            raise LearnerError(f"training.lora.target_modules: {error}") from error
    wanted = adapter.settings.target_modules
    absent = {*wanted} - {*_modules(tensors(causal))} if isinstance(wanted, tuple) else set()
    if absent:
        raise LearnerError(f"training.lora.target_modules: no linear map is named {', '.join(sorted(absent))}")
    if any(hasattr(edge, "lora_A") for edge in (causal.get_input_embeddings(), causal.get_output_embeddings())):
        raise LearnerError(
            f"training.lora.target_modules: {', '.join(wanted)} has the embedding or the output head in it, which "
            "cannot have an adapter; nothing was loaded. Name maps of the layers alone, or take all-linear"
        )
    if adapter.stored:
        _fill(causal, adapter.stored)


def tensors(causal: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors by the names that peft stores them under, laid out over the ranks as they are."""
    trained = ((name, parameter) for name, parameter in causal.named_parameters() if parameter.requires_grad)
    return {PREFIX + name.replace(".default.", "."): parameter.detach() for name, parameter in trained}


def write(directory: Path, values: dict[str, Tensor], adapter: Adapter) -> None:
    """Write whole tensors, by peft's names, as an adapter, with a note of its base."""
    from safetensors.torch import save_file

    whole = {name: value.contiguous() for name, value in values.items()}
    save_file(whole, directory / WEIGHTS_FILE, {"format": "pt"})
    config = _peft_config(adapter.settings).to_dict()
    config |= {"target_modules": _modules(values), "base_model_name_or_path": adapter.base_key, "inference_mode": True}
    _write_json(directory / CONFIG_FILE, config)
    _write_json(directory / BASE_FILE, {"policy_key": adapter.base_key, "weights_sha256": adapter.base_sha256})


@torch.no_grad()
def _fill(causal: nn.Module, directory: Path) -> None:
    from safetensors.torch import load_file

    values, own = load_file(directory / WEIGHTS_FILE), tensors(causal)
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in own.items()}:
        raise LearnerError(
            f"the adapter in {directory} is for the modules {_modules(values)}, training.lora for {_modules(own)}; "
            "nothing was loaded. Train it with its own settings"
        )
    for name, value in own.items():
        value.copy_(values[name])


def _digest(directory: Path) -> str:
    try:
        return weights_sha256(directory)
    except ValueError as error:
        raise LearnerError(f"{directory} is not a model directory: {error}; nothing was loaded") from error


def _modules(values: dict[str, Tensor]) -> list[str]:
    """Return the last parts of the names of the modules that have an adapter."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in values})


def _peft_config(settings: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    modules: Any = settings.target_modules
    return PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type] # divided by the rank, whole or not
        lora_dropout=0.0,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type=TaskType.CAUSAL_LM,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=sorted) + "\n")
