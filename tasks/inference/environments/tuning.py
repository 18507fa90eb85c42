"""Keeps what verifiers and its libraries would work out again for every rollout, in the process of an environment.

Each function patches one thing; where a version has it under no such name, nothing is changed.
"""

import functools
import inspect
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

MOST_RENDERS = 512
"""Prompts whose tokens are kept: those of the groups in flight."""
LONGEST_PROMPT = 32_768
"""Characters of a prompt that is kept, as JSON."""
SHORT_SECONDS = 0.002
"""Rendering that takes longer is done in a thread, so that other rollouts go on meanwhile."""
ROLLOUTS_PER_TRIM = 512
"""Rollouts between two times that freed memory is given back to the system: each walks the whole heap."""

Result = TypeVar("Result")


def tune_verifiers() -> None:
    """Patch what every rollout passes through; imports verifiers."""
    from verifiers.v1.clients import train
    from verifiers.v1.utils import memory

    if hasattr(train, "RendererSlot"):
        train.RendererSlot = quick_slot(train.RendererSlot)
    if hasattr(memory, "_TRIM_EVERY_ROLLOUTS"):
        memory._TRIM_EVERY_ROLLOUTS = ROLLOUTS_PER_TRIM
    use_cached_tokenizers()
    make_directories_late()
    look_once()
    resolve_quickly()


def look_once() -> None:
    """Look once, and not for every rollout, at a harness's module, a method's parameters and the tokens of a header.

    Idempotent.
    """
    from renderers import reasoning
    from verifiers.v1.utils import decorators, loaders

    skip = getattr(reasoning, "_after_header", None)
    if skip and not hasattr(skip, "__wrapped__"):
        reasoning._after_header = encode_once(skip)

    load: Any = getattr(loaders, "_import_plugin", None)
    if hasattr(load, "__code__"):
        loaders._import_plugin = functools.cache(load)
    if getattr(decorators, "inspect", None) is inspect:
        decorators.inspect = SimpleNamespace(signature=quick_signature)


def quick_signature(function: Any) -> inspect.Signature:
    """Return what `inspect.signature` does; that of a method does not depend on its object."""
    return _method_signature(function.__func__) if isinstance(function, MethodType) else inspect.signature(function)


@functools.lru_cache(1024)
def _method_signature(function: Any) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def resolve_quickly() -> None:
    """Have an agent's sampling parameters taken over where there is nothing to merge them with. Idempotent.

    verifiers merges them twice for each episode, by way of mappings.
    """
    from verifiers.v1 import agent, env

    resolve: Any = getattr(env, "resolve_agent", None)
    known: Any = getattr(agent, "resolve_agent", None)
    if resolve and known is resolve and not hasattr(resolve, "__wrapped__"):
        agent.resolve_agent = env.resolve_agent = resolve_or_take_over(resolve)


