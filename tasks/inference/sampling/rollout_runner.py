"""RolloutRunner: the rollout of one assignment: the request to its environment server, retries, and its rows.

BatchSampler makes one for a batch, and ServerPool calls it in the sampler's event loop, once for each placement. An
assignment ends as rows whatever happens: a rollout that fails is a row with its error. Only the loss of a service is
raised, because it is no rollout's fault.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from storage.turns import CachedTurn, TurnCache
from tasks.inference.engine.client import OF_POLICY, POLICIES_HEADER, ServedModel, sampled_by
from tasks.inference.environments.agent_runs import add_header
from tasks.inference.sampling.bindings import SeatBindings
from tasks.inference.sampling.crash_isolation import InFlightRollout
from tasks.inference.sampling.episode_rows import Rows, episode_rows
from tasks.inference.sampling.lost_servers import ServiceWatch
from tasks.inference.sampling.model_requests import api_address, client_config, sampling_config, sampling_of
from tasks.inference.sampling.seats import SeatClient, Seats
from tasks.inference.sampling.server_pool import ServerPool
from tasks.inference.trace_rows.failures import Failure, failure_of_error, failure_of_exception
from tasks.inference.trace_rows.rows import (
    TURNS_FIELD,
    RolloutOrigin,
    Row,
    UnattributedTokens,
    row_without_trace,
)
from tasks.runtime.refs import Policy

if TYPE_CHECKING:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.types import SamplingConfig

    from configs.run import View

RETRY_SEED_STRIDE = 1_000_003
"""Between the seeds of two attempts: a prime, far from the stride between the seats of an episode."""
RETRY_SECONDS = 0.25
"""Wait before the second attempt; it doubles with each further one."""
NO_KEY = "EMPTY"


class RolloutRunner:
    """Runs assignments with the model that samples their environment, and retries what may go better."""

    def __init__(
        self,
        served: Mapping[str, ServedModel],
        servers: ServerPool,
        watch: ServiceWatch,
        policy: Policy,
        step: int,
        config: "View",
        versions: dict[str, int] | None = None,
        turns: TurnCache | None = None,
    ) -> None:
        self.served = dict(served)
        """The sampling model by environment; the policy under OF_POLICY, frozen seats under `seats.seat_model_name`."""
        self.servers, self.watch = servers, watch
        self.policy = policy
        self.versions = {} if versions is None else versions
        """Of the policies that may have sampled here, by key; none where it is this one alone."""
        self.step = step
        self.config = config
        self.environments = {environment.name: environment for environment in config.environments}
        # A teacher without a key must not be sent the key that environment servers have for the policy's engine.
        self.client_configs = {
            name: client_config(model, config, NO_KEY if name else "") for name, model in served.items()
        }
        if versions is not None:  # weights are exchanged under rollouts, whose tokens are then of several policies
            versions.setdefault(policy.key, policy.version)
            client = self.client_configs[OF_POLICY]
            headers = {**client.headers, POLICIES_HEADER: "1"}
            self.client_configs[OF_POLICY] = client.model_copy(update={"headers": headers})
        self.bindings = SeatBindings(config.environments, step)
        self.oldest: dict[str, int | None] = {}
        """By group, the oldest version of policies whose turns it may use; None for those of its own policy alone."""
        self.unproven: list[CachedTurn] | None = None
        """The turns that came since weights began to be exchanged: they may be of wrong ones; None at other times."""
        self._turns = turns

    def begin_exchange(self) -> None:
        """Keep no further turn until the engine is known to serve the right weights."""
        self.unproven = []

    def end_exchange(self) -> None:
        """Keep the turns that came meanwhile: the weights that sampled them are the right ones."""
        for turn in self.unproven or ():
            assert self._turns is not None, "turns come where they are kept"
            self._turns.put(turn)
        self.unproven = None

    def update_weights(self, policy: Policy, served: ServedModel) -> None:
        """Continue with another policy: it samples the rest of rollouts in flight, and all of those that begin."""
        self.policy = policy
        self.versions[policy.key] = policy.version
        self.served[OF_POLICY] = served

    async def run(self, assignment: Row, task: dict[str, Any], placed: InFlightRollout) -> Rows:
        """Return the rows of one assignment, within rollout.timeout_seconds.

        Raises ServiceLost, and ServerGone where the environment has other servers, and nothing else.
        """
        started, clock = time.time(), time.monotonic()
        seconds = self.config.rollout.timeout_seconds
        try:
            # One limit over all attempts: a rollout that is tried again has no more time than any other.
            async with asyncio.timeout(None) as limit:
                timer = asyncio.create_task(self._time_out(limit, seconds))
                try:
                    return await self._run_attempts(self._origin(assignment), task, placed, started)
                finally:
                    timer.cancel()
        except TimeoutError:
            message = f"the rollout took longer than rollout.timeout_seconds = {seconds:g}"
            failure = Failure("timeout", "TimeoutError", message)
        return self.rows_without_trace(assignment, failure, started, time.monotonic() - clock)

    async def _time_out(self, limit: asyncio.Timeout, seconds: float) -> None:
        """Let a time limit end after `seconds` of the watch's clock, and not while an engine does not answer."""
        clock = self.watch.clock
        end = clock.now() + seconds
        while (left := end - clock.now()) > 0 or not await self.watch.engines_answer():
            await asyncio.sleep(max(left, 0.0))
        limit.reschedule(asyncio.get_running_loop().time())

    def rows_without_trace(
        self, assignment: Mapping[str, Any], failure: Failure, started: float, seconds: float
    ) -> Rows:
        """Return the rows of an assignment that left nothing but a failure."""
        return [row_without_trace(failure, self._origin(assignment), started, seconds)], []

    def _origin(self, assignment: Mapping[str, Any]) -> RolloutOrigin:
        temperature = sampling_of(self.config, assignment["environment"])["temperature"]
        if assignment["environment"] in self.served:  # a teacher is no policy of the store, and never stale
            return RolloutOrigin(assignment, "", self.step, self.step, temperature)
        policy = self.policy
        return RolloutOrigin(assignment, policy.key, policy.version, self.step, temperature, self.versions)

    async def _run_attempts(
        self, origin: RolloutOrigin, task: dict[str, Any], placed: InFlightRollout, started: float
    ) -> Rows:
        """Try until an attempt succeeds, cannot be helped by another one, or was the last.

        One that fails while an engine does not answer is no attempt.
        """
        seed, attempt = origin.assignment["seed"], 0
        while True:
            clock, num_silences = time.monotonic(), self.watch.clock.num_silences
            rows, failure = await self._attempt(origin, task, placed, seed)
            if failure is not None and failure.kind in ("infrastructure", "timeout"):
                await self.watch.wait_for_engines()
                if self.watch.clock.num_silences > num_silences:
                    continue  # not this rollout's failure: an engine did not answer meanwhile
                self.servers.require_present(placed)  # nor is it where that engine is lost
            attempt += 1
            if failure is None or attempt == self.config.rollout.max_attempts or not failure.retryable:
                break
            if failure.kind == "infrastructure":
                self.servers.move(placed)  # the machine of this one may be at fault
            if failure.kind == "model":
                seed += RETRY_SEED_STRIDE  # the same seed would sample the same response
            await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        if rows is None:
            assert failure is not None, "an attempt without rows has failed"
            return self.rows_without_trace(origin.assignment, failure, started, time.monotonic() - clock)
        return rows

    async def _attempt(
        self, origin: RolloutOrigin, task: dict[str, Any], placed: InFlightRollout, seed: int
    ) -> tuple[Rows | None, Failure | None]:
        """Run one episode: its rows, if it left a trace, and what went wrong, if something did."""
        name = origin.assignment["environment"]
        clients = self._clients(placed.replica)
        client = SeatClient(clients[self._sampler(name)], self.served[self._sampler(name)].model)
        try:
            seats = Seats.of(self.environments[name], self.served, clients, self.bindings.of(origin.assignment, task))
        except Exception as error:  # of a user's function
            return None, failure_of_exception(error, "bindings: ")
        try:
            episode = await self._play(origin, placed, (client, seats), task, self._sampling(origin, seed))
        except RuntimeError as error:
            # verifiers' client raises a refusal of the server so, with the name of the error's type in front.
            kind, _, message = str(error).partition(": ")
            return None, failure_of_error({"type": kind, "message": message or str(error)})
        except ValidationError as error:  # an environment has put into a trace what no trace can hold
            return None, failure_of_error({"type": type(error).__name__, "message": str(error)})
        try:
            return episode_rows(episode, origin, seats, client)
        except UnattributedTokens as error:
            if self.environments[name].addresses:  # a server of another program never says
                raise
            return None, Failure("infrastructure", type(error).__name__, str(error))

    async def _play(
        self,
        origin: RolloutOrigin,
        placed: InFlightRollout,
        players: tuple[SeatClient, Seats],
        task: Row,
        sampling: "SamplingConfig",
    ) -> "WireEpisode":
        """Return the episode of a rollout, whose turns are kept where the plan keeps them."""
        (client, seats), turns, kept = players, self._turns, set[str]()

        def keep(delta: Mapping[str, Any]) -> None:
            for played in delta.get("set", {}).get("info", {}).get(TURNS_FIELD, ()):
                if turns is not None and played["request"] not in kept:
                    kept.add(played["request"])
                    turn = _kept_turn(origin, client.model, played)
                    turns.put(turn) if self.unproven is None else self.unproven.append(turn)

        name = origin.assignment["environment"]
        # A server of another program would send the answers to the engine, with the header that holds them.
        is_external = bool(self.environments[name].addresses)
        kept_answers = None if turns is None or is_external else self._usable(turns, origin)
        requested = add_header(client.client, seats.requested_players, kept_answers)
        return await self.servers.play(placed, requested, client.model, sampling, task, keep)

    def versions_of_turns(self, group_id: str) -> set[int]:
        """Return the versions of the policies that have sampled kept turns of a group, of those that are known here."""
        every = self._turns.of(group_id) if self._turns else ()
        return {self.versions[key] for turn in every for key in turn.policies if key in self.versions}

    def _usable(self, turns: TurnCache, origin: RolloutOrigin) -> dict[str, str]:
        """Return the answers that a rollout need not sample again, by request.

        Those of its own policy, or where it is recorded which policy sampled which token, of all from the oldest on
        that its group may be of.
        """
        assignment = origin.assignment
        known = self.versions or {origin.policy_key: origin.policy_version}
        oldest = self.oldest.get(assignment["group_id"])
        least = origin.policy_version if oldest is None else oldest

        def usable(turn: CachedTurn) -> bool:
            young = all(known.get(key, -1) >= least for key in turn.policies)
            # What was kept before the config was changed may not say which policy sampled which token.
            return young and (not turn.policies or bool(self.versions) == bool(sampled_by(turn.answer)))

        name = assignment["assignment_id"]
        return {
            turn.request: turn.answer
            for turn in turns.of(assignment["group_id"])
            if turn.assignment_id == name and usable(turn)
        }

    def _clients(self, replica: str) -> "dict[str, TrainClientConfig | EvalClientConfig]":
        """Return the clients of all models, the policy's for its replica."""
        policy, clients = self.served.get(OF_POLICY), self.client_configs
        if policy is None or policy.chat:
            return clients
        address = {"base_url": api_address(replica)}
        return clients | {OF_POLICY: clients[OF_POLICY].model_copy(update=address)}

    def _sampler(self, name: str) -> str:
        return name if name in self.served else OF_POLICY

    def _sampling(self, origin: RolloutOrigin, attempt_seed: int) -> "SamplingConfig":
        name = origin.assignment["environment"]
        served = self.served[self._sampler(name)]
        # A server of another program would send this seed with every call, and all turns would draw alike. Without one
        # the engine draws from its own generator.
        seed = None if self.environments[name].addresses else attempt_seed
        return sampling_config(served, sampling_of(self.config, name), seed)


def _kept_turn(origin: RolloutOrigin, model: str, played: Mapping[str, str]) -> CachedTurn:
    """Return a turn as its environment server has sent it; `model` is the name of the model that samples rollouts."""
    policies: tuple[str, ...] = ()
    if played["model"] == model and origin.policy_key:
        spans = sampled_by(played["answer"])
        policies = tuple(dict(spans)) if spans else (origin.policy_key,)
    place = {name: origin.assignment[name] for name in ("group_id", "assignment_id")}
    return CachedTurn(**place, request=played["request"], answer=played["answer"], policies=policies)
