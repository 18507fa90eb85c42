// Tokens: another colouring without a new page, and all values of the token that is pointed at or has the focus.
"use strict";
(() => {
  const box = document.querySelector("[data-messages]");
  if (!box) return;
  const select = document.querySelector("[data-colors]");
  const views = [...document.querySelectorAll("[data-view]")];
  const groups = () => box.querySelectorAll(".tokens");

  // The address always says what is looked at; a file that was saved has none that can be changed.
  function changed(address, name, value) {
    const url = new URL(address);
    if (value) url.searchParams.set(name, value); else url.searchParams.delete(name);
    return url.pathname + url.search + url.hash;
  }
  function remember(name, value) {
    try { history.replaceState(null, "", changed(location.href, name, value)); } catch { /* a saved file has no address */ }
    // Links to this trace and to its neighbours keep the choice.
    for (const link of document.querySelectorAll('a[href^="/"]')) {
      if (link.pathname === location.pathname || link.matches("[data-previous], [data-next]")) link.href = changed(link.href, name, value);
    }
    for (const form of document.querySelectorAll("form[method=get]")) {
      const field = form.elements[name] || form.appendChild(document.createElement("input"));
      if (field.tagName === "INPUT") Object.assign(field, { type: "hidden", name, value });
    }
  }

  function colour(name) {
    for (const group of groups()) {
      const shades = JSON.parse(group.dataset.shades)[name];
      [...group.children].forEach((token, place) => {
        const special = token.classList.contains("special") ? " special" : "";
        token.className = (shades ? `t k${shades[place]}` : "t") + special;
      });
    }
    for (const legend of document.querySelectorAll("[data-legend]")) legend.hidden = legend.dataset.legend !== name;
    box.dataset.color = name;
    select.value = name;
    remember("color", name);
  }
  function show(view) {
    box.dataset.shown = view;
    for (const each of views) {
      if (each.dataset.view === view) each.setAttribute("aria-current", "true"); else each.removeAttribute("aria-current");
    }
    remember("view", view);
  }
  document.querySelector("[data-without-script]")?.setAttribute("hidden", "");
  select.addEventListener("change", () => colour(select.value));
  for (const each of views) each.addEventListener("click", (event) => { event.preventDefault(); show(each.dataset.view); });

  // Where packing scaled the weights of the credit, both are shown: the batch row has what was trained.
  function weights(name, label) {
    if (!box.dataset.scaled.split(" ").includes(name)) return [[name, label]];
    return [[name, `${label} (credit)`], [`trained_${name}`, `${label} as trained`]];
  }
  const NAMES = [
    ["token_id", "token"], ["place", "place in message"], ["position", "place in sample"], ["branch", "sample"],
    ["sampled", "sampled"], ["policy_version", "policy"], ["is_content", "body"], ["trained", "trained on"], ["advantage", "advantage"],
    ...weights("rl_weight", "rl weight"), ...weights("ce_weight", "cross-entropy weight"),
    ...weights("ref_kl_weight", "reference-KL weight"),
    ["engine_logprob", "engine log-prob"], ["learner_logprob", "learner log-prob"], ["log_ratio", "log ratio"],
    ["ratio", "importance ratio"], ["mismatch", "mismatch KL"], ["entropy", "entropy (nats)"],
    ["outside", "outside trust region"], ["reference_logprob", "reference log-prob"], ["signal", "reference signal"],
  ];
  function shown(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
    return String(value);
  }
  function element(name, text) {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  }
  function values(token) {
    const group = token.parentElement;
    group.columns ||= JSON.parse(group.dataset.tokens);
    const place = [...group.children].indexOf(token);
    return Object.fromEntries(Object.entries(group.columns).map(([name, column]) => [name, column[place]]));
  }
  function open(token) {
    const found = values(token);
    const list = document.createElement("dl");
    for (const [name, label] of NAMES) list.append(element("dt", label), element("dd", shown(found[name])));
    const at = token.getClientRects()[0] || token.getBoundingClientRect();
    token.setAttribute("aria-describedby", showTip(at.left - 14, at.bottom - 12, element("b", token.textContent.replaceAll("\n", "")), list));
  }
  box.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".t");
    if (token) open(token); else if (!document.activeElement?.matches(".t")) hideTip();
  });
  box.addEventListener("mouseleave", hideTip);
  box.addEventListener("focusin", (event) => { if (event.target.matches(".t")) open(event.target); else hideTip(); });
  box.addEventListener("focusout", hideTip);

  addEventListener("scroll", () => { if (document.activeElement?.matches(".t")) open(document.activeElement); }, { passive: true });

  // One token of each message takes the focus; arrows go on from it, over the ends of messages too.
  function go(token, by) {
    const all = [...box.querySelectorAll(".t")];
    const next = all[all.indexOf(token) + by];
    if (!next) return;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    open(next);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const token = event.target.closest?.(".t");
    const names = [...select.options].map((option) => option.value);
    const turn = (by) => colour(names[(names.indexOf(select.value) + by + names.length) % names.length]);
    const keys = {
      c: () => turn(1),
      C: () => turn(-1),
      v: () => show({ both: "text", text: "tokens", tokens: "both" }[box.dataset.shown]),
      ...(token && {
        ArrowRight: () => go(token, 1),
        ArrowLeft: () => go(token, -1),
        Home: () => go(token.parentElement.firstElementChild, 0),
        End: () => go(token.parentElement.lastElementChild, 0),
        Escape: hideTip,
      }),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
})();
