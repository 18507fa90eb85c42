"""The gap between the log-probs of engine and learner in a run, split by properties of tokens, and its likely cause."""

from typing import Any

from configs.run import RunConfig
from flows.queries.step_history import StepHistory
from flows.queries.store_reader import StoreReader
from flows.queries.views import select

ROUNDING = 1e-7
"""Mean mismatch KL below which engine and learner differ by rounding in float32 alone."""
MIN_TOKENS = 50
"""Tokens of a value that count for a cause."""
FACTOR = 3.0
"""A value has a cause where its mean is so many times that of the first value of its split."""
CAUSES = {
    "age": "tokens of older policies differ more: the age of the policy (rollout.max_off_policy_steps)",
    "branches": "rollouts of several branches differ more: turns tokenised again, or contexts that were edited",
    "token": "the first token of a turn differs from later ones: the learner has another text before the turn",
    "turn": "later turns differ more: the engine's prefix cache, or turns that were tokenised again",
    "position": "later positions differ more: windows, positions or kernels of long contexts",
    "engine": "one engine differs from the others (one that was started again has another address): weights or kernels",
}
"""By split, in the order in which they are looked for, what it means that values differ."""
ROUTES = "engine and learner may choose other experts (training.router_replay=rollout records and replays the choice)"


def mismatch(reader: StoreReader, run: str, config: RunConfig) -> dict[str, Any]:
    """Return rows of view `mismatch_splits` of a run, the precisions, and the likely cause, by the rule of `cause`."""
    lineages = StepHistory(reader.frames(run).graph, run).lineages
    rows = select(reader.frames(run), lineages, "select * exclude run from mismatch_splits").to_dicts()
    engine, training = config.engine, config.training
    precision = {"engine": engine.quantization or engine.dtype, "learner": "fp8" if training.fp8 else training.dtype}
    return {"run": run, "precision": precision, "splits": rows, "cause": cause(rows, config)}


def cause(rows: list[dict[str, Any]], config: RunConfig) -> str:
    """Return the likely cause: rounding, the first split of CAUSES with a value FACTOR apart, or precision."""
    splits: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        splits.setdefault(row["split"], []).append(row)
    if not splits:
        return "no sampled token was trained on yet"
    whole = splits["token"]
    mean = sum(row["mismatch_kl"] * row["num_tokens"] for row in whole) / sum(row["num_tokens"] for row in whole)
    if mean < ROUNDING:
        return "none: the difference is rounding in float32"
    for split, text in CAUSES.items():
        means = [max(row["mismatch_kl"], ROUNDING) for row in splits[split] if row["num_tokens"] >= MIN_TOKENS]
        if split == "token":
            means.reverse()  # first tokens against later ones
        if split == "engine":
            means.sort()
        if max(means, default=0.0) > FACTOR * next(iter(means), 0.0):
            return text
    replays = config.training.router_replay == "rollout"
    return "precision: all tokens differ alike" + ("" if replays else f"; of a model with experts, {ROUTES}")
