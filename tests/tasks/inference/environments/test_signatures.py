"""Models made without validation look at their default factories' signatures once, not each time."""

from pydantic import BaseModel, Field
from pydantic._internal import _fields

from tasks.inference.environments.host import cache_signatures


class Message(BaseModel):
    parts: list[str] = Field(default_factory=lambda: ["none"])


def test_a_factory_is_looked_at_once_and_still_called_each_time(monkeypatch):
    looked, look = [], _fields.takes_validated_data_argument
    monkeypatch.setattr(
        _fields, "takes_validated_data_argument", lambda factory: looked.append(factory) or look(factory)
    )
    Message.model_construct()
    Message.model_construct()
    assert len(looked) == 2  # without it: once a message
    cache_signatures()
    first, second = Message.model_construct(), Message.model_construct()
    assert len(looked) == 3
    assert first.parts == second.parts == ["none"]
    assert first.parts is not second.parts
