"""SamplingConfig: how replies are sampled, in the sections rollout, environments, their seats, and evaluation.

A setting is that of the seat, else of the evaluation (where it is one), else of the environment, else of the rollout.
"""

from typing import Annotated, Any

from pydantic import Field, field_validator

from configs.fields import Section, later

RUN_FIELDS = {
    *("seed", "n", "stream", "model", "messages", "prompt", "token_ids", "tools", "cache_salt", "extra_body"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "detokenize", "output_kind"),
    *("stop_token_ids", "skip_special_tokens", "include_stop_str_in_output", "chat_template_kwargs"),
}
"""Fields of a request that the run sets itself."""
NEUTRAL: dict[str, Any] = {
    **{"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    **{"min_tokens": 0, "logit_bias": {}, "allowed_token_ids": [], "bad_words": [], "structured_outputs": None},
    "thinking_token_budget": None,
}
"""Settings that sample from another distribution than the model's at the temperature, unless they have these values."""


class SamplingConfig(Section):
    """How the replies of model calls are sampled; null takes the value of the section before it in the order above."""

    temperature: float | None = Field(None, ge=0)
    """Sampling temperature, by which logits are divided; 0 takes the likeliest token."""
    top_p: float | None = later(None, gt=0, le=1)
    """Nucleus sampling: the likeliest tokens whose probabilities add up to this; 1 is all."""
    top_k: int | None = later(None, ge=0)
    """The likeliest tokens that may be sampled; 0 is all."""
    min_p: float | None = later(None, ge=0, le=1)
    """Tokens with less than this share of the likeliest token's probability are not sampled; 0 is all."""
    repetition_penalty: float | None = later(None, gt=0)
    """Divides positive logits of tokens of the prompt and the reply, and multiplies negative ones; 1 is off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = later(None)
    """Texts that end a reply; they stay part of it."""
    max_tokens: int | None = later(None, ge=1)
    """Most tokens sampled in one model call."""
    extra_body: dict[str, Any] | None = later(None)
    """Further fields of a request: of vLLM's sampling parameters, or of a chat API."""

    @field_validator("extra_body")
    @classmethod
    def _not_set_elsewhere(cls, fields: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in fields or {}:
            if (name in SamplingConfig.model_fields and name != "extra_body") or name == "max_completion_tokens":
                raise ValueError(f"{name!r} has a key of its own beside extra_body: {name.replace('_completion', '')}")
            if name in RUN_FIELDS:
                raise ValueError(f"{name!r} is set by the run itself; leave it out")
        return fields

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The settings of sampling that are not null, by field."""
        return {name: value for name in SamplingConfig.model_fields if (value := getattr(self, name)) is not None}

    @property
    def request_sampling(self) -> dict[str, Any]:
        """The same as fields of a request: those of `extra_body` beside the others."""
        settings = self.own_sampling
        return {**settings.pop("extra_body", {}), **settings}
