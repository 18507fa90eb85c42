"""The inference engine's blocking client: serves one policy at a time, probes it, and scores sequences."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.inference.engine.weights_view import require_readable, serving_view
from tasks.runtime.refs import Policy
from tasks.runtime.weights_sum import WeightsSum, add_sums

if TYPE_CHECKING:
    from configs.services import ExternalModelConfig

OF_POLICY = ""
"""The name of the policy's engine among the served models; those of teachers go by environment."""
MODEL = "policy"
"""The model name under which the engine serves its whole weights, whichever policy they are."""
KEY_SEPARATOR = "+"
"""Separates the keys of base and adapter in the engine's weight version; occurs in no key."""
POLICIES_HEADER = "X-Token-Policies"
"""The header by which a request asks which policies sampled the tokens of its answer, and an answer says it."""
POLICIES_FIELD = '{"policies":'
"""How an answer begins that names the policies that sampled its tokens: the content of POLICIES_HEADER follows."""
SERVE_SECONDS = 600.0
"""Longest wait for weights or an adapter to be loaded: large ones come from slow disks."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection: a busy engine answers slowly, but accepts at once."""
NOT_FOUND = 404
"""The answer of an external engine on Stagecoach's routes."""
SCORE_SECONDS = 600.0
"""Longest wait for one sequence, including those before it in the engine's queue."""


def sampled_by(answer: str) -> list[tuple[str, int]] | None:
    """Return the keys of the policies that sampled an answer with the numbers of their tokens, in order.

    None where the answer does not say.
    """
    if not answer.startswith(POLICIES_FIELD):
        return None
    spans, _ = json.JSONDecoder().raw_decode(answer, len(POLICIES_FIELD))
    return [(key, count) for key, count in spans]


