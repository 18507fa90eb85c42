"""Events of a run for automations in Prefect: a policy, an evaluation, a gate that waits, a warning, the end.

Prefect's own thread sends them. A run without a Prefect server has none, and an event that cannot be sent is a line in
the log: nothing waits for one.
"""

import logging
from collections.abc import Mapping
from typing import Any

from flows.orchestration.server import current_flow_run, one_line
from flows.reporting.formats import describe_scores
from tasks.runtime.prefect_task import describe_ref

POLICY = "stagecoach.policy.published"
EVALUATION = "stagecoach.evaluation.finished"
GATE = "stagecoach.gate.waiting"
WARNING = "stagecoach.run.warning"
FINISHED = "stagecoach.run.finished"
"""Each event has a `message` in its payload, and run and store."""
MAKERS = ("policy_import", "training")
"""The stages whose work is a policy."""
Facts = Mapping[str, Any]
_log = logging.getLogger("stagecoach")


class EventWatcher:
    """Sends what happens to a run as events of Prefect."""

    def __init__(self, run: str, store: str) -> None:
        self._run, self._store = run, store

    def __call__(self, event: str, facts: Facts) -> None:
        """Send the event that something makes, if it makes one."""
        if current_flow_run() is None:
            return
        match event:
            case "done":
                self._send_policy(facts)
            case "evaluation":
                self._send_scores(facts)
            case "gate":
                self._send(GATE, facts["text"], {"step": facts["step"]})
            case "warning":
                self._send(WARNING, facts["text"], {name: facts[name] for name in ("step", "rule", "where")})
            case "end":
                self._send(FINISHED, facts["text"], {"ending": facts["ending"]})

    def _send_policy(self, facts: Facts) -> None:
        ref = facts["ref"]
        if ref.stage not in MAKERS:
            return
        version = ref.step + 1 if ref.stage == "training" else 0
        about = {"key": ref.key, "version": version, "policy": f"{self._run}:{version}"}
        self._send(POLICY, f"policy {self._run}:{version}: {describe_ref(ref)}", about, f"policy.{ref.key}")

    def _send_scores(self, facts: Facts) -> None:
        if facts["computed"]:
            scores = "; ".join(f"{each['environment']}: {describe_scores(each)}" for each in facts["scores"])
            about = {name: facts[name] for name in ("version", "set", "scores")}
            self._send(EVALUATION, f"policy {self._run}:{facts['version']} on held-out examples: {scores}", about)

    def _send(self, event: str, message: str, about: Facts, what: str = "") -> None:
        from prefect.events import emit_event

        name = about.get("policy", self._run)
        resource = {"prefect.resource.id": f"stagecoach.{what or f'run.{self._run}'}", "prefect.resource.name": name}
        payload = {"run": self._run, "store": self._store, "message": message, **about}
        try:
            emit_event(event, resource=resource, payload=payload)
        except Exception as problem:  # the border at which an API failure is only logged: no run depends on an event
            _log.warning("the event %s was not sent to Prefect: %s", event, one_line(problem))
