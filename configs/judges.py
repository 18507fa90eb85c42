"""The judges of a run: models that are asked what a rollout is worth, and how their answers are read."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from configs.algorithms import ChatTeacherConfig, FrozenModelConfig
from configs.environments import EnvironmentConfig
from configs.fields import Section, later, operational

PLACEHOLDERS = ("question", "answer", "response", "transcript", "rubric")
"""What a prompt may name in braces."""
PROMPT = """You grade a reply.

Question:
{question}

Reply:
{response}

{rubric}
End your answer with a line `Score: N`."""


class ParserConfig(Section):
    """How a score is read from the text of an answer. What has no score is asked for again, and never counts as 0."""

    type: Literal["number", "choice", "json", "pattern"] = "number"
    """number: the last number of the text. choice: the last word of `choices`. json: the number in `field` of the last
    JSON object. pattern: the number in the first group of the last match of `pattern`."""
    choices: dict[str, float] = Field(default_factory=lambda: {"yes": 1.0, "no": 0.0})
    """Scores by word, upper or lower case, for choice."""
    field: str = "score"
    """The object's field, for json."""
    pattern: str = ""
    """A regular expression with one group, for pattern."""
    minimum: float = 0.0
    """The lowest score; an answer below it cannot be read."""
    maximum: float = 1.0
    """The highest score; an answer above it cannot be read."""


class JudgeBudget(Section):
    """The most that a run may spend on a judge; null is no limit. Answers that the store has cost nothing."""

    max_calls: int | None = operational(None, ge=1)
    """Answers that the run gets from it."""
    max_tokens: int | None = operational(None, ge=1)
    """Tokens of prompts and answers, as the API counts them. Up to `max_in_flight` questions more are answered."""
    max_cost: float | None = operational(None, gt=0)
    """Money, by `input_price` and `output_price`; likewise."""
    on_budget: Literal["stop", "pause"] = operational("stop")
    """What happens when it is spent: stop ends the run, pause waits for a person as `gate.type=pause` does. An approval
    allows the same budget again."""
    timeout_seconds: float = operational(86_400.0, gt=0)
    """Longest wait for the person; then the run ends and can be resumed."""


class JudgeConfig(FrozenModelConfig):
    """A model that scores rollouts: behind a chat API (`url` and `model`), or from weights (`path`)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Its name: that of its reward in traces, and of its metrics."""
    url: str = operational("")
    """The address before `/chat/completions`, such as https://api.example.com/v1; empty with `path`."""
    model: str = ""
    """The model's name at `url`."""
    api_key_variable: str = operational("OPENAI_API_KEY")
    """Environment variable with the key; unset or empty sends none."""
    max_model_len: int | None = operational(None, ge=8)
    """Longest prompt plus answer of the engine for `path`, in tokens; null is `engine.max_model_len`."""
    prompt: str = PROMPT
    """What it is asked, with {question} (the first message of the user), {answer} (`answer_field`), {response} (the
    last sampled message), {transcript} (all messages) and {rubric} in it."""
    rubric: str = ""
    """What a good reply is: takes the place of {rubric}."""
    answer_field: str = "answer"
    """Field of the trace's info, or else of the example's task, that takes the place of {answer}."""
    parser: ParserConfig = ParserConfig()
    sampling: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    """Further fields of every request."""
    weight: float = 1.0
    """Weight of its score in the reward, which it is added to. With 0 it is held out: scored, and in no reward."""
    environments: tuple[str, ...] = ()
    """Environments whose rollouts it scores; empty is all."""
    inside: bool = later(False)
    """Whether only the code of environments asks it, by `base_url = "judge://NAME"`; then it scores none itself."""
    max_unscored: float = operational(0.05, ge=0, le=1)
    """Largest share of a step's questions without a score; beyond that the run ends, and `resume` asks them again."""
    retries: int = operational(8, ge=0)
    """How many times a request is sent again that got no answer, or one of status 408, 409, 429 or 500 and above: after
    half a second, doubling up to 8 s, or when Retry-After says so."""
    rereads: int = operational(2, ge=0)
    """How many times a question is asked again whose answer the parser cannot read."""
    requests_per_minute: int | None = operational(None, ge=1)
    """Most requests in a minute, repeated ones included; null is no limit."""
    answer_seconds: float = operational(120.0, gt=0)
    """Longest wait for an answer before the request is sent again."""
    max_in_flight: int = operational(16, ge=1)
    """Most questions that are open at once."""
    budget: JudgeBudget = JudgeBudget()
    input_price: float = operational(0.0, ge=0)
    """Money for a million tokens of prompts."""
    output_price: float = operational(0.0, ge=0)
    """Money for a million tokens of answers."""

    @property
    def chat(self) -> ChatTeacherConfig | None:
        """The chat API that serves it; None for one with weights of its own."""
        if not self.url:
            return None
        return ChatTeacherConfig(url=self.url, model=self.model, api_key_variable=self.api_key_variable)

    @property
    def identity(self) -> str:
        """What tells its answers from those of other models: the digest of its weights, or its name."""
        return self.version or self.model

    def scores(self, environment: str) -> bool:
        """Tell whether it scores the rollouts of an environment."""
        return not self.inside and (not self.environments or environment in self.environments)

    def cost_of(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of an answer, in the money of `input_price`."""
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1e6


def judges_inside(environment: EnvironmentConfig) -> tuple[str, ...]:
    """Return the names of the run's judges that an environment's settings name, each once."""
    return tuple(dict.fromkeys(re.findall(r'"base_url":"judge://([^"]*)"', environment.model_dump_json())))


def with_judges_at(environment: EnvironmentConfig, addresses: Mapping[str, str]) -> EnvironmentConfig:
    """Return an environment with addresses in place of the names of judges in its settings."""
    text = environment.model_dump_json()
    for name, url in addresses.items():
        text = text.replace(f'"base_url":"judge://{name}"', f'"base_url":"{url}"')
    return EnvironmentConfig.model_validate_json(text) if addresses else environment