def resolve_or_take_over(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what verifiers' `resolve_agent` does."""

    @functools.wraps(resolve)
    def resolve_agent(spec: Any, *, sampling: Any = None, **defaults: Any) -> Any:
        if (spec.sampling is None) == (sampling is None):
            return resolve(spec, sampling=sampling, **defaults)
        taken = (spec.sampling or sampling).model_copy()
        # What a trace records says every parameter, also those that nobody set.
        taken.__pydantic_fields_set__ = {*type(taken).model_fields, *(taken.model_extra or ())}
        own = {name: value for name, value in defaults.items() if getattr(spec, name) is None}
        return spec.model_copy(update={**own, "sampling": taken})

    return resolve_agent


def encode_once(skip_header: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function on a tokenizer, tokens and a header that has the header's tokens encoded once."""
    keeping = functools.cache(_KeepingTokenizer)

    @functools.wraps(skip_header)
    def skip(tokenizer: Any, *rest: Any, **named: Any) -> Any:
        return skip_header(keeping(tokenizer), *rest, **named)

    return skip


class _KeepingTokenizer:
    """A tokenizer that keeps what it encodes: texts of the templates, which are few."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = functools.cache(tokenizer.encode)
        self.decode = tokenizer.decode


def make_directories_late() -> None:
    """Have a rollout in a local runtime make its working directory when something asks for it. Idempotent.

    Most rollouts run no program and write no file; making and removing a directory takes as long as their bookkeeping.
    """
    from verifiers.v1.runtimes import subprocess as local

    runtime = local.SubprocessRuntime
    if isinstance(vars(runtime).get("workdir"), property) or not hasattr(local, "CACHE_DIR"):
        return
    teardown, cleanup = runtime.teardown, runtime.cleanup

    def workdir(self: Any) -> Path | None:
        place: Path | None = vars(self).get("_place")
        if place and not vars(self).get("_made"):
            place.mkdir(parents=True, exist_ok=True)  # files are read in threads, which may ask at the same time
            self._made = True
        return place

    def set_workdir(self: Any, place: Path | None) -> None:
        self._place, self._made = place, False

    async def start(self: Any) -> None:
        self.workdir = local.CACHE_DIR / "runtimes" / "subprocess" / self.name
        self.info.id = str(self._place)

    async def teardown_made(self: Any) -> None:
        if not self._made:
            self.workdir = None
        await teardown(self)

    def cleanup_made(self: Any) -> None:
        if not self._made:
            self.workdir = None
        cleanup(self)

    runtime.workdir = property(workdir, set_workdir)
    runtime.start, runtime.teardown, runtime.cleanup = start, teardown_made, cleanup_made


def use_cached_tokenizers() -> None:
    """Have renderers load the tokenizer of a hub id from the cache, without asking the hub for a newer one.

    The model was fetched when the run was prepared. Environments may use the hub, and what a run does by itself does
    not. One that is not in the cache is loaded as before: this process may be on another machine.
    """
    from renderers import base

    if not hasattr(base, "load_tokenizer"):
        return
    load = base.load_tokenizer
    pinned = getattr(base, "TRUSTED_REVISIONS", {})  # loaded by another rule, which goes by the name

    @functools.wraps(load)
    def load_cached(name: str) -> Any:
        if name in pinned or Path(name).is_dir():
            return load(name)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            tokenizer = load(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            return load(name)
        tokenizer.name_or_path = name  # renderers are chosen by it
        return tokenizer

    base.load_tokenizer = load_cached


def quick_slot(slot: type[Any]) -> type[Any]:
    """Return a slot of verifiers' renderers that renders equal prompts once, and short ones without a thread."""

    class QuickSlot(slot):  # type: ignore[misc]
        """Whoever renders holds the lock, as in the original: a fast tokenizer is no thread's alone."""

        def __init__(self, *arguments: Any, **others: Any) -> None:
            super().__init__(*arguments, **others)
            with suppress(AttributeError):  # a renderer with slots takes no other function
                self.renderer.render = render_once(self.renderer.render)
            self.seconds = 0.0

        async def run(self, fn: Callable[[], Result]) -> Result:
            def measure() -> Result:
                began = time.perf_counter()
                try:
                    return fn()
                finally:
                    self.seconds = time.perf_counter() - began

            # How long a prompt takes is known afterwards: the one before tells.
            if self.seconds > SHORT_SECONDS or not self.lock.acquire(blocking=False):
                return await super().run(measure)  # type: ignore[no-any-return]
            try:
                return measure()
            finally:
                self.lock.release()

    return QuickSlot


def render_once(render: Callable[..., Any]) -> Callable[..., Any]:
    """Return a renderer's `render` that keeps the tokens of the latest prompts; nobody changes them.

    The caller holds the renderer's lock.
    """
    known: dict[str, Any] = {}

    @functools.wraps(render)
    def render_or_recall(messages: Any, **settings: Any) -> Any:
        try:
            key = json.dumps([messages, settings])
        except (TypeError, ValueError):
            return render(messages, **settings)
        if key in known:
            return known[key]
        tokens = render(messages, **settings)
        if len(key) <= LONGEST_PROMPT:
            if len(known) >= MOST_RENDERS:
                del known[next(iter(known))]
            known[key] = tokens
        return tokens

    return render_or_recall
