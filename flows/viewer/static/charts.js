// Charts by uPlot: one cursor over all charts of the page, values in a tip, zoom. Each chart's figures are its own data;
// without this file the page has its tables, and a sentence in the place of each chart.
"use strict";
(() => {
  const MAX_MARKED = 40; // values of a line up to which each has a dot
  const POINT_GAP = 5; // pixels between points of several series at one place
  const drawn = new Map(); // box of a chart -> its uPlot
  const isServed = document.querySelector(".brand[href]"); // a saved page has no address to zoom in and no links
  const DOUBLE_CLICK_MS = 300; // a double click leads back from a zoom: until then a click opens nothing
  const isNumber = (value) => typeof value === "number";
  let active = null; // the box that the pointer or the focus is in

  // Colours are those of the style sheet, as the canvas takes them; another theme has others.
  const inks = new Map();
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  function ink(name, share = 1) {
    const key = `${name} ${share}`;
    if (!inks.has(key)) {
      probe.style.color = `color-mix(in srgb, var(--${name}) ${100 * share}%, transparent)`;
      inks.set(key, getComputedStyle(probe).color);
    }
    return inks.get(key);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    inks.clear();
    for (const chart of drawn.values()) chart.redraw();
  });

  function short(value) {
    const size = Math.abs(value);
    if (size && (size < 0.001 || size >= 1e12)) return (+value.toPrecision(3)).toExponential().replace("e+", "e");
    return new Intl.NumberFormat("en", { notation: size >= 1000 ? "compact" : "standard", maximumSignificantDigits: 4 }).format(value);
  }
  function exact(value) {
    if (!isNumber(value)) return value ?? "–";
    const size = Math.abs(value);
    return size && (size < 0.001 || size >= 1e9) ? value.toExponential(2) : new Intl.NumberFormat("en", { maximumSignificantDigits: size < 1000 ? 4 : 5 }).format(value);
  }

  // What uPlot draws: a table of columns over x, and a description of each. Series of several runs have places of their own.
  function columns(data) {
    const onScale = (value) => (isNumber(value) && !(data.log && value <= 0) ? value : null);
    const tables = [], series = [{}], bands = [], lines = [false];
    const total = data.x.map(() => 0);
    function column(one, values, description, isLine = false) {
      tables.push([one.x || data.x, values.map(onScale)]);
      series.push({ points: { show: false }, paths: () => null, ...description });
      lines.push(isLine);
      return series.length - 1;
    }
    for (const one of data.series) {
      const stroke = () => ink(one.colour);
      if (data.cells || one.kind === "bars") continue;
      if (one.low) {
        const ends = [column(one, one.high, {}), column(one, one.low, {})];
        if (one.kind !== "points") {
          bands.push({ series: ends, fill: () => ink(one.colour, 0.14) });
          for (const end of ends) Object.assign(series[end], { paths: uPlot.paths.linear(), width: 0 });
        }
      }
      if (one.kind === "points") { column(one, one.values, { stroke }, true); continue; }
      if (one.raw) column(one, one.raw, { stroke: () => ink(one.colour, 0.3), width: 1.2, paths: uPlot.paths.linear() });
      const known = (at) => isNumber(one.values[at]);
      const alone = one.values.map((_, at) => at).filter((at) => known(at) && !known(at - 1) && !known(at + 1));
      const points = { show: one.values.length <= MAX_MARKED, size: 5, width: 0, fill: stroke, filter: (_, number, show) => (show || one.x ? null : alone) };
      column(one, one.values, { stroke, width: 1.6, paths: uPlot.paths.linear(), points }, true);
    }
    const stack = data.series.filter((one) => one.kind === "bars").map((one) => {
      one.values.forEach((value, at) => { if (isNumber(value)) total[at] += value; });
      return { one, values: [...total] };
    });
    for (const { one, values } of stack.reverse()) { // the highest first, so that the lower ones cover its foot
      column(one, values, { fill: () => ink(one.colour), width: 0, paths: uPlot.paths.bars({ size: [0.8, 26] }) });
    }
    if (data.cells) tables.push([data.x, data.x.map(() => data.range[1])]);
    if (tables.length === series.length) series.push({ paths: () => null, points: { show: false } });
    return { table: tables.length > 1 ? uPlot.join(tables) : tables[0] || [[], []], series, bands, lines };
  }

  // What is drawn over it: points with intervals, what is not finite, the step at which a band was left, cells.
  function marks(u, data) {
    const { ctx, bbox } = u, scale = devicePixelRatio, [left, top] = [bbox.left, bbox.top];
    const x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true);
    const disc = (a, b, radius) => { ctx.beginPath(); ctx.arc(a, b, radius * scale, 0, 2 * Math.PI); ctx.fill(); };
    function stroke(colour, width, ...lines) {
      ctx.strokeStyle = colour; ctx.lineWidth = width * scale; ctx.beginPath();
      for (const [a, b, c, d] of lines) { ctx.moveTo(a, b); ctx.lineTo(c, d); }
      ctx.stroke();
    }
    ctx.save();
    ctx.fillStyle = ink("soft");
    ctx.textAlign = "right";
    ctx.font = `${11 * scale}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.fillText(data.across, left - 6 * scale, top + bbox.height + 17 * scale);
    ctx.beginPath(); ctx.rect(left - 4 * scale, top - 4 * scale, bbox.width + 8 * scale, bbox.height + 8 * scale); ctx.clip();
    if (data.cells) {
      const [low, high] = data.range, height = (y(low) - y(high)) / data.cells[0].length;
      data.cells.forEach((column, at) => {
        const sum = column.reduce((a, b) => a + b, 0), end = at + 1 < data.x.length ? x(data.x[at + 1]) : left + bbox.width;
        column.forEach((count, up) => {
          if (!count) return;
          ctx.fillStyle = ink("c0", Math.min(1, 0.1 + 1.4 * count / sum));
          ctx.fillRect(x(data.x[at]), y(low) - (up + 1) * height, end - x(data.x[at]), height);
        });
      });
    }
    if (data.exit !== null) {
      ctx.setLineDash([3 * scale, 3 * scale]);
      stroke(ink("warn"), 1.4, [x(data.exit), top, x(data.exit), top + bbox.height]);
      ctx.setLineDash([]);
    }
    data.series.forEach((one, number) => (data.cells || one.kind === "bars" ? [] : one.values).forEach((value, at) => {
      const aside = one.kind === "points" ? POINT_GAP * scale * (number - (data.series.length - 1) / 2) : 0;
      const a = x((one.x || data.x)[at]) + aside, w = 3 * scale;
      if (value !== null && !isNumber(value)) { // an infinite value has no place: a cross at the edge
        const b = value === "-∞" ? top + bbox.height - w : top + w;
        stroke(ink("bad"), 1.8, [a - w, b - w, a + w, b + w], [a - w, b + w, a + w, b - w]);
      } else if (one.kind === "points" && value !== null && !(data.log && value <= 0)) {
        ctx.fillStyle = ink(one.colour);
        disc(a, y(value), 2.5);
        if (one.low && isNumber(one.low[at]) && isNumber(one.high[at])) {
          const [from, to] = [y(one.low[at]), y(one.high[at])];
          stroke(ink(one.colour, 0.7), 1.2, [a, from, a, to], [a - w, from, a + w, from], [a - w, to, a + w, to]);
        }
      }
    }));
    ctx.restore();
  }

  function xRange(data, places) {
    const room = data.series.some((one) => one.kind) ? 0.5 : 0; // half a step, so that no bar is cut
    const flat = places.length > 0 && places[0] === places[places.length - 1];
    return (_, low, high) => {
      if (flat || low === null) return [(places[0] ?? 0.5) - 0.5, (places[0] ?? 0.5) + 0.5];
      const more = Math.max(room, 0.01 * (high - low));
      return [low - more, high + more];
    };
  }
  function yRange(data) {
    return (_, low, high) => {
      if (data.cells) return data.range[0] < data.range[1] ? data.range : [data.range[0] - 0.5, data.range[1] + 0.5];
      if (low === null || low === undefined) return data.log ? [1, 10] : [0, 1];
      if (data.log) return [low / 1.1, high * 1.1];
      if (data.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      if (low === high) { const room = Math.abs(low) / 2 || 0.5; return data.zero && !low ? [0, 2 * room] : [low - room, high + room]; }
      const room = 0.06 * (high - low);
      return [data.zero && low === 0 ? 0 : low - room, data.zero && high === 0 ? 0 : high + room];
    };
  }
  function draw(box) {
    const data = JSON.parse(box.dataset.chart);
    data.zero ||= data.series.some((one) => one.kind === "bars");
    const { table, series, bands, lines } = columns(data);
    const axis = {
      stroke: () => ink("soft"), grid: { stroke: () => ink("line"), width: 1 }, ticks: { show: false },
      font: `11px ${getComputedStyle(document.body).fontFamily}`, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))),
    };
    const whole = ["step", "policy"].includes(data.across) && { incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((power) => n * 10 ** power)).sort((a, b) => a - b) };
    const u = new uPlot({
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, series, bands, padding: [10, 10, 0, 0],
      scales: {
        x: { time: false, range: xRange(data, table[0]) },
        y: { distr: data.log ? 3 : 1, range: yRange(data) },
      },
      axes: [{ ...axis, ...whole, size: 26, space: 36, grid: { show: false } }, { ...axis, size: 46, space: 26 }],
      cursor: {
        y: false, sync: { key: "charts", scales: ["x", null] }, drag: { x: true, y: false, dist: 8 },
        points: { show: (_, number) => (lines[number] ? document.createElement("div") : null), size: () => 7, fill: (plot, number) => plot.series[number].stroke(), stroke: () => ink("card") },
      },
      hooks: { ready: [(plot) => { plot.full = { ...plot.scales.x }; }], draw: [(plot) => marks(plot, data)], setCursor: [(plot) => box === active && tell(plot, data)] },
    }, table, box);
    box.classList.add("is-drawn");
    drawn.set(box, u);
    let downAt = 0, leaving = null;
    u.over.addEventListener("mousedown", (event) => { downAt = event.clientX; });
    u.over.addEventListener("click", (event) => {
      const to = addressAt(u, data), wasDragged = Math.abs(event.clientX - downAt) > 4;
      clearTimeout(leaving);
      if (!to || !isServed || wasDragged) return;
      if (event.ctrlKey || event.metaKey) open(to);
      // A double click leads back from a zoom: until then a click opens nothing.
      else leaving = setTimeout(() => location.assign(to), u.scales.x.min === u.full.min && u.scales.x.max === u.full.max ? 0 : DOUBLE_CLICK_MS);
    });
    u.over.addEventListener("dblclick", () => clearTimeout(leaving));
    u.over.addEventListener("mouseenter", () => { active = box; });
    u.over.addEventListener("mouseleave", () => { active = null; hideTip(); });
    Object.assign(box, { chart: u, figures: data });
    return u;
  }

  const nearest = (places, at) => places.reduce((best, place, number) => (Math.abs(place - at) < Math.abs(places[best] - at) ? number : best), 0);
  function placeOf(u, data) { // of several runs each has places of its own: the first run's count
    const places = data.x.length ? data.x : data.series[0]?.x || [];
    return places.length ? nearest(places, u.posToVal(u.cursor.left, "x")) : -1;
  }
  const stepsOf = (data) => (data.steps.length ? data.steps : data.series[0].steps);
  function addressAt(u, data) {
    if (u.cursor.left < 0) return null;
    const place = placeOf(u, data);
    return place < 0 ? null : data.to && data.to + stepsOf(data)[place];
  }
  function tell(u, data) {
    const { left, top } = u.cursor, place = placeOf(u, data);
    if (left < 0 || place < 0) { hideTip(); return; }
    const title = document.createElement("strong"), table = document.createElement("table");
    title.textContent = [`${data.across} ${stepsOf(data)[place]}`, data.unit].filter(Boolean).join(" · ");
    for (const one of data.series) {
      const row = table.insertRow(), name = row.insertCell(), value = row.insertCell(), swatch = document.createElement("i");
      swatch.style.background = ink(one.colour);
      name.append(swatch, one.name);
      value.className = "number";
      value.textContent = exact(one.values[one.x && data.x.length === 0 ? nearest(one.x, u.posToVal(left, "x")) : place]);
    }
    u.over.classList.toggle("leads", Boolean(isServed && addressAt(u, data)));
    const at = u.over.getBoundingClientRect();
    showTip(at.left + left, at.top + Math.max(top, 0), title, table);
  }

  // By keys: a chart is one stop; its arrows go along the steps, Enter opens the step.
  document.addEventListener("keydown", (event) => {
    const box = event.target.closest?.("[data-chart]"), u = drawn.get(box);
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const data = box.figures, places = data.x.length ? data.x : data.series[0]?.x || [];
    const last = places.length - 1, at = u.cursor.left < 0 ? -1 : u.keyed ?? placeOf(u, data);
    const aims = { ArrowRight: at + 1, ArrowLeft: at < 0 ? last : at - 1, Home: 0, End: last };
    if (event.key in aims && last >= 0) {
      event.preventDefault();
      active = box;
      u.keyed = Math.max(0, Math.min(last, aims[event.key]));
      u.setCursor({ left: u.valToPos(places[u.keyed], "x"), top: 0 });
    } else if (event.key === "Enter" && isServed) {
      const to = addressAt(u, data);
      if (to) location.assign(to);
    } else if (event.key === "Escape") {
      u.keyed = null;
      u.setCursor({ left: -10, top: -10 });
      hideTip();
    }
  });

  // A chart is drawn once it has room: one in a closed fold has none. A part that was taken anew brings new boxes.
  const sizes = new ResizeObserver((entries) => {
    for (const { target: box } of entries) {
      if (!box.clientWidth) continue;
      const u = drawn.get(box) || draw(box);
      if (u.width !== box.clientWidth || u.height !== box.clientHeight) u.setSize({ width: box.clientWidth, height: box.clientHeight });
    }
  });
  function watch(part) {
    for (const [box, u] of drawn) if (!box.isConnected) { u.destroy(); drawn.delete(box); sizes.unobserve(box); }
    for (const box of part.querySelectorAll("[data-chart]")) sizes.observe(box);
  }
  watch(document);

  // What was chosen stays chosen when a part of the page is taken anew.
  const picked = {};
  document.addEventListener("change", (event) => {
    if (event.target.type === "radio") picked[event.target.name] = event.target.value;
  });
  document.addEventListener("stagecoach:fresh", (event) => {
    for (const radio of event.detail.querySelectorAll("input[type=radio]")) {
      if (picked[radio.name] === radio.value) radio.checked = true;
    }
    watch(event.detail);
  });
})();
