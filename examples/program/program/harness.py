"""The harness `program`: an agent of anybody plays each rollout, by calls that go to the interception server."""

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.errors import HarnessError, SandboxError
from verifiers.v1.harness import Harness, HarnessSession
from verifiers.v1.runtimes import ProgramResult, Runtime, RuntimeProcess, SubprocessConfig
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import harness_config_type, load_harness

PROMPT_FILE, REWARD_FILE = "prompt.txt", "reward.txt"
REWARD = "reported_reward"
"""The field of a trace's info with the reward that the program left, or its owner gave."""
LIMITED = Path(__file__).with_name("limited.py")
PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables of the environment server that a program gets, HOME and TMPDIR as its own directory; and no others."""
LOOPBACK = ("127.0.0.1", "localhost")
LOOK_SECONDS = 0.2
"""Between two looks whether the rollout has ended before its program."""
GRACE_SECONDS = 2.0
"""Time that an agent has to end by itself, when its rollout was stopped and all its calls are refused."""
SHARED = ("APPENDS_SYSTEM_PROMPT", "SUPPORTS_MCP", "SUPPORTS_RESUME", "SUPPORTS_SKILLS", "SUPPORTS_TOOL_INTERCEPTION")
"""What a harness can do that plays within the limits."""
_PLACES = re.compile(r"\{(prompt|system|model)\}")


class ProgramConfig(HarnessConfig):
    """The command, what it is given, and its limits."""

    command: list[str] = Field(default_factory=list)
    """The program and its arguments, in which `{prompt}`, `{system}` and `{model}` stand for the task's prompt, its
    system prompt and the name of the model. Without `{prompt}` the program reads the prompt from its standard input.
    Without `{system}` the system prompt is put before the prompt."""
    gateway: Path | None = None
    """In place of a command, a directory in which each rollout is published, for an agent that its owner starts."""
    harness: dict[str, Any] = Field(default_factory=dict)
    """In place of a command, another harness, its `id` and settings, whose programs keep to the limits."""
    network: bool = True
    """Whether the program has this machine's network and processes. Without, it has namespaces of its own, in which the
    interception server and the taskset's tool servers can be reached, and nothing else."""
    files: list[Path] = Field(default_factory=list)
    """Files that are copied into the directory of each rollout."""
    timeout_seconds: float = Field(600, gt=0)
    """Longest time of one rollout's program; one that takes longer is ended, and its rollout is an error."""
    max_output_bytes: int = Field(10_000_000, ge=1)
    """Most bytes that a program prints; one that prints more is ended, and its rollout is an error."""
    max_memory_bytes: int = Field(4 * 2**30, ge=2**20)
    """Most memory of each process of the program; more is refused to it by the system."""
    max_calls: int = Field(256, ge=1)
    """Model calls of one rollout, refused ones included, after which it is stopped as by `max_turns`."""

    @model_validator(mode="after")
    def _check_player(self) -> "ProgramConfig":
        if sum(map(bool, (self.command, self.gateway, self.harness))) != 1:
            raise ValueError("give the harness either a command or a gateway, a directory, or another harness")
        if self.gateway and not self.network:
            raise ValueError("the network of an agent that its owner starts is its owner's: leave out network = false")
        return self


