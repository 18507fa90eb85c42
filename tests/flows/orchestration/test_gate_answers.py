"""The form of an answer, which a flow run that is tried again has already."""

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from flows.orchestration.gate_answers import save_form


class Form:
    """A form that the server answers with one status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def save(self, keyset: dict[str, str]) -> None:
        assert keyset == {"schema": "a key"}
        request = httpx.Request("POST", "http://api")
        answer = httpx.Response(self.status, json={}, request=request)
        try:
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise PrefectHTTPStatusError.from_httpx_error(error) from error


def test_a_form_that_an_earlier_try_saved_is_kept():
    save_form(Form(409), {"schema": "a key"})


def test_a_form_that_is_not_saved_ends_the_run_before_it_pauses():
    with pytest.raises(PrefectHTTPStatusError):
        save_form(Form(500), {"schema": "a key"})
