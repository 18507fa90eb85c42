// What every page does: the tip, the keys, and following a run that goes on. Pages work without it.
"use strict";
(() => {
  // The tip: one for the page, its contents put in as text. `showTip` and `hideTip` are also for the other scripts.
  const tip = document.createElement("div");
  Object.assign(tip, { id: "tip", className: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  window.hideTip = () => { tip.hidden = true; };
  window.showTip = (x, y, ...contents) => {
    tip.replaceChildren(...contents);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(4, y + 18 + height > innerHeight ? y - height - 10 : y + 18)}px`;
    return tip.id;
  };
  // The browser's own hint comes late; ours takes its text, so that there are never two.
  const TOLD = "[data-tip], .seg";
  function textOf(part) {
    const title = part.querySelector("title");
    part.dataset.tip ??= title ? title.textContent : part.title.replaceAll(", ", "\n");
    title?.remove();
    part.removeAttribute("title");
    return part.dataset.tip;
  }
  let told = null; // by the pointer or the focus
  function tell(part, x, y) {
    if (part) showTip(x, y, textOf(part)); else if (told) hideTip();
    told = part;
  }
  document.addEventListener("pointermove", (event) => tell(event.target.closest?.(TOLD), event.clientX, event.clientY));
  document.addEventListener("focusin", (event) => {
    const part = event.target.closest("[data-tip]"), box = part?.getBoundingClientRect();
    tell(part, box?.left, box?.bottom - 12);
  });
  document.addEventListener("scroll", hideTip, { passive: true, capture: true });

  // Forms: a choice acts at once; empty fields stay out of the address, so that it says no more than was asked.
  const fields = (form) => [...form.elements].filter((field) => field.name);
  document.addEventListener("change", (event) => {
    const form = event.target.matches("select") && event.target.closest("form[data-choosing]");
    if (form) form.requestSubmit();
  });
  document.addEventListener("submit", (event) => {
    if (event.target.matches("[data-choosing]")) for (const field of fields(event.target)) if (!field.value) field.disabled = true;
  });
  addEventListener("pageshow", () => { // going back shows the page as it was left: its fields have to be usable again
    for (const form of document.querySelectorAll("form[data-choosing]")) for (const field of fields(form)) field.disabled = false;
  });

  // Samples: another colouring without a new page.
  document.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-colour-by]");
    if (!chosen || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    for (const part of document.querySelectorAll("[data-colour]")) part.dataset.colour = chosen.dataset.colourBy;
    for (const link of document.querySelectorAll("[data-colour-by]")) {
      if (link.dataset.colourBy === chosen.dataset.colourBy) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
    if (chosen.href) history.replaceState(null, "", chosen.href); // a saved file's links have no aim
  });

  // Keys. Rows that can be walked carry data-row; the link that a row opens is its first.
  // Where one is, is where the focus is: it stays right when a part of the page is taken anew.
  const rows = () => [...document.querySelectorAll("[data-row]")].filter((each) => each.checkVisibility()); // none of a closed fold
  let last = null;
  const here = () => document.activeElement.closest("[data-row]") || last;
  function walk(by) {
    const all = rows();
    if (!all.length) return;
    const at = all.indexOf(here());
    last = all[Math.min(all.length - 1, Math.max(0, at + by))];
    let aim = last.querySelector("a[href]");
    if (!aim) { aim = last; aim.tabIndex = -1; } // a saved page has no links
    aim.focus({ preventScroll: true });
    last.scrollIntoView({ block: "nearest" });
  }
  const follow = (selector) => document.querySelector(selector)?.click();
  const KEYS = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => walk(1),
    k: () => walk(-1),
    "[": () => follow("[data-previous]"),
    "]": () => follow("[data-next]"),
    u: () => [...document.querySelectorAll(".brand, .crumbs a")].pop()?.click(),
    n: () => follow("#read [rel=next]"),
    p: () => follow("#read [rel=prev]"),
    m: () => here()?.querySelectorAll("details").forEach((each) => { each.open = !each.open; }),
    "?": () => document.getElementById("keys")?.showModal(),
  };
  for (const button of document.querySelectorAll("[data-keys]")) { button.hidden = false; button.addEventListener("click", KEYS["?"]); }
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea, dialog");
    const composed = event.getModifierState("AltGraph"); // some keyboards have their brackets there
    if ((event.ctrlKey || event.metaKey || event.altKey) && !composed) return;
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  // Following a run: parts of the page with data-live are taken anew when the store's mark is another.
  const EVERY_MS = 2000;
  const REST = 10; // between looks, in lengths of the last one: a page of a long run must not take a core from the run
  const state = document.querySelector("[data-live-state]");
  let mark = document.body.dataset.mark;
  let quiet = state?.hidden; // nothing is going: followed all the same, as something may begin

  async function look() {
    if (document.hidden) return;
    const now = (await (await fetch("/mark")).json()).mark;
    if (now === mark) return;
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const done = [...document.querySelectorAll("[data-live]")].map((part) => replace(part, fresh));
    const said = fresh.querySelector("[data-live-state]");
    quiet = !said || said.hidden;
    if (!done.every(Boolean)) return; // once more, when nobody is at it
    mark = said ? fresh.body.dataset.mark || now : null; // of a run that has ended nothing new comes
    if (!said) state.remove();
  }
  // What the server wrote of each part: scripts draw charts into them.
  const written = new WeakMap([...document.querySelectorAll("[data-live]")].map((part) => [part, part.cloneNode(true)]));
  // Take a part anew, unless somebody is at work in it; return whether it says what is so now.
  function replace(part, fresh) {
    const other = fresh.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
    if (!other || written.get(part)?.isEqualNode(other)) return true;
    written.set(other, other.cloneNode(true));
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const again = focused && counterpart(focused, part, other);
    if ((focused && !again) || selectedIn(part)) return false;
    const scrolled = [...part.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    const opened = foldsOf(part).map((each) => each.open);
    part.replaceWith(document.adoptNode(other));
    foldsOf(other).forEach((each, at) => { each.open = opened[at] ?? each.open; });
    other.querySelectorAll(".scroll").forEach((each, at) => each.scrollTo(...(scrolled[at] || [0, 0])));
    document.dispatchEvent(new CustomEvent("stagecoach:fresh", { detail: other }));
    again?.focus({ preventScroll: true });
    return true;
  }
  // What is in the new part what the focused element was in the old one; nothing where somebody types or chooses.
  function counterpart(focused, part, other) {
    if (focused.matches("input, select, textarea")) return null;
    if (focused === part) return other;
    if (focused.id) return other.querySelector(`#${CSS.escape(focused.id)}`);
    const address = focused.getAttribute("href"), kind = address ? "a[href]" : "summary";
    if (!focused.matches(kind)) return null;
    const same = (inside) => [...inside.querySelectorAll(kind)].filter((each) => each.getAttribute("href") === address);
    return same(other)[same(part).indexOf(focused)] || null;
  }
  const foldsOf = (part) => [part, ...part.querySelectorAll("details")].filter((each) => each.matches("details"));
  function selectedIn(part) {
    const chosen = window.getSelection();
    return Boolean(chosen) && !chosen.isCollapsed && part.contains(chosen.anchorNode);
  }
  function tellState(words, stale, hidden) {
    if (!state) return;
    state.classList.toggle("stale", stale);
    state.hidden = hidden;
    if (state.textContent !== words) state.textContent = words;
  }
  async function keepLooking() {
    const began = performance.now();
    try {
      await look();
      tellState("live", false, quiet);
    } catch {
      tellState("not answering", true, false);
    }
    if (mark) setTimeout(keepLooking, Math.max(EVERY_MS, REST * (performance.now() - began)));
  }
  if (mark) setTimeout(keepLooking, EVERY_MS);

  // The start page: what is newer than all that was there when this browser looked last, before this tab.
  function markNews() {
    const news = document.querySelector("[data-news]"), events = news ? [...news.querySelectorAll("[data-at]")] : [];
    if (!events.length) return;
    const name = `seen ${news.dataset.news}`;
    if (sessionStorage.getItem(name) === null) sessionStorage.setItem(name, localStorage.getItem(name) || "");
    localStorage.setItem(name, events[0].dataset.at);
    const since = sessionStorage.getItem(name), fresh = events.filter((each) => since && each.dataset.at > since);
    for (const each of fresh) each.classList.add("new");
    if (since) news.querySelector("summary").textContent = `Since you looked last: ${fresh.length || "nothing"} new`;
    if (fresh.length) news.open = true;
  }
  if (mark) { markNews(); document.addEventListener("stagecoach:fresh", markNews); }
})();
