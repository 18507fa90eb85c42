"""Records of made-up rollouts: the JSON that an environment's trace leaves beside its messages, in full length."""

import json
from functools import cache
from typing import Any

CALCULATOR = {
    "type": "function",
    "name": "calc",
    "namespace": None,
    "description": "Work out one operation.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    "strict": None,
}
_LIMITS = {"setup": None, "agent": None, "finalize": None, "scoring": None}
_NODE = {"advantages": None, "reference_logprobs": None, "trainer_logprobs": None, "entropies": None}
_CALL = {"model": "policy", "endpoint": "/chat/completions", "error": None, "policy": None, "acp": None}


def record(
    environment: str, example_id: str, seed: int, sampled: tuple[bool, ...], began: float, seconds: float
) -> str:
    """Return the record of one trace; `sampled` says of every message whether the policy wrote it."""
    task = f'{{"data":{{"prompt":{json.dumps(example_id)},"idx":{seed % 1000}}},"hash":"{seed:064x}"}}'
    pace = seconds / max(len(sampled), 1)
    nodes = ",".join(f'{{"timestamp":{began + pace * number:.3f},{_node()}' for number in range(len(sampled)))
    spans = {
        number: (began + pace * (number - 1), began + pace * number) for number, flag in enumerate(sampled) if flag
    }
    calls = ",".join(
        f'{{"node":{number},"time":{{"start":{start:.3f},"end":{end:.3f}}},{_call()}'
        for number, (start, end) in spans.items()
    )
    timing = f'{{"start":{began:.3f},"agent":{{"start":{began:.3f},"end":{began + seconds:.3f}}}}}'
    return f'{{"task":{task},"nodes":[{nodes}],"calls":[{calls}],"timing":{timing},{_rest(environment)}'


@cache
def _node() -> str:
    return json.dumps(_NODE | {"loss_weights": None, "semantic_parents": []}, separators=(",", ":"))[1:]


@cache
def _call() -> str:
    sampling = {"temperature": 1.0, "top_p": 1.0, "reasoning_effort": None, "max_tokens": 96}
    usage = {"prompt_tokens": None, "completion_tokens": None, "cached_input_tokens": None, "cost": None}
    return json.dumps(_CALL | {"sampling": sampling, "usage": usage}, separators=(",", ":"))[1:]


@cache
def _rest(environment: str) -> str:
    """Return what is the same in every record of an environment: mostly settings."""
    harness = {"id": "chat_loop", "env": {}, "forward_env": [], "tool_timeout": 600.0, "attempts": 2}
    client = {"base_url": "http://127.0.0.1:8000/v1", "headers": {}, "timeout": dict(_LIMITS), "type": "train"}
    config: dict[str, Any] = {"harness": harness, "runtime": {"type": "subprocess"}, "model": "policy"}
    config |= {"client": client, "max_turns": 8, "timeout": dict(_LIMITS), "retries": {"max_retries": 0, "rules": []}}
    same = {
        "version": 1,
        "verifiers": {"version": "0.4.0", "commit": None},
        "agent": {"config": config, "name": "agent", "trainable": True, "runtime": {"type": "subprocess"}},
        "tools": [CALCULATOR] if environment == "arithmetic" else [],
        "mm_token_type_id_map": {},
        "request_rewrites": [],
        "response_rewrites": [],
        "is_completed": True,
        "ok": True,
        "errors": [],
    }
    return json.dumps(same, separators=(",", ":"))[1:]
