"""Two runs side by side: what they are, whether they are the same work, where they part, and what came of both."""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.viewer import addresses
from flows.viewer.data.compare import FIGURES, compared, compared_evaluations, figures_of
from flows.viewer.data.compare_told import picture, replays, told
from flows.viewer.data.retired import retired_of
from flows.viewer.library import Library
from flows.viewer.page import Asked, Crumb, Page
from flows.views.show import GOING, process_gone
from tasks.metrics.figures import MEANINGS

LINES = {
    "reward_mean": "Reward, mean",
    "reward_std": "Reward, spread",
    "num_kept": "Rollouts kept",
    "output_tokens_mean": "Sampled tokens a rollout",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "entropy": "Entropy",
    "mismatch_kl": "Mismatch KL",
    "masked_fraction": "Masked share",
}
"""What is drawn of both runs, by figure."""
LONG_CONFIG = 8
"""Settings that differ beyond which they are folded."""


def page(library: Library, asked: Asked) -> Page:
    """Return the comparison of two runs; `figure` is the further figure that is told of each step."""
    a, b = asked.path["a"], asked.path["b"]
    figure = asked.one_of("figure", FIGURES, "num_kept")
    found = compared(library, a, b)
    values = {
        **found,
        "retired": retired_of(library, a, b),
        "a": a,
        "b": b,
        "told": told(found),
        "parts_at": found["parting"] and found["parting"]["step"],
        "replays": replays(library, a, b, found["config"]),
        "config": sorted(found["config"], key=lambda each: not each["in_keys"]),
        "long_config": len(found["config"]) > LONG_CONFIG,
        "picture": picture(found["pieces"]),
        "charts": charts(a, b, found["steps"]),
        "across": [_across(a, b, each["step"]) for each in found["steps"]],
        "figure": figure,
        "figures": list(FIGURES),
        "meanings": MEANINGS,
        "totals": figures_of(found["together"]),
        "paired": compared_evaluations(library, a, b).to_dicts(),
    }
    return Page("compare.html", f"{a} and {b}", values, (Crumb(a, addresses.run(a)),), is_going(library, a, b))


def is_going(library: Library, *runs: str) -> bool:
    """Say whether one of some runs is going on, as far as can be seen from here."""
    last = [library.store.runs.events(run)[-1] for run in runs]
    return any(event.event in GOING and not process_gone(event) for event in last)


def charts(a: str, b: str, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is drawn: for each figure that either run has, the values of both by step; None is a gap."""
    found = []
    for name, title in LINES.items():
        one, other = ([each[side].get(name) for each in steps] for side in "ab")
        if any(value is not None for value in (*one, *other)):
            series = [_series("a", a, one), _series("b", b, other)]
            found.append({"figure": name, "title": title, "series": series, "same": one == other})
    return found


def _series(side: str, run: str, values: Sequence[float | None]) -> dict[str, Any]:
    last = next((value for value in reversed(values) if value is not None), None)
    return {"name": f"{side}: {run}", "values": values, "last": last}


def _across(a: str, b: str, step: int) -> dict[str, Any]:
    return {"step": step, "address": addresses.compare_step(a, b, step), "finished": True}
