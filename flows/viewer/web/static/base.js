// What every page does: the theme, the keys, and following a run that goes on. Pages work without it.
"use strict";
(() => {
  const root = document.documentElement;
  const THEMES = ["", "light", "dark"];

  function remembered(name) {
    try { return localStorage.getItem(name) || ""; } catch { return ""; } // a saved file may have no storage
  }
  function remember(name, value) {
    try { localStorage.setItem(name, value); } catch { /* as above */ }
  }
  function setTheme(theme) {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  }
  setTheme(THEMES.includes(remembered("theme")) ? remembered("theme") : "");
  const themeSwitch = document.querySelector("[data-theme-switch]");
  if (themeSwitch) {
    themeSwitch.hidden = false;
    themeSwitch.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme || "") + 1) % THEMES.length];
      setTheme(next);
      remember("theme", next);
    });
  }

  // Keys. Rows that can be walked carry data-row; the link that a row opens is its first.
  let row = -1;
  const rows = () => [...document.querySelectorAll("[data-row]")];
  function walk(by) {
    const all = rows();
    if (!all.length) return;
    all[row]?.classList.remove("on");
    row = Math.min(all.length - 1, Math.max(0, row + by));
    all[row].classList.add("on");
    all[row].scrollIntoView({ block: "nearest" });
    all[row].querySelector("a")?.focus({ preventScroll: true });
  }
  const follow = (selector) => document.querySelector(selector)?.click();
  const KEYS = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => walk(1),
    k: () => walk(-1),
    "[": () => follow("[data-previous]"),
    "]": () => follow("[data-next]"),
    u: () => [...document.querySelectorAll(".brand, .crumbs a")].pop()?.click(),
    "?": () => document.getElementById("keys")?.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea, dialog");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  // Following a run: parts of the page with data-live are taken anew when the store's mark is another.
  const EVERY_MS = 2000;
  const state = document.querySelector("[data-live-state]");
  let mark = document.body.dataset.mark;

  async function look() {
    if (document.hidden) return;
    const now = (await (await fetch("/mark")).json()).mark;
    if (now === mark) return;
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) replace(part, fresh);
    mark = fresh.body.dataset.mark || now;
    if (!fresh.querySelector("[data-live-state]")) location.reload(); // the run has ended: the whole page says so
  }
  function replace(part, fresh) {
    const other = fresh.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
    if (!other || part.isEqualNode(other) || part.contains(document.activeElement)) return;
    part.replaceWith(document.adoptNode(other));
    document.dispatchEvent(new CustomEvent("stagecoach:fresh", { detail: other }));
  }
  async function keepLooking() {
    try {
      await look();
      state?.classList.remove("stale");
      if (state) state.textContent = "live";
    } catch {
      state?.classList.add("stale");
      if (state) state.textContent = "not answering";
    }
    setTimeout(keepLooking, EVERY_MS);
  }
  if (mark) setTimeout(keepLooking, EVERY_MS);
})();
