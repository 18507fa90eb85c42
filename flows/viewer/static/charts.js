// Charts: a cursor that stands at the same step in every chart of the page, with the values in a tip. All of it is read
// from each chart's own data; without this file the charts and the table of numbers, with its links, are there all the same.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const parsed = new WeakMap();
  let step = null; // where the cursor stands
  const isServed = document.querySelector(".brand[href]"); // the links of a saved page lead nowhere

  function dataOf(chart) {
    if (!parsed.has(chart)) parsed.set(chart, JSON.parse(chart.dataset.chart));
    return parsed.get(chart);
  }
  const charts = () => document.querySelectorAll("svg.chart[data-chart]");

  function nearest(data, x) {
    let best = 0;
    data.x.forEach((at, place) => { if (Math.abs(at - x) < Math.abs(data.x[best] - x)) best = place; });
    return best;
  }
  // Of several runs each has places of its own.
  const placeIn = (one, data, place) => one.x ? nearest(one, data.x[place]) : place;
  function placeOf(chart, event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    return nearest(dataOf(chart), point.x);
  }
  function part(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  const colour = (one, number) => one.colour || `s${number % 8}`;

  function draw(chart) {
    const data = dataOf(chart), cursor = chart.querySelector(".cursor");
    cursor.replaceChildren();
    const place = step === null ? -1 : data.steps.indexOf(step);
    if (place < 0) return;
    const [low, high, begin, end] = data.y, x = data.x[place];
    if (data.to && isServed) { // the place under the pointer is a link to its step: one for a chart, not one for each step
      const link = part("a", { href: data.to + step, tabindex: -1 });
      link.append(part("path", { d: `M${x} ${end}V${begin}` }));
      cursor.append(link);
    }
    cursor.append(part("line", { x1: x, x2: x, y1: begin, y2: end }));
    data.series.forEach((one, number) => {
      const at = placeIn(one, data, place), value = one.values[at];
      if (typeof value !== "number" || one.kind === "bars" || chart.querySelector(".heat") || (data.log && value <= 0)) return;
      const share = data.log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      cursor.append(part("circle", { cx: one.x ? one.x[at] : x, cy: begin + share * (end - begin), r: 3.4, class: colour(one, number) }));
    });
  }
  function moveTo(next) {
    if (next === step) return;
    step = next;
    for (const chart of charts()) draw(chart);
  }

  // The tip: one for the page, its texts put in as text.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const shown = (value) => {
    if (value === null) return "–";
    if (typeof value !== "number") return value;
    const size = Math.abs(value);
    return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  function fill(chart, place) {
    const data = dataOf(chart), title = document.createElement("strong"), table = document.createElement("table");
    title.textContent = [`${data.across} ${data.steps[place]}`, data.unit].filter(Boolean).join(" · ");
    data.series.forEach((one, number) => {
      const row = table.insertRow(), name = row.insertCell(), value = row.insertCell();
      row.className = colour(one, number);
      name.append(document.createElement("i"), one.name);
      value.className = "number";
      value.textContent = shown(one.values[placeIn(one, data, place)]);
    });
    tip.replaceChildren(title, table);
  }
  function showTip(chart, place, x, y) {
    fill(chart, place);
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), beside = 16;
    const left = x + beside + box.width > innerWidth ? x - beside - box.width : x + beside;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + beside, innerHeight - box.height - 4))}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  document.addEventListener("pointermove", (event) => {
    const chart = event.target.closest?.("svg.chart[data-chart]");
    if (!chart || !dataOf(chart).x.length) { if (!tip.hidden) { hideTip(); moveTo(null); } return; }
    const place = placeOf(chart, event);
    moveTo(dataOf(chart).steps[place]);
    showTip(chart, place, event.clientX, event.clientY);
  });
  // A stretch that is drawn with the pointer is zoomed into; a double click leads back. The address keeps it.
  let drag = null;
  const zoom = (from, to) => {
    const address = new URL(location.href);
    for (const [name, value] of Object.entries({ from, to })) {
      if (value === null) address.searchParams.delete(name); else address.searchParams.set(name, value);
    }
    location.assign(address);
  };
  const zoomable = (event) => isServed && event.target.closest?.(".charts svg.chart[data-chart]");
  document.addEventListener("pointerdown", (event) => {
    const chart = event.button === 0 && event.pointerType !== "touch" && zoomable(event);
    drag = chart && dataOf(chart).x.length ? { chart, begin: dataOf(chart).steps[placeOf(chart, event)], x: event.clientX } : null;
  });
  document.addEventListener("dragstart", (event) => { if (drag) event.preventDefault(); }); // the cursor is a link
  document.addEventListener("pointerup", (event) => {
    if (!drag || Math.abs(event.clientX - drag.x) < 8) return;
    const end = dataOf(drag.chart).steps[placeOf(drag.chart, event)];
    document.addEventListener("click", (click) => click.preventDefault(), { once: true, capture: true });
    if (end !== drag.begin) zoom(Math.min(drag.begin, end), Math.max(drag.begin, end));
  });
  document.addEventListener("dblclick", (event) => {
    if (zoomable(event) && /[?&](from|to)=/.test(location.search)) zoom(null, null);
  });
  document.addEventListener("scroll", hideTip, { passive: true });

  // By keys: a chart is one stop; its arrows go along the steps, Enter opens the step.
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest?.("svg.chart[data-chart]");
    if (!chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const data = dataOf(chart), at = data.steps.indexOf(step), last = data.steps.length - 1;
    const aims = { ArrowRight: at + 1, ArrowLeft: at < 0 ? last : at - 1, Home: 0, End: last };
    if (event.key in aims && last >= 0) {
      const place = Math.max(0, Math.min(last, aims[event.key]));
      event.preventDefault();
      moveTo(data.steps[place]);
      const corner = new DOMPoint(data.x[place], data.y[3]).matrixTransform(chart.getScreenCTM());
      showTip(chart, place, corner.x, corner.y);
    } else if (event.key === "Enter" && at >= 0) {
      chart.querySelector(".cursor a")?.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
    } else if (event.key === "Escape") {
      hideTip();
      moveTo(null);
    }
  });

  // A list is sifted while somebody types, without asking again; entered, the words go into the address.
  function sift() {
    const field = document.querySelector("[data-sifts]"), list = field && document.getElementById(field.dataset.sifts);
    if (!list) return;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...list.querySelectorAll("[data-row]")];
    for (const row of rows) {
      const said = row.dataset.said.toLowerCase(); // its name, unit and meaning, and that of each environment
      row.hidden = !words.every((word) => said.includes(word));
    }
    for (const group of list.querySelectorAll("section")) group.hidden = !group.querySelector("[data-row]:not([hidden])");
    const nothing = list.querySelector("[data-sifted-out]");
    if (nothing) nothing.hidden = !words.length || rows.some((row) => !row.hidden);
  }
  document.addEventListener("input", (event) => {
    if (!event.target.matches?.("[data-sifts]")) return;
    const fold = document.getElementById(event.target.dataset.sifts)?.closest("details");
    if (fold) fold.open = true;
    sift();
    keep({ sifted: event.target.value });
  });
  // Who comes back finds what was typed and opened: it is kept with this entry of the history, not in the address.
  const kept = history.state?.charts || {};
  function keep(more) {
    history.replaceState({ ...history.state, charts: Object.assign(kept, more) }, "");
  }
  function restore() {
    for (const [id, open] of Object.entries(kept.folds || {})) {
      const fold = document.getElementById(id);
      if (fold) fold.open = open;
    }
    const field = document.querySelector("[data-sifts]");
    if (field && kept.sifted !== undefined) field.value = kept.sifted;
    sift();
  }

  // What was chosen stays chosen when a part of the page is taken anew, and what was opened stays open.
  const picked = {}, opened = new Map();
  document.addEventListener("toggle", (event) => {
    if (!event.target.id) return;
    opened.set(event.target.id, event.target.open);
    keep({ folds: Object.fromEntries(opened) });
  }, true); // it does not bubble
  document.addEventListener("change", (event) => {
    if (event.target.type === "radio") picked[event.target.name] = event.target.value;
  });
  document.addEventListener("stagecoach:fresh", (event) => {
    for (const radio of event.detail.querySelectorAll("input[type=radio]")) {
      if (picked[radio.name] === radio.value) radio.checked = true;
    }
    for (const [id, open] of opened) {
      const part = event.detail.id === id ? event.detail : event.detail.querySelector(`#${CSS.escape(id)}`);
      if (part) part.open = open;
    }
    for (const chart of event.detail.querySelectorAll("svg.chart[data-chart]")) draw(chart);
    sift();
  });
  restore();
})();
