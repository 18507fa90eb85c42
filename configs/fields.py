"""What all sections of a config are made of: the base model, and fields that can never change rows."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

OPERATIONAL: dict[str, Any] = {"operational": True}


def operational(default: Any = ..., **constraints: Any) -> Any:
    """A field that cannot change rows and so is not part of any key."""
    return Field(default, json_schema_extra=OPERATIONAL, **constraints)


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
