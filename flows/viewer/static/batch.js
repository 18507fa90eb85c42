// Bars of samples: colours are switched in place, and what is pointed at is described at once. Pages work without it.
"use strict";
(() => {
  function colourBy(name) {
    for (const part of document.querySelectorAll("[data-colour]:not([data-fixed])")) part.dataset.colour = name;
    for (const each of document.querySelectorAll("[data-colour-by]")) {
      if (each.dataset.colourBy === name) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
  }
  document.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-colour-by]");
    if (!chosen || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    colourBy(chosen.dataset.colourBy);
    if (chosen.href) history.replaceState(null, "", chosen.href); // a saved file's links have no aim
  });

  // The browser's own hint comes late; ours takes its text, so that there are never two.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  function textOf(part) {
    const title = part.querySelector("title");
    if (title || part.title) {
      part.dataset.description = title ? title.textContent : part.title.replaceAll(", ", "\n");
      title?.remove();
      part.removeAttribute("title");
    }
    return part.dataset.description;
  }
  document.addEventListener("pointerover", (event) => {
    const part = event.target.closest?.("svg .seg, svg.attempts circle, .tok");
    tip.hidden = !part;
    if (part) tip.textContent = textOf(part);
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 16;
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below}px`;
  });
})();
