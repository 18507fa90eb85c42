"""Classifies the failures of rollouts: whose fault it was, whether to try again, and what the user can do."""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADVICE = {
    re.compile(r"process_multimodal|multimodal(?! placeholders)|image_url"): (
        "the environment sends images, and the renderer of this model takes text alone: choose a model and "
        "`model.renderer` that take images, or an environment without them"
    ),
    re.compile(r"multimodal placeholders do not align|do not exactly extend the stored rollout prefix"): (
        "where the environment sends images: the policy has sampled a token that stands for one, and in the next turn "
        "the engine takes that for another image. The rollout cannot go on; the others are whole"
    ),
    re.compile(r"Unable to serialize unknown type"): (
        "what an environment puts on a trace or its state must survive JSON: numbers, text, lists and dictionaries"
    ),
    re.compile(r"OfflineModeIsEnabled|offline mode is enabled|outgoing traffic has been disabled"): (
        "HF_HUB_OFFLINE is set in this shell, so the Hugging Face hub is not asked, and its cache (HF_HOME) does not "
        "have this: unset HF_HUB_OFFLINE, or load it once where the hub can be asked and bring that cache here"
    ),
    re.compile(r"on the Hub \((?!OfflineMode)|check your connection|Check your internet connection"): (
        "the Hugging Face hub was not reached, and its cache (HF_HOME) does not have this: mend the network or "
        "HTTPS_PROXY, unset HF_HUB_OFFLINE where it is set, or bring the cache of a machine that has it"
    ),
    re.compile(r"on the Hub or cannot be accessed|is a gated (dataset|repo)"): (
        "where it is private or gated, set HF_TOKEN in this shell: processes of environments get it"
    ),
}
"""What the user can do, by a pattern in the error's text."""
INFRASTRUCTURE = frozenset({"SandboxError", "TunnelError", "InterceptionError", "ServerError"})
RETRYABLE_KINDS = frozenset({"infrastructure", "model", "timeout"})
STRAGGLER = "straggler"
"""The class of a rollout that did not fail: it was stopped because enough others had ended."""
STALE = "stale"
"""The class of a rollout that did not fail: it was too old for any step of its stream before one took its group."""
UNSCORED = "unscored"
"""The class of a rollout that did not fail: a judge whose score is a part of its reward gave none."""
GIVEN_UP = frozenset({STRAGGLER, STALE})
"""The classes of rollouts that did not fail and were not waited for."""
NON_FINITE = "NonFiniteReward"
"""The type of the error of a rollout whose reward is no finite number of float32."""
MAX_REWARD = 3.4028234663852886e38
"""The greatest finite number of float32, the type of advantages."""
TRANSPORT_STATUS = frozenset({408, 425, 429})
"""HTTP statuses below 500 that say nothing about the request itself: timeout, too early, too many requests."""
LIMITS = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})
"""Stop conditions by which the framework cuts a trace off."""
NO_ROOM = (
    "max_total_tokens: the prompt leaves no room for one. Raise engine.max_model_len, or what the seat sets as "
    "max_total_tokens, or shorten the prompt"
)
MALFORMED = re.compile(r"Engine response|MalformedGenerateResponse")


@dataclass(frozen=True)
class Failure:
    """A failed rollout: its class, the exception's type and message, and the traceback if there is one."""

    kind: str
    """infrastructure, timeout, model, environment, cancelled, incomplete, straggler or stale."""
    type: str
    message: str
    traceback: str | None = None

    @property
    def retryable(self) -> bool:
        """Whether another attempt may succeed: not where the environment's own code failed."""
        return self.kind in RETRYABLE_KINDS


_EMPTY = Failure("model", "EmptyResponse", "the model's responses hold no tokens")


def kind_of(error: Mapping[str, Any]) -> str:
    """Return the class of an error that verifiers recorded as type, message and status_code."""
    name, status = error["type"], error.get("status_code")
    if name == "TimeoutError":
        return "timeout"
    # Before the types: verifiers wraps an answer that the engine garbled in an error of the harness.
    if MALFORMED.search(error["message"]):
        return "model"
    if name == "ProviderError":
        # Without a status there was no answer at all.
        transport = status is None or status >= 500 or status in TRANSPORT_STATUS
        return "infrastructure" if transport else "model"
    return "infrastructure" if name in INFRASTRUCTURE else "environment"


def failure_of_error(error: Mapping[str, Any]) -> Failure:
    """Return the failure that verifiers recorded as type, message, status_code and traceback."""
    return Failure(kind_of(error), error["type"], add_advice(error["message"]), error.get("traceback"))


def failure_of_exception(error: Exception, where: str = "") -> Failure:
    """Return the failure of code that raised, called where the exception is handled; `where` begins its message."""
    name = type(error).__name__
    record = {"type": name, "message": where + (str(error) or name), "traceback": traceback.format_exc()}
    return failure_of_error(record)


def failure_of_trace(trace: Mapping[str, Any]) -> Failure | None:
    """Return what is wrong with a finished trace, given as JSON values; None where it can be trained on.

    A recorded error goes first: otherwise a rollout that died before its first model call would only count as empty.
    A seat that was never asked is no failure where the environment scored it, as when its opponent forfeits: it keeps
    its reward, and filtering leaves it out of training. One that a limit kept from its first reply is.
    """
    if not trace["ok"]:
        if trace["errors"]:
            return failure_of_error(trace["errors"][-1])
        return Failure("incomplete", "Incomplete", "the rollout ended without a result and without an error")
    if trace["is_timeout"]:
        return Failure("timeout", "TimeoutError", f"a stage of the rollout took too long: {trace['stop_condition']}")
    sampled = [node for node in trace["nodes"] if node["sampled"]]
    if not sampled:
        if not trace["rewards"] or trace.get("calls") or trace["stop_condition"] in LIMITS:
            why = NO_ROOM if trace["stop_condition"] == "max_total_tokens" else trace["stop_condition"]
            return Failure("incomplete", "NothingSampled", f"the model gave no reply: {why}")
    elif is_chat_only(trace):
        if not any(node["message"].get("content") or node["message"].get("tool_calls") for node in sampled):
            return _EMPTY
    elif not any(any(node["mask"]) for node in sampled):
        return _EMPTY
    return failure_of_rewards(trace["rewards"])


def is_chat_only(trace: Mapping[str, Any]) -> bool:
    """Tell whether a trace was sampled through a chat API, which shows text and no tokens; by its recorded client."""
    config = (trace.get("agent") or {}).get("config") or {}
    return (config.get("client") or {}).get("type") == "eval"


def failure_of_rewards(rewards: Mapping[str, Any]) -> Failure | None:
    """Return a failure where a reward is missing, not finite or beyond float32: none of these may reach a baseline."""
    if missing := [name for name, reward in rewards.items() if reward is None]:
        return Failure("incomplete", "NotScored", f"reward {missing[0]!r} was not computed")
    values = {f"reward {name!r}": reward["score"] * reward["weight"] for name, reward in rewards.items()}
    for name, value in [*values.items(), ("the sum of the rewards", sum(values.values()))]:
        if not abs(value) <= MAX_REWARD:  # false for NaN
            text = f"{name} is {value:g}, by its weight: it must be finite and at most {MAX_REWARD:g}"
            return Failure("environment", NON_FINITE, text)
    return None


def add_advice(message: str) -> str:
    """Return the message of an error, followed by what the user can do if that is known."""
    advice = [text for pattern, text in ADVICE.items() if pattern.search(message)]
    return "; ".join([message, *advice])
