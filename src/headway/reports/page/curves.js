// Small charts with one x axis: a cursor in one of them reads all of them at the same place.
const curves = (() => {
  const PALETTE = 8, MANY_POINTS = 120, GUTTER = 6, FOOT = 18, TOP = 6;
  const AXES = [["version", "version", (x) => `version ${Math.round(x)}`], ["seconds", "time", (x) => `${duration(x * 1e6)} since the start`],
    ["tokens", "trained tokens", (x) => `${many(x)} trained tokens`]];
  const box = byId("learning"), grid = byId("charts"), readout = byId("readout");
  let axisName = "version", at = null, panels = [], stops = [], range = [0, 1], waiting = false, stale = true, inks = [], line = "", soft = "";

  for (const [name, words] of AXES) {
    const button = make("button", "", words);
    button.type = "button";
    button.dataset.axis = name;
    button.addEventListener("click", () => { axisName = name; at = null; place(); });
    byId("axes").append(button);
  }

  const ink = (i) => inks[i % PALETTE], dash = (i) => (i < PALETTE ? [] : [4, 3]);
  const words = (x) => AXES.find(([name]) => name === axisName)[2](x);

  function dress() {
    inks = Array.from({ length: PALETTE }, (_, i) => colourOf(`c${i}`));
    line = colourOf("line");
    soft = colourOf("soft");
    panels.forEach(caption);
    redraw();
  }

  function take({ tables, charts }) {
    box.hidden = charts.length === 0;
    panels = charts.map((chart) => {
      const old = panels.find((panel) => panel.name === chart.name);
      const panel = Object.assign(old ?? build(), { name: chart.name, unit: chart.unit, left_out: chart.left_out });
      panel.curves = chart.curves.map((curve, i) => {
        const table = tables[curve.table], indices = curve.i ?? curve.y.map((_, place) => place);
        return { ...curve, ink: curve.ink ?? i, table, indices };
      });
      caption(panel);
      return panel;
    });
    const figures = panels.map((panel) => panel.figure);
    if (figures.length !== grid.children.length || figures.some((figure, i) => figure !== grid.children[i])) grid.replaceChildren(...figures);
    place();
  }

  function build() {
    const canvas = make("canvas"), cursor = make("i", "cursor"), spots = make("div");
    const head = make("figcaption"), figure = make("figure", "panel", head, make("div", "plot", canvas, cursor, spots));
    const panel = { canvas, cursor, spots, head, figure };
    canvas.setAttribute("role", "img");
    canvas.addEventListener("pointermove", (event) => moveTo(nearestStop(panel, event.clientX - canvas.getBoundingClientRect().left)));
    canvas.addEventListener("pointerdown", (event) => moveTo(nearestStop(panel, event.clientX - canvas.getBoundingClientRect().left)));
    canvas.addEventListener("pointerleave", () => moveTo(null));
    return panel;
  }

  function caption(panel) {
    const several = panel.curves.length > 1;
    panel.values = panel.curves.map(() => make("b"));
    const keys = panel.curves.map((curve, i) => {
      const swatch = make("i");
      swatch.style.background = ink(curve.ink);
      if (curve.ink >= PALETTE) swatch.style.background = `repeating-linear-gradient(90deg, ${ink(curve.ink)} 0 4px, transparent 4px 6px)`;
      return several ? make("span", "key", swatch, curve.name, panel.values[i]) : make("span", "key", panel.values[i]);
    });
    if (panel.left_out) keys.push(make("span", "key", `and ${panel.left_out} more`));
    panel.spots.replaceChildren(...panel.curves.map((curve) => {
      const spot = make("i", "spot");
      spot.style.background = ink(curve.ink);
      return spot;
    }));
    panel.head.replaceChildren(make("b", "", panel.name), " ", make("small", "", panel.unit), make("div", "keys", ...keys));
  }

  function place() { // where everything lies on the chosen axis
    let low = Infinity, high = -Infinity;
    const all = new Set();
    for (const panel of panels)
      for (const curve of panel.curves) {
        curve.x = curve.indices.map((i) => curve.table[axisName][i]);
        for (const x of curve.x) all.add(x);
        low = Math.min(low, curve.x[0]);
        high = Math.max(high, curve.x.at(-1));
      }
    stops = [...all].sort((a, b) => a - b);
    range = high > low ? [low, high] : [low - 0.5, low + 0.5];
    for (const button of byId("axes").children) button.setAttribute("aria-pressed", String(button.dataset.axis === axisName));
    redraw();
  }

  function redraw() { stale = true; later(); }
  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (stale) panels.forEach(draw);
      stale = false;
      panels.forEach(point);
      tell();
    });
  }

  function scaleOf(panel) {
    let low = Infinity, high = -Infinity;
    for (const { y } of panel.curves) for (const value of y) { if (value < low) low = value; if (value > high) high = value; }
    if (low >= 0 && low < 0.4 * high) low = 0;
    if (high === low) { const room = Math.abs(high) * 0.1 || 0.5; low -= room; high += room; }
    const rough = (high - low) / 3, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const ticks = [];
    for (let i = Math.floor(low / step + 1e-9); i * step < high + step * 0.999; i++) ticks.push(Number((i * step).toPrecision(12)));
    return { low: ticks[0], high: ticks.at(-1), ticks };
  }

  function draw(panel) {
    const { pen, width, height } = canvasPen(panel.canvas), { low, high, ticks } = scaleOf(panel);
    pen.font = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
    const labels = ticks.map((tick) => plain(tick, 4));
    const left = Math.ceil(Math.max(...labels.map((label) => pen.measureText(label).width))) + GUTTER, right = width - 8;
    const px = (x) => left + ((x - range[0]) / (range[1] - range[0])) * (right - left);
    const py = (y) => TOP + ((high - y) / (high - low)) * (height - FOOT - TOP);
    Object.assign(panel, { left, right, px, py });
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    ticks.forEach((tick, i) => {
      pen.fillStyle = line;
      pen.fillRect(left, Math.round(py(tick)), right - left, 1);
      pen.fillStyle = soft;
      pen.fillText(labels[i], left - GUTTER + 2, py(tick));
    });
    drawFoot(pen, px, left, right, height);
    for (const curve of panel.curves) drawCurve(pen, curve, px, py);
  }

  function point(panel) { // the cursor and its spots are elements over the chart: moving them draws nothing again
    panel.cursor.hidden = panel.spots.hidden = at === null;
    if (at === null) return;
    panel.cursor.style.transform = `translateX(${Math.round(panel.px(at))}px)`;
    panel.curves.forEach((curve, place) => {
      const i = nearest(curve), spot = panel.spots.children[place];
      spot.hidden = i < 0;
      if (i >= 0) spot.style.transform = `translate(${panel.px(curve.x[i]) - 3.5}px, ${panel.py(curve.y[i]) - 3.5}px)`;
    });
  }

  function drawCurve(pen, curve, px, py) {
    pen.strokeStyle = pen.fillStyle = ink(curve.ink);
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(dash(curve.ink));
    const stroke = (y) => {
      pen.beginPath();
      curve.x.forEach((x, i) => (i ? pen.lineTo(px(x), py(y[i])) : pen.moveTo(px(x), py(y[i]))));
      pen.stroke();
    };
    const noisy = curve.x.length > MANY_POINTS;
    pen.globalAlpha = noisy ? 0.3 : 1;
    stroke(curve.y);
    pen.globalAlpha = 1;
    if (noisy) { pen.lineWidth = 1.8; stroke(smooth(curve.y)); }
    pen.setLineDash([]);
    if (curve.x.length > 40) return;
    for (let i = 0; i < curve.x.length; i++) { pen.beginPath(); pen.arc(px(curve.x[i]), py(curve.y[i]), 2, 0, 7); pen.fill(); }
  }

  function smooth(y) { // running means over a fortieth of the points to each side
    const reach = Math.ceil(y.length / 40), sums = [0];
    for (const value of y) sums.push(sums.at(-1) + value);
    return y.map((_, i) => {
      const from = Math.max(i - reach, 0), to = Math.min(i + reach + 1, y.length);
      return (sums[to] - sums[from]) / (to - from);
    });
  }

  function drawFoot(pen, px, left, right, height) {
    const seconds = axisName === "seconds", rough = ((range[1] - range[0]) / (right - left)) * 76;
    const power = 10 ** Math.floor(Math.log10(rough));
    const steps = seconds && rough > 1 ? [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800]
      : [1, 2, 5, 10].map((n) => n * power);
    let step = steps.find((n) => n >= rough) ?? Math.ceil(rough / 86400) * 86400;
    if (axisName === "version") step = Math.max(step, 1);
    pen.fillStyle = soft;
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (let x = Math.ceil(range[0] / step - 1e-9) * step; x <= range[1] + step * 1e-6; x += step) {
      const label = seconds ? clock(x, step) : axisName === "tokens" ? many(x) : String(Math.round(x)), room = pen.measureText(label).width / 2;
      pen.fillRect(Math.round(px(x)), height - FOOT, 1, 3);
      pen.fillText(label, Math.min(Math.max(px(x), room), right + 8 - room), height - 4);
    }
  }

  function clock(s, step) {
    if (step < 60) return s < 120 ? `${Number(s.toPrecision(6))} s` : `${Math.floor(s / 60)}:${String(Math.round(s % 60)).padStart(2, "0")}`;
    return step < 3600 ? `${Math.floor(s / 3600) ? `${Math.floor(s / 3600)}h ` : ""}${Math.round((s % 3600) / 60)}m` : `${Math.round(s / 3600)}h`;
  }

  function nearest({ x }) { // index of the point next to the cursor; -1 where the curve does not reach so far
    const i = lowerBound(x, at), slack = (range[1] - range[0]) / 50 + (x.length > 1 ? (x.at(-1) - x[0]) / (x.length - 1) : 0);
    if (at < x[0] - slack || at > x.at(-1) + slack) return -1;
    return i > 0 && (i === x.length || at - x[i - 1] <= x[i] - at) ? i - 1 : i;
  }

  function nearestStop(panel, px) {
    const wanted = range[0] + ((px - panel.left) / (panel.right - panel.left)) * (range[1] - range[0]), i = lowerBound(stops, wanted);
    return i > 0 && (i === stops.length || wanted - stops[i - 1] <= stops[i] - wanted) ? stops[i - 1] : stops[i];
  }

  function moveTo(x) { if (x !== at) { at = x ?? null; later(); } }

  function tell() { // values at the cursor, or the last ones
    const noisy = panels.some((panel) => panel.curves.some((curve) => curve.y.length > MANY_POINTS));
    readout.textContent = at !== null ? words(at) : noisy ? "Strong lines are running means of the faint ones." : "";
    for (const panel of panels) {
      panel.curves.forEach((curve, i) => {
        const place = at === null ? curve.y.length - 1 : nearest(curve);
        panel.values[i].textContent = plain(curve.y[place]);
      });
      panel.canvas.setAttribute("aria-label", `${panel.name}: ${panel.curves.map((curve, i) => `${curve.name} ${panel.values[i].textContent}`).join(", ")}`);
    }
  }

  function step(by) {
    const i = at === null ? (by > 0 ? -1 : stops.length) : lowerBound(stops, at);
    moveTo(stops[Math.min(Math.max(i + by, 0), stops.length - 1)]);
  }
  const keys = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), PageUp: () => step(-10), PageDown: () => step(10),
    Home: () => moveTo(stops[0]), End: () => moveTo(stops.at(-1)), Escape: () => moveTo(null) };
  grid.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !stops.length) return;
    event.preventDefault();
    keys[event.key]();
  });
  grid.addEventListener("blur", () => moveTo(null));
  new ResizeObserver(redraw).observe(grid);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
  dress();
  return { take };
})();
