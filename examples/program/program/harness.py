"""The harness `program`: an agent of anybody plays each rollout, by calls that go to the interception server."""

import asyncio
import contextlib
import json
import math
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.errors import HarnessError, SandboxError
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

PROMPT_FILE, REWARD_FILE = "prompt.txt", "reward.txt"
REWARD = "reported_reward"
"""The field of a trace's info with the reward that the program left, or its owner gave."""
LIMITED = Path(__file__).with_name("limited.py")
PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables of the environment server that a program gets, HOME and TMPDIR as its own directory; and no others."""
LOOK_SECONDS = 0.2
"""Between two looks whether the rollout has ended before its program."""
GRACE_SECONDS = 2.0
"""Time that an agent has to end by itself, when its rollout was stopped and all its calls are refused."""
_PLACES = re.compile(r"\{(prompt|system|model)\}")


class ProgramConfig(HarnessConfig):
    """The command, what it is given, and its limits."""

    command: list[str] = Field(default_factory=list)
    """The program and its arguments, in which `{prompt}`, `{system}` and `{model}` stand for the task's prompt, its
    system prompt and the name of the model. Without `{prompt}` the program reads the prompt from its standard input.
    Without `{system}` the system prompt is put before the prompt."""
    gateway: Path | None = None
    """In place of a command, a directory in which each rollout is published, for an agent that its owner starts."""
    files: list[Path] = Field(default_factory=list)
    """Files that are copied into the directory of each rollout."""
    timeout_seconds: float = Field(600, gt=0)
    """Longest time of one rollout's program; one that takes longer is ended, and its rollout is an error."""
    max_output_bytes: int = Field(10_000_000, ge=1)
    """Most bytes that a program prints; one that prints more is ended, and its rollout is an error."""
    max_calls: int = Field(256, ge=1)
    """Model calls of one rollout, refused ones included, after which it is stopped as by `max_turns`."""

    @model_validator(mode="after")
    def _check_player(self) -> "ProgramConfig":
        if bool(self.command) == bool(self.gateway):
            raise ValueError("give the harness either a command or a gateway, a directory")
        return self


class ProgramHarness(Harness[ProgramConfig]):
    """Runs one command for each rollout, in a directory of its own, or publishes it for an agent elsewhere.

    The command's variables OPENAI_BASE_URL and OPENAI_API_KEY name the interception server and this rollout's key, so
    that every call is recorded. An exit status other than 0 is an error of the rollout.
    """

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    def require_command(self, runtime: Any) -> None:
        """Raise ValueError where the command, or a file that is copied, is not on this machine."""
        for name in self.config.command[:1] if isinstance(runtime, SubprocessConfig) else ():
            if shutil.which(name) is None:
                raise ValueError(f"harness.command: there is no program {name!r} here: give its path, or install it")
        for file in self.config.files:
            if not file.is_file():
                raise ValueError(f"harness.files: there is no file {str(file)!r}")

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
            result = await self._run_limited(runtime, trace, command, own)
        else:
            async with asyncio.timeout(self.config.timeout_seconds):
                reading = ["sh", "-c", f'exec "$@" < {PROMPT_FILE}', "sh", *command]
                result = await runtime.run_program(reading, own)
        with contextlib.suppress(SandboxError):  # it left none
            note_reward(trace, (await runtime.read(REWARD_FILE, max_bytes=100)).decode(errors="replace"))
        return result

    async def _run_limited(
        self, runtime: Runtime, trace: Trace, command: list[str], own: dict[str, str]
    ) -> ProgramResult:
        """Run the command on this machine behind `limited.py`, until it ends or its rollout does."""
        # A path is one of the directory in which the environment server was started.
        command[0] = str(Path(shutil.which(command[0]) or command[0]).absolute())
        own = {"HOME": str(runtime.info.id), "TMPDIR": str(runtime.info.id), **runtime.env, **own}
        limits = [str(self.config.timeout_seconds), str(self.config.max_output_bytes), ",".join({*PASSED, *own})]
        process = await runtime.open_process([sys.executable, "-I", "-S", str(LIMITED), *limits, *command], own)
        ended = asyncio.gather(process.wait(), _read(process.stdout), _read(process.stderr))
        try:
            await self._watch(trace, ended, process.terminate)
            return ProgramResult(*ended.result())
        finally:
            await process.terminate()

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
