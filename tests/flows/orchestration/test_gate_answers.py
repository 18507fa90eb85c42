"""The form of an answer, which a flow run that is tried again has already."""

from unittest.mock import Mock

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from flows.orchestration.gate_answers import save_form


def form(status):
    """A form that the server answers with one status."""
    response = httpx.Response(status, request=httpx.Request("POST", "http://api"))
    refused = PrefectHTTPStatusError("refused", request=response.request, response=response)
    return Mock(save=Mock(side_effect=refused))


def test_a_form_that_an_earlier_try_saved_is_kept():
    saved = form(409)
    save_form(saved, {"schema": "a key"})
    saved.save.assert_called_once_with({"schema": "a key"})


def test_a_form_that_is_not_saved_ends_the_run_before_it_pauses():
    with pytest.raises(PrefectHTTPStatusError):
        save_form(form(500), {"schema": "a key"})
