// A step: what a cell or a bar is, on hover; filters that act when they are chosen. Without it, titles and a button do.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function show(target, x, y) {
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  }
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) show(target, event.clientX, event.clientY); else tip.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const target = event.target.closest("[data-tip]");
    if (!target) { tip.hidden = true; return; }
    const place = target.getBoundingClientRect();
    show(target, place.left, place.bottom - 12);
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });

  // A choice acts at once; empty fields stay out of the address, so that it says no more than was asked.
  const fields = (form) => [...form.elements].filter((field) => field.name);
  document.addEventListener("change", (event) => {
    const form = event.target.matches("select") && event.target.closest("form[data-choosing]");
    if (form) form.requestSubmit();
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-choosing]")) return;
    for (const field of fields(event.target)) if (!field.value) field.disabled = true;
  });
  // Going back shows the page as it was left: its fields have to be usable again.
  addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-choosing]")) {
      for (const field of fields(form)) field.disabled = false;
    }
  });
})();
