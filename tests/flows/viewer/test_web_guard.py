"""Who is let in: names that are answered to, tokens, methods, and the headers of every answer."""

from itertools import product
from urllib.parse import urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.viewer.app import HEADERS, Guard, host_name
from flows.viewer.serving import address, is_loopback, names
from tests.fixtures.faults import happened

TOKEN = "a secret token"
OPENING = "/?token=a+secret+token"
INSIDE = PlainTextResponse("inside")


def client(*hosts, token=""):
    return TestClient(Guard(INSIDE, hosts, token), base_url="http://127.0.0.1:8265", follow_redirects=False)


def asked(host, *hosts, token="", **headers):
    return client(*hosts, token=token).get("/runs/a?x=1", headers={"host": host, **headers})


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8265", "localhost", "LOCALHOST:1", "[::1]", "[::1]:8265", "127.0.0.1:65535"]
)
def test_the_names_of_this_machine_are_answered_to(host):
    assert asked(host).text == "inside"


OTHERS = """
attacker.example attacker.example:8265 127.0.0.1.attacker.example localhost.attacker.example localhost.
[::1]attacker.example [::1 ::1 127.0.0.1:8265:1 127.0.0.1: 127.0.0.1:port me@127.0.0.1 127.0.0.1/ 0.0.0.0 192.168.1.5
[fe80::1] 2130706433 \xe9
"""


@pytest.mark.fault("hostile text", "a request with another host's name", "turned away, nothing shown")
@pytest.mark.parametrize("host", [*OTHERS.split(), "127.0.0.1 ", ""])
def test_any_other_name_is_turned_away(host):
    answer = client().get("/", headers=[(b"host", host.encode("latin-1"))])
    assert (answer.status_code, "inside" in answer.text) == (421, False)
    happened(f"status {answer.status_code}")


def test_a_name_that_was_given_is_answered_to_in_any_case():
    assert asked("my-machine:80", "My-Machine").text == asked("MY-MACHINE", "My-Machine").text == "inside"
    assert asked("my-machine.local", "My-Machine").status_code == 421
    assert client("").get("/", headers=[(b"host", b"")]).status_code == 421


@pytest.mark.parametrize("host", ["192.168.1.5:8265", "[fe80::1]:8265", "0.0.0.0"])
def test_where_a_token_is_asked_for_numbers_are_answered_to_and_other_names_not(host):
    bearer = {"token": TOKEN, "authorization": f"Bearer {TOKEN}"}
    assert asked(host, token=TOKEN).status_code == 401 and asked(host, **bearer).text == "inside"
    assert asked("attacker.example", **bearer).status_code == 421


def test_the_token_of_an_address_becomes_a_cookie_and_leaves_the_address():
    visitor = client(token=TOKEN)
    assert visitor.get("/runs/a").status_code == 401
    first = visitor.get("/runs/a%2Fb?x=1&token=a+secret+token&y=&x=2")
    assert (first.status_code, first.headers["location"]) == (303, "/runs/a%2Fb?x=1&y=&x=2")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "secret" not in cookie
    assert visitor.get("/runs/a").text == "inside"
    again = visitor.get(OPENING)
    assert (again.status_code, again.headers["location"]) == (303, "/")


@pytest.mark.parametrize(
    "path", ["//evil.example/x", "///evil.example", "/\\evil.example", "/%5C%5Cevil.example", "//evil.example\\@x"]
)
def test_the_way_on_leads_to_no_other_host(path):
    async def raw(scope, receive, send):
        await Guard(INSIDE, (), TOKEN)({**scope, "raw_path": path.encode()}, receive, send)

    visitor = TestClient(raw, base_url="http://127.0.0.1", follow_redirects=False)
    answer = visitor.get(OPENING)
    assert answer.status_code == 303
    there = answer.headers["location"].replace("\\", "/")
    assert not urlsplit(there).netloc and not there.startswith("//")


@pytest.mark.parametrize("token", ["", "wrong", "a secret toke", "a secret token ", "gehe\xefm", "\u20ac"])
def test_a_wrong_token_is_turned_away_however_it_is_brought(token):
    visitor = client(token=TOKEN)
    assert visitor.get("/", params={"token": token}).status_code == 401
    for header, before in product((b"authorization", b"cookie"), (b"Bearer ", b"bearer", b"stagecoach_view=", b"")):
        assert visitor.get("/", headers=[(header, before + token.encode())]).status_code == 401
    assert visitor.get("/?token=%ff%00%c3").status_code == 401


@pytest.mark.parametrize("junk", ['a={"b": 1}', "\xe9=1", "x[1]=2; ;;=", "a b c", 'q="', "=" * 5000])
def test_cookies_of_others_on_the_same_host_do_not_matter(junk):
    good, other = (
        client(token=token).get("/", params={"token": token}).headers["set-cookie"].partition(";")[0]
        for token in (TOKEN, "of another viewer")
    )
    assert good.partition("=")[0] != other.partition("=")[0]
    for cookies, status in ((f"{junk}; {other}; {good}", 200), (f"{junk}; {other}", 401)):
        answer = client(token=TOKEN).get("/", headers=[(b"cookie", cookies.encode("latin-1"))])
        assert answer.status_code == status


@pytest.mark.fault("hostile text", "a request that is to change something", "turned away")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "ANY"])
def test_nothing_but_reading_is_allowed(method):
    for token in ("", TOKEN):
        answer = client(token=token).request(method, "/")
        happened(f"status {answer.status_code}")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_every_answer_has_the_headers_whoever_gives_it():
    answers = [
        client().get("/"),
        client().head("/"),
        client().post("/"),
        asked("attacker.example"),
        client(token=TOKEN).get("/"),
        client(token=TOKEN).get(OPENING),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 405, 421, 401, 303]
    assert all(answer.headers[name] == value for answer in answers for name, value in HEADERS.items())
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize(
    ("host", "own", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.2", True),
        ("::1", "[::1]", True),
        ("[::1]", "[::1]", True),
        ("localhost", "localhost", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("::", "[::]", False),
        ("localhost.attacker.example", "localhost.attacker.example", False),
        ("", "", False),
    ],
)
def test_what_is_listened_on_is_answered_to(host, own, loopback):
    assert is_loopback(host) is loopback
    assert names(host)[0] == own
    if own:
        assert host_name(f"{own}:8265") == own


def test_the_address_that_is_printed_can_be_opened():
    assert address("127.0.0.1", 8265, "", "") == "http://127.0.0.1:8265/"
    assert address("::1", 1, "a", "t") == "http://[::1]:1/runs/a?token=t"
    assert address("127.0.0.1", 1, "", "a&b=c #") == "http://127.0.0.1:1/?token=a%26b%3Dc%20%23"
    assert "0.0.0.0" not in address("0.0.0.0", 1, "", "t")