def authorization(api_key: str) -> dict[str, str]:
    """Return the headers of a request to an engine; none without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def client_options(url: str, api_key: str, timeout: Any) -> dict[str, Any]:
    """Return the options of a client of httpx for an engine; `timeout` is in seconds, or a timeout of httpx."""
    # Without https, as for a run's own engines, no proxy of the environment is used, and no certificates are loaded,
    # which take longer than an answer. An engine behind https is reached through the proxy and verified.
    is_secure = url.startswith("https")
    headers = authorization(api_key)
    return {"base_url": url, "headers": headers, "timeout": timeout, "trust_env": is_secure, "verify": is_secure}


class EngineState(NamedTuple):
    """What an engine serves."""

    whole_key: str
    """The key of its whole weights; empty after a start and while some are being loaded."""
    policy_key: str
    """The key of the served policy: another one where that is an adapter; empty as above."""
    adapters: list[str]
    """The names of all adapters that are loaded."""
    is_sleeping: bool


class EngineError(RuntimeError):
    """The engine answered a request with an error."""


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
        self._client = httpx.Client(
            **client_options(self.url, api_key, httpx.Timeout(timeout, connect=CONNECT_SECONDS))
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def healthy(self) -> bool:
        """Tell whether the engine generates: one real token, not just an answer."""
        try:
            # Of one token alone vLLM 0.31 dies on a CPU if layers carry a state.
            answer = self.generate([0, 0], max_tokens=1, temperature=0.0)
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
        receive: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the weights in `directory` and serve them as the policy `policy_key`.

        Where `receive` returns true, they have come to the paused engine otherwise, see `transfer`.

        Requests in flight are paused while it happens and continue with the new weights; the engine knows which of
        their tokens it sampled before. With `recompute` their states, and those of its prefix cache, are computed again
        with the new weights; else both are kept as they are.

        Raises WeightsUnusable before the engine is touched where the directory is incomplete, and EngineError or
        EngineLost where the engine fails: its weights are then undefined, and it names no policy.

        Where the directory holds an adapter, `base` is key and directory of the weights below. Those are served as
        MODEL, and the adapter as a model named `policy_key`. All other adapters are unloaded, which ends their
        requests in flight.
        """
        assert policy_key, "a policy has a key"
        state, whole = self.state(), base or (policy_key, directory)
        # Also where the policy is served already: a caller that repeats the call does not trust what is loaded.
        if state.whole_key != whole[0] or state.policy_key == policy_key:
            self._load(*whole, state.is_sleeping, recompute, receive)
            if not state.adapters and not base:
                return
        # Without a version while adapters change: an engine that fails on the way names no policy.
        self._set_weight_version("")
        for name in state.adapters:
            self._post("/v1/unload_lora_adapter", json={"lora_name": name})
        if base:
            self.load_adapter(policy_key, directory)
        self._set_weight_version(f"{whole[0]}{KEY_SEPARATOR}{policy_key}" if base else policy_key)

    def load_adapter(self, policy_key: str, directory: str | Path) -> None:
        """Serve an adapter under its key, beside others over the same base, until the next `serve`."""
        self._post("/v1/load_lora_adapter", json={"lora_name": policy_key, "lora_path": str(directory)})

    def state(self) -> EngineState:
        """Return what the engine serves."""
        version = self._request("GET", "/weight_info")["weight_version"]
        whole, _, adapter = ("" if version == "default" else version).partition(KEY_SEPARATOR)
        adapters = [model["id"] for model in self._models() if model.get("parent")]
        return EngineState(whole, adapter or whole, adapters, self.is_sleeping())

    def is_sleeping(self) -> bool:
        """Return whether a part of the memory is given back, which only the process that put it to sleep does."""
        return bool(self._request("GET", "/is_sleeping", optional=True).get("is_sleeping"))

    def is_paused(self) -> bool:
        """Return whether requests wait: the process that loaded weights last did not come to the end of it."""
        return bool(self._request("GET", "/is_paused")["is_paused"])

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back; requests in flight end, and those that arrive wait.

        The weights are discarded, as others follow: the engine serves no policy until the next `serve`, which wakes it.
        """
        self._set_weight_version("")
        self._post("/sleep", params={"level": "2", "mode": "abort"})
        if not self.is_sleeping():
            raise EngineError(f"the engine at {self.url} was put to sleep and is awake")

    def _load(
        self, policy_key: str, directory: str | Path, asleep: bool, recompute: bool, receive: Callable[[], bool]
    ) -> None:
        require_readable(Path(directory))
        try:
            # One that sleeps is paused already, and continues when it has its KV cache. vLLM says that one sleeps that
            # is only paused, by a process that died, and this one is awake after the first call.
            if asleep:
                self._wake("weights")
                asleep = self.is_sleeping()
            if not asleep:
                self._post("/pause", params={"mode": "keep", "clear_cache": str(recompute).lower()})
            is_external = self.count_tokens() is None
            self._set_weight_version("")
            if is_external:
                with serving_view(directory) as view:
                    self._call_workers("reload_weights", kwargs={"weights_path": str(view)})
            elif not receive():
                self._call_workers("load_directory", args=[str(directory)])
            # Before anything is sampled with them: tokens belong to the policy that has a name by then.
            self._set_weight_version(policy_key)
            if asleep:
                self._wake("kv_cache")
            else:
                self._post("/resume")
        except BaseException:  # an interrupt too: requests would wait permanently
            if not asleep:  # which must not continue before it has its KV cache
                with suppress(EngineError, EngineLost):  # a dead one cannot resume: the error before is to be reported
                    self._request("POST", "/resume")
            raise
        if self.is_paused():
            raise EngineError(f"the engine at {self.url} stayed paused after loading policy {policy_key}")

    def _wake(self, part: str) -> None:
        """Take the memory of `weights`, undefined by then, or of the `kv_cache`; with both, requests continue."""
        self._post("/wake_up", params={"tags": part})

    def _call_workers(self, method: str, **arguments: Any) -> None:
        self._post("/collective_rpc", json={"method": method, **arguments})

    def call(self, route: str, content: Mapping[str, Any]) -> None:
        """Call a route of the server by its name."""
        # vLLM's server ends the connection after an error that it did not expect: the next request must not go there.
        self._post(f"/{route}", json=content, headers={"Connection": "close"})

    def _set_weight_version(self, version: str) -> None:
        self._post("/update_weight_version", json={"new_version": version})

    def count_tokens(self) -> dict[str, int] | None:
        """Count the tokens of requests in flight, by request, as the served policy's; None for an external engine.

        Raises EngineError where the engine is not paused.
        """
        return self._post("/inference/v1/count_tokens", optional=True).get("requests")

    def weights_sum(self, directory: str | Path) -> tuple[WeightsSum, WeightsSum | None] | None:
        """Return the checksums of the weights that the engine holds and of those that were published in `directory`.

        The second is None for files that cannot be compared, all for an external engine that was started without it.
        """
        answer = self._post("/inference/v1/weights_sum", optional=True, json={"directory": str(directory)})
        if not answer:
            return None
        held, (files, *_) = zip(*answer["workers"], strict=True)
        return add_sums(WeightsSum(*worker) for worker in held), files and WeightsSum(*files)

    def model_names(self) -> list[str]:
        """Return the names of the models that are served; none where an external server has no list of them."""
        return [model["id"] for model in self._request("GET", "/v1/models", optional=True).get("data", ())]

    def _models(self) -> list[dict[str, Any]]:
        return list(self._request("GET", "/v1/models")["data"])

    def model_directory(self) -> str:
        """Return the directory that the engine was started with, which holds its tokenizer."""
        return str(self._models()[0]["root"])

    def describe_model(self) -> tuple[str, str]:
        """Return the name of the served model, and a description: name, origin, version of the engine."""
        model, version = self._models()[0], self._request("GET", "/version")["version"]
        return str(model["id"]), f"{model['id']} of {model.get('root') or model['id']}, vllm {version}"

    def tokenize(self, text: str) -> list[int]:
        """Return the engine's tokens of a text, control tokens in it included and none added."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._request("POST", "/tokenize", json=body)["tokens"]]

    def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Log-prob of each token given those before, at temperature 1, computed afresh; the first is 0.0.

        A prompt and what is generated share the engine's positions, so the last token is scored as one to generate:
        a sequence may be as long as the engine's `max_model_len`. Temperature never applies to the log-probs of a
        prompt, whatever the engine's `--logprobs-mode`.
        """
        *prompt, last = token_ids
        logprob, answer = self._score_last(prompt, last, salt, prompt_logprobs=0)
        return [*_prompt_logprobs(answer, prompt), logprob]

    def _score_last(self, prompt: list[int], last: int, salt: str, **options: Any) -> tuple[float, dict[str, Any]]:
        """Return the log-prob of a token after a prompt, and the whole answer."""
        # The id twice: the answer has `logprobs` entries, of which the sampled token takes one.
        options |= {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": [last, last]}
        answer = self.generate(prompt, cache_salt=salt, **options)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            if entry["token"] == f"token_id:{last}":
                return float(entry["logprob"]), answer
        raise EngineError(f"the engine at {self.url} did not score token {last}, which it was asked to")

    def probes(self, token_ids: list[int], policy_key: str) -> tuple[float, list[float]]:
        """Log-prob of the last token read through the policy's prefix cache, as rollouts do; then of all, afresh.

        The first is of a generated token and the second of a prompt: neither way of the engine vouches for itself. Only
        whole blocks are cached, so the check reaches the cache with probes of more than one block.
        """
        # The cached path first: computing afresh would put right blocks next to stale ones.
        cached, _ = self._score_last(token_ids[:-1], token_ids[-1], policy_key)
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        afresh = self.generate(token_ids, cache_salt=policy_key, **options)
        return cached, _prompt_logprobs(afresh, token_ids)

    def generate(self, token_ids: list[int], *, cache_salt: str | None = None, **sampling: Any) -> dict[str, Any]:
        """Send one request to `/inference/v1/generate`; return the answer as it is."""
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        body = {"model": self.model, "token_ids": token_ids, "sampling_params": sampling, **salt}
        return self._request("POST", "/inference/v1/generate", json=body)

    def _post(self, path: str, **options: Any) -> dict[str, Any]:
        return self._request("POST", path, timeout=SERVE_SECONDS, **options)

    def _request(self, method: str, path: str, optional: bool = False, **options: Any) -> dict[str, Any]:
        """Return the answer; an empty one where an external engine lacks an `optional` route."""
        import httpx

        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineLost(f"no answer from the engine at {self.url}{path}: {error!r}") from error
        # vLLM's API server answers 503 when the engine behind it has died; the server itself may live on.
        status, text = answer.status_code, answer.text
        if status == 503:
            raise EngineLost(f"the engine at {self.url} says that it is dead: {text[-1000:]}")
        if status == NOT_FOUND and optional:
            return {}
        if status != 200:
            raise EngineError(f"the engine at {self.url}{path} answered {status}: {text[-1000:]}")
        return dict(json.loads(text)) if text.startswith("{") else {}


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
    """Set for an external model with a chat API alone: it returns text and no tokens, and is evaluated or a teacher."""
    other_urls: tuple[str, ...] = ()
    """Where further replicas serve the same."""
    policy: Policy | None = None
    """The policy of the store that the model is, where it plays single seats."""
    beside: "Mapping[str, ServedModel]" = field(default_factory=dict, hash=False)
    """Other policies that the same engines serve, by `PlayerConfig.beside`."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas that are there."""
        return (self.url, *self.other_urls)


def score(
    served: ServedModel, sequences: Sequence[Sequence[int]], max_in_flight: int
) -> Iterator[tuple[int, list[float]]]:
    """Yield the index of each sequence with its tokens' log-probs given those before, in order of completion.

    In nats, at temperature 1; the first token's is 0.0. A sequence has at least two tokens. At most
    `max_in_flight` requests are under way. Raises EngineLost where the engine is gone, EngineError where it refuses a
    sequence; what was yielded before is valid.
    """
    engine = Engine(served.url, served.api_key, timeout=SCORE_SECONDS, model=served.model)
    with closing(engine), ThreadPoolExecutor(max_in_flight) as threads:
        try:
            tasks = {threads.submit(engine.score, tokens, served.salt): index for index, tokens in enumerate(sequences)}
            for done in as_completed(tasks):
                yield tasks.pop(done), done.result()
        finally:
            # Before the pool's own exit, which would wait for every request that is still queued.
            threads.shutdown(wait=False, cancel_futures=True)


def _prompt_logprobs(answer: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens from an answer; the first token has none there and gets 0.0."""
    pairs = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
    return [0.0, *(float(row[str(token)]["logprob"]) for token, row in pairs)]
