"""How pages look and who can use them: widths, labels, contrast, focus; and hostile texts in a browser."""

from pathlib import Path

import pytest

from flows.queries.store_reader import StoreReader
from tests.browser.viewing import picture, viewer
from tests.fixtures.hostile import hostile_store
from tests.flows.viewer.looking import everything, one_of_each

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
GRAVE = ("serious", "critical")
"""Impacts of what axe finds."""
NAMELESS = """() => [...document.querySelectorAll(
  "input:not([type=hidden]), select, textarea, button, a[href]:not([tabindex='-1']), summary")]
  .filter((each) => !(each.labels?.length || each.getAttribute("aria-label") || each.title || each.textContent.trim()))
  .map((each) => each.outerHTML.slice(0, 200))"""
TWICE = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  return ids.filter((each, place) => ids.indexOf(each) !== place);
}"""
CUT = """() => [...document.querySelectorAll("h1, h2, h3, figcaption *, th, dt, summary")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== "visible"
    && getComputedStyle(each).display !== "inline").map((each) => each.textContent)"""
"""Titles that are not shown whole."""
NARROW = """() => [...document.querySelectorAll(".card .chart.is-drawn, .card .ledger.fills")].filter((each) => {
  const card = getComputedStyle(each.closest(".card")), width = each.closest(".card").clientWidth;
  return each.getBoundingClientRect().width < width - parseFloat(card.paddingLeft) - parseFloat(card.paddingRight) - 1;
}).map((each) => each.className.baseVal || each.getAttribute("aria-label"))"""
"""Charts that leave room in their card."""
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((each) => each / 255);
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, part, at) =>
    sum + part * (colour[at] <= 0.04045 ? colour[at] / 12.92 : ((colour[at] + 0.055) / 1.055) ** 2.4), 0);
  const behind = (each) => {
    const own = rgba(getComputedStyle(each).backgroundColor);
    return own[3] === 1 ? own : over(own, each.parentElement ? behind(each.parentElement) : [1, 1, 1, 1]);
  };
  const opacity = (each) => each ? getComputedStyle(each).opacity * opacity(each.parentElement) : 1;
  const found = {};
  for (const each of document.querySelectorAll("body *:not(svg *)")) {
    if (![...each.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
    if (!each.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const ground = behind(each), [red, green, blue, alpha] = rgba(getComputedStyle(each).color);
    const ink = over([red, green, blue, alpha * opacity(each)], ground);
    const [dark, bright] = [light(ground), light(ink)].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found[`${each.nodeName}.${each.className}`] = `${contrast.toFixed(2)} ${each.textContent}`;
  }
  return found;
}"""


@pytest.fixture(scope="module")
def kinds(demo_store):
    """An address of each kind of page."""
    library = StoreReader.at(demo_store)
    fork = next(name for name in library.store.runs.names() if library.store.runs.last(name).parent_run == "demo")
    return one_of_each(library, "demo", fork)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_of_page_can_be_read_and_used(demo, kinds, opened, scheme):
    from axe_playwright_python.sync_playwright import Axe

    window = opened(demo, color_scheme=scheme)
    wrong = []
    for kind, address in kinds.items():
        page = window.open(address)
        for what, script in (("no name", NAMELESS), ("an id twice", TWICE), ("pale", PALE)):
            if faults := page.evaluate(script):
                wrong.append((kind, what, faults))
        found = Axe().run(page).response["violations"]
        wrong += [(kind, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in GRAVE]
        wrong += [(kind, "headings", number)] if (number := page.locator("h1").count()) != 1 else []
        for width in (1600, 1360, 800, 420, 320):
            page.set_viewport_size({"width": width, "height": 900})
            wrong += [(kind, width, "is too narrow by", over)] if (over := page.evaluate(WIDER)) > 0 else []
            for what, script in (("cut", CUT), ("narrow", NARROW)):
                wrong += [(kind, width, what, faults)] if (faults := page.evaluate(script)) else []
            picture(page, f"{kind}-{scheme}-{width}")
        page.set_viewport_size({"width": 1360, "height": 900})
    assert wrong == [], "\n".join(map(str, wrong))


def test_the_focus_is_seen_wherever_it_goes(demo, kinds, opened):
    window = opened(demo)
    seen = """() => {
      const style = getComputedStyle(document.activeElement), box = document.activeElement.getBoundingClientRect();
      const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
      return [document.activeElement.outerHTML.slice(0, 120), outlined,
              box.width > 0 && box.bottom > 0 && box.top < innerHeight];
    }"""
    for kind in ("runs", "run", "step", "trace", "batch", "compare"):
        page = window.open(kinds[kind])
        for _ in range(25):
            page.keyboard.press("Tab")
            what, outlined, inside = page.evaluate(seen)
            if what.startswith("<body"):
                break  # past the last
            assert outlined and inside, (kind, what)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A viewer of a store of hostile rollouts, and addresses of all kinds in it."""
    store = hostile_store(tmp_path_factory.mktemp("hostile") / "store").store
    with viewer(Path(store.root.address)) as address:
        library = StoreReader.at(store.root.address)
        trained = {**one_of_each(library, "base", "replayed"), "refused": "/runs/refused"}
        more = everything(library, "base")[-4:]
        yield address, list(dict.fromkeys([*trained.values(), *more]))


TRAP = """
window.hacked = [];
window.alert = window.confirm = window.prompt = (text) => { window.hacked.push(text); };
document.addEventListener("securitypolicyviolation", (event) => window.hacked.push(event.violatedDirective));
"""


def test_hostile_texts_run_nothing_and_fetch_nothing(hostile, opened, tmp_path):
    base, pages = hostile
    window = opened(base, TRAP)
    for number, address in enumerate(pages):
        page = window.open(address)
        for part in page.locator("details:not([open]) > summary").all()[:5]:
            if part.is_visible():
                part.click()
        for part in page.locator("[data-tip], .chart, .tokens .t, .tok").all()[:3]:
            if part.is_visible():
                part.hover(force=True)
        assert page.evaluate("window.hacked") == [], address
        assert page.evaluate("document.querySelectorAll('img, iframe, object, embed, base').length") == 0
        assert page.evaluate("[...document.scripts].every((each) => each.src.startsWith(location.origin))")
        file = tmp_path / f"{number}.html"
        file.write_bytes(page.request.get(f"{base}{address}{'&' if '?' in address else '?'}format=file").body())
    kept = opened(tmp_path.as_uri(), TRAP)
    for number, address in enumerate(pages):
        page = kept.open(f"/{number}.html")
        assert page.evaluate("window.hacked") == [], address
    picture(page, "hostile")


def test_the_trap_would_tell(opened, tmp_path):
    """A page that does run what a rollout says is caught: else the test above would hold of anything."""
    file = tmp_path / "caught.html"
    file.write_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
    window = opened(tmp_path.as_uri(), TRAP)
    page = window.open("/caught.html")
    page.wait_for_function("() => window.hacked.length === 2")
    guarded = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    file.write_text(guarded + "<script>alert(2)</script>")
    page = window.open("/caught.html")
    page.wait_for_function("() => window.hacked.length === 1 && window.hacked[0].startsWith('script-src')")
    assert window.complaints
    window.complaints.clear()