class ProgramHarness(Harness[ProgramConfig]):
    """Runs one command for each rollout, in a directory of its own, or publishes it for an agent elsewhere.

    The command's variables OPENAI_BASE_URL and OPENAI_API_KEY name the interception server and this rollout's key, so
    that every call is recorded. An exit status other than 0 is an error of the rollout.
    """

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    def __init__(self, config: ProgramConfig) -> None:
        super().__init__(config)
        self._other: Harness[Any] | None = None
        if config.harness:
            kind = harness_config_type(config.harness["id"])
            self._other = load_harness(kind.model_validate(config.harness))
            for name in SHARED:
                setattr(self, name, getattr(self._other, name))

    def require_command(self, runtime: Any) -> None:
        """Raise ValueError where the command, a file that is copied, or what the limits need is not on this machine."""
        is_here = isinstance(runtime, SubprocessConfig)
        if not is_here and (self._other or not self.config.network):
            raise ValueError(
                f"harness: the runtime {runtime.type!r} is the limit itself: name the other harness as the harness, "
                "and close its network by runtime.allow = []"
            )
        for name in self.config.command[:1] if is_here else ():
            if shutil.which(name) is None:
                raise ValueError(f"harness.command: there is no program {name!r} here: give its path, or install it")
        if not self.config.network:
            command = [*self._guard([], "0", os.devnull), "true"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                if process.wait() and process.stderr:
                    raise ValueError(f"harness.network: this machine gives no namespaces: {process.stderr.read()}")
        for file in self.config.files:
            if not file.is_file():
                raise ValueError(f"harness.files: there is no file {str(file)!r}")

    async def setup(self, runtime: Runtime) -> None:
        """Install the other harness's program, with the machine's network."""
        if self._other:
            await self._other.setup(runtime)

    async def session(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> HarnessSession:
        """Return the handle by which one rollout is played: the other harness's, with a runtime that has limits."""
        play, place = super().session, runtime
        if self._other:
            play = self._other.session
            place = cast(Runtime, LimitedRuntime(self, runtime, trace, (endpoint, *mcp_urls.values())))
        return await play(ctx, trace, place, endpoint, secret, mcp_urls, data, tool_interception_url)

    async def score(self, trace: Trace, runtime: Runtime) -> None:
        """Record the other harness's metrics."""
        await (self._other.score if self._other else super().score)(trace, runtime)

    async def cleanup(self, trace: Trace, runtime: Runtime) -> None:
        """Remove what the other harness keeps of a rollout."""
        if self._other:
            await self._other.cleanup(trace, runtime)

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run the command, or wait for the owner, to the end; return its exit status, and the last that it printed.

        Raises ValueError for a prompt that is a list of messages, and HarnessError for a reward that is no number.
        """
        system, prompt = self.resolve_text_prompt(data)
        api = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_BASE": endpoint, "OPENAI_API_KEY": secret}
        own = {**self.config.resolved_env, **api}
        if self.config.gateway is not None:
            expires = time.time() + self.config.timeout_seconds
            offer = {"id": trace.id, "prompt": prompt, "system": system, "model": ctx.model, "expires": expires}
            return await self._publish(trace, {**offer, "base_url": endpoint, "api_key": secret})
        values = {"prompt": prompt or "", "system": system or "", "model": ctx.model}
        if system and not any("{system}" in word for word in self.config.command):
            values["prompt"] = f"{system}\n\n{prompt}"
        command = [_PLACES.sub(lambda place: values[place[1]], word) for word in self.config.command]
        await runtime.write(PROMPT_FILE, values["prompt"].encode())
        for file in self.config.files:
            await runtime.write(file.name, file.read_bytes())
        if isinstance(runtime.config, SubprocessConfig):
            result = await self.run_limited(runtime, trace, command, own, (endpoint,), PROMPT_FILE)
        else:
            async with asyncio.timeout(self.config.timeout_seconds):
                reading = ["sh", "-c", f'exec "$@" < {PROMPT_FILE}', "sh", *command]
                result = await runtime.run_program(reading, own)
        with contextlib.suppress(SandboxError):  # it left none
            note_reward(trace, (await runtime.read(REWARD_FILE, max_bytes=100)).decode(errors="replace"))
        return result

    async def open_limited(
        self, runtime: Runtime, command: list[str], own: dict[str, str], urls: Iterable[str], source: str
    ) -> RuntimeProcess:
        """Start a command on this machine behind `limited.py`, with a file as its input or `-` for the caller's."""
        # A path is one of the directory in which the environment server was started.
        path = str(Path(shutil.which(command[0]) or command[0]).absolute())
        own = {"HOME": str(runtime.info.id), "TMPDIR": str(runtime.info.id), **runtime.env, **own}
        # Those of other machines are out of reach.
        ports = {str(urlsplit(url).port) for url in urls if urlsplit(url).hostname in LOOPBACK}
        guard = self._guard(own, "all" if self.config.network else ",".join(ports), source)
        return await runtime.open_process([*guard, path, *command[1:]], own)

    async def run_limited(
        self, runtime: Runtime, trace: Trace, command: list[str], own: dict[str, str], urls: Iterable[str], source: str
    ) -> ProgramResult:
        """Run a command in limits, until it ends or its rollout does."""
        process = await self.open_limited(runtime, command, own, urls, source)
        ended = asyncio.gather(process.wait(), _read(process.stdout), _read(process.stderr))
        try:
            await self._watch(trace, ended, process.terminate)
            return ProgramResult(*ended.result())
        finally:
            await process.terminate()

    def _guard(self, names: Iterable[str], ports: str, source: str) -> list[str]:
        config = self.config
        limits = (config.timeout_seconds, config.max_output_bytes, config.max_memory_bytes)
        return [sys.executable, "-I", "-S", str(LIMITED), *map(str, limits), ",".join({*PASSED, *names}), ports, source]

    async def _publish(self, trace: Trace, offer: dict[str, Any]) -> ProgramResult:
        """Publish a rollout until its owner says that it has ended; note the reward that the owner gives."""
        assert self.config.gateway is not None
        self.config.gateway.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = {state: self.config.gateway / f"{trace.id}.{state}.json" for state in ("new", "open", "taken", "end")}
        paths["new"].touch(mode=0o600)
        paths["new"].write_text(json.dumps(offer), encoding="utf-8")
        paths["new"].rename(paths["open"])
        ended = asyncio.ensure_future(_appears(paths["end"]))

        async def stop() -> None:
            ended.cancel()

        try:
            async with asyncio.timeout(self.config.timeout_seconds):
                await self._watch(trace, ended, stop)
            report = {} if ended.cancelled() else json.loads(ended.result())
            if report.get("reward") is not None:
                note_reward(trace, report["reward"])
            error = str(report.get("error") or "")
            return ProgramResult(exit_code=int(bool(error)), stdout="", stderr=error)
        except TimeoutError:
            raise HarnessError(f"its owner did not end it within {self.config.timeout_seconds:g} s") from None
        finally:
            ended.cancel()
            for path in paths.values():
                path.unlink(missing_ok=True)

    async def _watch(self, trace: Trace, ended: "asyncio.Future[Any]", stop: Callable[[], Awaitable[None]]) -> None:
        """Wait for the agent's end; stop it where it calls without an end, or when its rollout is over."""
        while not (await asyncio.wait({ended}, timeout=LOOK_SECONDS))[0]:
            if len(trace.calls) >= self.config.max_calls and trace.stop_condition is None:
                trace.stop("max_turns")
            if trace.stop_condition is not None:
                await asyncio.wait({ended}, timeout=GRACE_SECONDS)
                await stop()


class LimitedRuntime:
    """A runtime of this machine for one rollout of another harness: its programs have limits, all else is as it was."""

    def __init__(self, limits: ProgramHarness, runtime: Runtime, trace: Trace, urls: Iterable[str]) -> None:
        self._limits, self._runtime, self._trace, self._urls = limits, runtime, trace, urls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run the program of a rollout to its end."""
        return await self._limits.run_limited(self._runtime, self._trace, argv, env, self._urls, os.devnull)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        """Start a program that the harness talks with."""
        return await self._limits.open_limited(self._runtime, argv, env, self._urls, "-")


async def _read(stream: AsyncIterator[bytes]) -> str:
    return b"".join([part async for part in stream]).decode(errors="replace")


async def _appears(file: Path) -> str:
    while not file.exists():
        await asyncio.sleep(LOOK_SECONDS)
    return file.read_text(encoding="utf-8")


def note_reward(trace: Trace, value: Any) -> None:
    """Keep a reported reward on the trace, for `reported_reward`; raise HarnessError where it is no finite number."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        trace.info[REWARD] = float(value)
    if not math.isfinite(trace.info.get(REWARD, math.nan)):
        raise HarnessError(f"the reward {value!r} is no finite number")


async def reported_reward(trace: Trace) -> float:
    """Return the reward that the program wrote or its owner gave; raise KeyError where there is none.

    It is plugged into a taskset: `task.rewards.reported.fn = "program:reported_reward"`.
    """
    return float(trace.info[REWARD])
