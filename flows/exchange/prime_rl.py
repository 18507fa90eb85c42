"""Settings that are computed from prime-rl's keys; those that only have another name are in prime_rl.toml.

Tables are carried with their unknown keys, which RunConfig refuses with the nearest key that it has.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flows.exchange.foreign_keys import SAMPLE, ForeignKeys, NoCounterpart, quotient, rename

SOURCES = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")
"""Lists of the environments of training, today and earlier."""
AGENT = {"harness", "runtime", "max_turns", "sampling", "timeout", "model", "client", "retries"}
"""Settings by which an agent's table is known among those of an environment."""
FALLBACK = ("serve", "sampling")
"""Tables of an environment whose keys are settings of the environment here."""
ALGORITHM = {"demo_key": "demonstration", "filter": "keep_mask"}
PENALTY = {"num_output_tokens_weight": "output", "num_input_tokens_weight": "input", "num_turns_weight": "turns"}
LOSS = {"dppo_mask_low": "mask_low", "dppo_mask_high": "mask_high", "ipo_threshold": "threshold"}
RAE = {"decay": 0.95, "key": "agent", "order": "pre"}
"""The defaults of prime-rl and of SPIRAL's authors, which are not those here."""


def _model_len(keys: ForeignKeys) -> int:
    """Return the engine's limit, and no more than the orchestrator keeps of a sample."""
    engine = keys.first("inference.vllm.max_model_len", "inference.model.max_model_len")
    kept = int(keys.get("orchestrator.seq_len", keys.get("seq_len", 2048)))
    return min(int(engine), kept) if engine and "orchestrator.seq_len" in keys else int(engine or kept)


def _groups_per_step(keys: ForeignKeys) -> int:
    size = int(keys.first("orchestrator.group_size", "orchestrator.rollouts_per_example"))
    return quotient(int(keys["orchestrator.batch_size"]), size, "rollouts are no whole number of groups")


def _max_tokens(keys: ForeignKeys) -> int:
    """Return the limit of a reply, which leaves room for a prompt."""
    sections = ("orchestrator.train.sampling", "orchestrator.sampling")
    limits = [keys.first(f"{section}.max_completion_tokens", f"{section}.max_tokens") for section in sections]
    limit, longest = int(limits[0] or limits[1] or 0), _model_len(keys)
    return limit if 0 < limit < longest else longest // 2


def _staleness(keys: ForeignKeys) -> int:
    level = keys.first("max_async_level", "orchestrator.max_async_level", "trainer.max_async_level")
    return int(keys["orchestrator.max_off_policy_steps"] if level is None else level)


def _algorithm(table: Mapping[str, Any]) -> dict[str, Any]:
    if not table:
        raise NoCounterpart("the algorithm is named by orchestrator.algo in newer versions, here by algorithm.type")
    kind, frozen = str(table.get("type", "grpo")), table.get("teacher") or (table.get("sampling") or {}).get("source")
    inner = ("roles", "teacher", "sampling", "length_penalty")
    algorithm = {"type": kind} | (RAE if kind == "rae" else {}) | rename(table, ALGORITHM, inner)
    algorithm |= table.get("roles") or {}
    if isinstance(frozen, Mapping):
        # Scoring is no part of the chat API, so that the address here is that of the server.
        url = str(frozen.get("base_url", "")).removesuffix("/").removesuffix("/v1")
        algorithm["teacher"] = {"url": url, **rename(frozen, {}, ("base_url",))}
    if penalty := table.get("length_penalty"):
        algorithm["length_penalty"] = rename(penalty, PENALTY, ("type",))
    return algorithm


def _optimizer(keys: ForeignKeys) -> dict[str, Any]:
    kind, momentum = keys["trainer.optim.type"] or "adamw", keys["trainer.optim.mu"]
    if kind == "sign_sgd":  # the sign of the gradient itself
        momentum = 0.0
    return {"type": kind} | ({"momentum": momentum} if momentum is not None and kind != "adamw" else {})


def _schedule(keys: ForeignKeys) -> dict[str, Any]:
    table = keys.section("trainer.scheduler")
    kind, steps = table.get("type", "constant"), int(table.get("decay_steps", 10))
    floor = {"min_ratio": float(table["min_lr"]) / float(keys["trainer.optim.lr"])} if table.get("min_lr") else {}
    if kind == "linear" and steps:
        return {"type": "wsd", "final_steps": steps, "shape": "linear", **floor}
    return {"type": "cosine", **floor} if kind == "cosine" else {"type": "constant"}


