"""Settings of an object store: what is wrong with them is said before anything is asked of a server."""

import re

import pytest

from storage.errors import LayoutError, StoreError
from storage.roots import open_root
from storage.s3 import SETTINGS, locate, settings

GIVEN = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "very secret",
    "AWS_ALLOW_HTTP": "true",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in (*SETTINGS, "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


def test_given_settings_come_before_the_environment_s(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    found = settings(GIVEN)
    assert found == {**GIVEN, "AWS_SESSION_TOKEN": "token", "AWS_REGION": "eu-west-3"}
    assert settings({})["AWS_ENDPOINT_URL"] == "https://elsewhere"


def test_the_host_is_signed_as_it_is_sent_and_the_session_s_token_with_it():
    given = settings({**GIVEN, "AWS_ENDPOINT_URL": "http://MinIO:9000", "AWS_SESSION_TOKEN": "token"})
    bucket = locate("s3://bucket", given)
    headers = bucket._sign("GET", f"{bucket.endpoint}/bucket/key", b"", {"range": "bytes=0-0"})
    assert headers["host"] == "MinIO:9000"
    names = re.search("SignedHeaders=([^,]*)", headers["Authorization"])
    assert names and {"host", "range", "x-amz-security-token"} <= {*names[1].split(";")}


def test_without_an_endpoint_it_is_aws():
    given = settings({**GIVEN, "AWS_ENDPOINT_URL": "", "AWS_REGION": "eu-central-1"})
    assert locate("s3://bucket", given).endpoint == "https://s3.eu-central-1.amazonaws.com"
    assert settings({})["AWS_REGION"] == "us-east-1"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket/a/b-c/", "s3://my.bucket/a/b-c"),
    ],
)
def test_a_place_has_one_address(url, address):
    root = open_root(url, GIVEN)
    assert root.address == address
    assert root.directory is None
    assert root.child("x") == f"{address}/x"


@pytest.mark.parametrize(
    "url",
    [
        "s3:///prefix",
        "s3://bucket//prefix",
        "s3://bucket/../other",
        "s3://bucket/a?region=x",
        "s3://key:secret@bucket/a",
        "gs://bucket/a",
    ],
)
def test_other_places_are_refused(url):
    with pytest.raises(LayoutError, match="s3://bucket/prefix"):
        open_root(url, GIVEN)


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": ""}, "AWS_ACCESS_KEY_ID not set"),
        ({"AWS_ALLOW_HTTP": ""}, "set AWS_ALLOW_HTTP=true"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "no address of a server"),
    ],
)
def test_what_is_wrong_with_settings_is_said(spoilt, told):
    with pytest.raises(StoreError, match=told) as caught:
        open_root("s3://bucket/a", {**GIVEN, **spoilt})
    assert caught.value.safe == "nothing was touched"


def test_secrets_are_not_told():
    root = open_root("s3://bucket/a", {**GIVEN, "AWS_SESSION_TOKEN": "also secret"})
    assert "secret" not in repr(root)
    assert root.options["AWS_SECRET_ACCESS_KEY"] == "very secret"