def _decay_steps(keys: ForeignKeys) -> int | None:
    if _schedule(keys)["type"] == "constant":
        return None
    if (steps := keys.first("max_steps", "orchestrator.max_steps", "trainer.max_steps")) is None:
        raise NoCounterpart("the rate falls until max_steps, which is not given: set training.decay_steps")
    return int(steps)


def _warmup_steps(keys: ForeignKeys) -> int | None:
    """Return the steps of warm-up: without a number ten, and none of a constant rate."""
    table = keys.section("trainer.scheduler")
    return None if table.get("type", "constant") == "constant" else int(table.get("warmup_steps", 10))


def _loss(keys: ForeignKeys) -> dict[str, Any]:
    table = keys.section("trainer.loss")
    kind = table.get("type", "default")
    if kind not in ("default", "ipo"):
        raise NoCounterpart("a function of your own takes other arguments here; see docs/extending.md, or the losses")
    return rename(table, LOSS) | {"type": "dppo" if kind == "default" else "ipo"}


def _tracking(keys: ForeignKeys) -> dict[str, Any]:
    project = keys.first("monitors.wandb.project", "wandb.project", "orchestrator.monitors.wandb.project")
    settings = {"type": "wandb", "project": project, "tags": keys["wandb.tags"]}
    return {name: value for name, value in settings.items() if value is not None}


def _environments(keys: ForeignKeys) -> list[dict[str, Any]]:
    """Return the environments of training; where none is named, the rows of a file."""
    return [_environment(source) for place in SOURCES for source in keys.section(place)] or SAMPLE


def _environment(source: Mapping[str, Any]) -> dict[str, Any]:
    env = dict(source.get("env") or {})
    # Earlier versions: the package's id and the arguments of its load_environment, or taskset and harness at the top.
    taskset = env.pop("taskset", source.get("taskset")) or {"id": source.get("id", ""), **(source.get("args") or {})}
    agents = {name: env.pop(name) for name in [*env] if isinstance(env[name], Mapping) and {*env[name]} & AGENT}
    agents |= {"agent": {"harness": source["harness"]}} if "harness" in source else {}
    environment = {"name": taskset["id"], "taskset": dict(taskset)} | ({"env": env} if env else {}) | _seats(agents)
    for table in FALLBACK:
        environment |= source.get(table) or {}
    inner = ("env", "taskset", "id", "args", "harness", "curriculum", "algo", *FALLBACK)
    environment |= rename(source, {"ratio": "weight"}, inner)
    return environment | ({"algorithm": _algorithm(source["algo"])} if "algo" in source else {})


def _seats(agents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the agents: of all where they agree, else of each seat."""
    seats = {name: _seat(agent) for name, agent in agents.items()}
    first = next(iter(seats.values()), {})
    return first if all(seat == first for seat in seats.values()) else {"seats": seats}


def _seat(agent: Mapping[str, Any]) -> dict[str, Any]:
    harness = dict(agent.get("harness") or {})
    runtime = harness.pop("runtime", None)
    runtime = agent.get("runtime") or runtime
    settings = {
        "harness": None if harness.get("id") == "null" else harness,  # the default here plays alike
        "runtime": None if runtime == {"type": "subprocess"} else runtime,
    }
    return rename({name: value for name, value in {**agent, **settings}.items() if value}, {}, ("timeout",))


COMPUTED: Mapping[str, Callable[[ForeignKeys], Any]] = {
    # `auto` goes by the model's name, as an empty one here.
    "model.renderer": lambda keys: keys["orchestrator.renderer.name"].replace("auto", "") or None,
    "model.renderer_settings": lambda keys: rename(keys.section("orchestrator.renderer"), {}, ("name",)) or None,
    "environments": _environments,
    "assignment.groups_per_step": _groups_per_step,
    "rollout.max_tokens": _max_tokens,
    "rollout.max_off_policy_steps": _staleness,
    "engine.max_model_len": _model_len,
    "algorithm": lambda keys: _algorithm(keys.section("orchestrator.algo")),
    "packing.tokens_per_row": lambda keys: max(int(keys.first("trainer.model.seq_len", "seq_len")), _model_len(keys)),
    "packing.zero_advantages": lambda keys: not keys["orchestrator.train.filter_zero_advantages"],
    "training.betas": lambda keys: [keys["trainer.optim.betas1"], keys["trainer.optim.betas2"]],
    "training.optimizer": _optimizer,
    "training.schedule": _schedule,
    "training.decay_steps": _decay_steps,
    "training.warmup_steps": _warmup_steps,
    "training.loss": _loss,
    "training.gradient_checkpointing": lambda keys: True,
    "training.offload_activations": lambda keys: True,
    "training.lora": lambda keys: keys.section("trainer.model.lora"),
    "tracking": _tracking,
}
