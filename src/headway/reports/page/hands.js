// What lies where, and moving about: wheel, pointer and keyboard.

function rowAt(y) {
  const down = y + Math.max(chart.scrollTop, 0);
  return visible.find(({ row, top }) => down >= top && down < top + row.height);
}

function describe(px, py) {
  const found = rowAt(py);
  if (!found) return null;
  const { row } = found;
  if (row.type === "lane") return describeColumn(row, px);
  if (row.type === "marks") return describeMarks(row.marks, px, row.name);
  if (row.type !== "counter") return null;
  const place = firstAfter(row.counter.times, t(px)) - 1;
  return place < 0 ? null : [`${row.counter.values[place].toLocaleString("en")} ${row.name}`, instant(t(px), (view.to - view.from) / width)];
}

function describeMarks(marks, px, name) {
  const near = marks.points.filter(([time]) => Math.abs(x(time) - px) < 5);
  if (!near.length) return null;
  const shown = near.slice(0, 6).map(([time, words]) => `${instant(time, (view.to - view.from) / width)}  ${data.strings[words]}`);
  return [name, ...shown, ...(near.length > 6 ? [`and ${near.length - 6} more`] : [])];
}

function describeColumn({ lane }, px) {
  const from = t(px - 0.5), to = t(px + 0.5), totals = new Map();
  let first = firstAfter(lane.end, from), count = 0;
  for (let i = first; i < lane.count && lane.start[i] < to; i++, count++) {
    const seconds = Math.min(lane.end[i], to) - Math.max(lane.start[i], from), words = labelOf(lane, i);
    totals.set(words, (totals.get(words) ?? 0) + seconds);
  }
  if (count === 0) return null;
  if (count <= 2) {
    const here = t(px);
    if (count === 2 && lane.end[first] < here) first++;
    return describeSpan(lane, first);
  }
  const shown = [...totals].sort((a, b) => b[1] - a[1]).slice(0, 5);
  return [`${count.toLocaleString("en")} spans here; zoom in to tell them apart`, lane.name,
    ...shown.map(([words, us]) => `${share(us / (to - from))}  ${words}`)];
}

function describeSpan(lane, i) {
  const kind = KINDS[lane.kind[i]], us = lane.end[i] - lane.start[i];
  const when = `${instant(lane.start[i], us / 10)} to ${instant(lane.end[i], us / 10)}`;
  return [labelOf(lane, i), `${kind.words} · ${lane.name}`, `${duration(us)} · ${when}`];
}

// ------------------------------------------------------------------------------------------------ moving about

function show(from, to) {
  const least = Math.min(Math.max(data.resolution, 0.02) * width, END);
  let span = Math.min(Math.max(to - from, least), END), start = (from + to) / 2 - span / 2;
  start = Math.min(Math.max(start, 0), END - span);
  view.from = start;
  view.to = start + span;
  redraw();
}
function zoom(factor, px = width / 2) {
  const at = t(px);
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const pan = (pixels) => { const shift = (pixels / width) * (view.to - view.from); show(view.from + shift, view.to + shift); };
function around(from, to) { const room = Math.max((to - from) * 0.6, 1); show(from - room, to + room); }

const actions = {
  in: () => zoom(0.6), out: () => zoom(1 / 0.6), fit: () => show(0, END),
  left: () => pan(-width * 0.15), right: () => pan(width * 0.15),
};

function showNames() {
  [...names.children].forEach((element, i) => element.classList.toggle("chosen", visible[i].index === chosen.row));
}

function chooseRow(step) {
  const lanes = visible.filter(({ row }) => row.type === "lane"), at = lanes.findIndex(({ index }) => index === chosen.row);
  const next = lanes[Math.min(Math.max(at < 0 ? 0 : at + step, 0), lanes.length - 1)];
  if (!next) return;
  chosen.row = next.index;
  chosen.span = -1;
  const offset = chart.scrollTop;
  if (next.top < offset || next.top + LANE > offset + tall) chart.scrollTop = next.top - tall / 2;
  showNames();
  byId("said").textContent = `${next.row.name}, ${next.row.group}, ${next.row.lane.count} spans`;
  redraw();
}

function chooseSpan(step) {
  if (chosen.row < 0) chooseRow(0);
  const lane = rows[chosen.row]?.lane;
  if (!lane?.count) return;
  const start = chosen.span < 0 ? firstAfter(lane.end, view.from) : chosen.span + step;
  chosen.span = Math.min(Math.max(start, 0), lane.count - 1);
  const from = lane.start[chosen.span], to = lane.end[chosen.span];
  if (to < view.from || from > view.to) { const half = (view.to - view.from) / 2; show((from + to) / 2 - half, (from + to) / 2 + half); }
  const lines = describeSpan(lane, chosen.span), box = canvas.getBoundingClientRect();
  const top = visible.find(({ index }) => index === chosen.row).top - chart.scrollTop;
  byId("said").textContent = lines.join(", ");
  showTip(lines, box.left + Math.max(x(from), 0), box.top + top + LANE / 2);
  redraw();
}

function goToUpdate(step) {
  const middle = (view.from + view.to) / 2, slack = (view.to - view.from) * 1e-6;
  const next = step > 0 ? updates.find(([time]) => time > middle + slack) : updates.findLast(([time]) => time < middle - slack);
  if (!next) return;
  const half = (view.to - view.from) / 2 >= END / 2 ? END / 8 : (view.to - view.from) / 2;
  show(next[0] - half, next[0] + half);
  byId("said").textContent = `update to ${data.strings[next[1]]} at ${instant(next[0], 1e4)}`;
}

const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, "_": actions.out, "0": actions.fit, Home: actions.fit,
  ArrowLeft: actions.left, ArrowRight: actions.right, ArrowUp: () => chooseRow(-1), ArrowDown: () => chooseRow(1),
  ",": () => chooseSpan(-1), ".": () => chooseSpan(1), n: () => goToUpdate(1), p: () => goToUpdate(-1),
  Escape: () => { chosen.span = -1; tip.hidden = true; redraw(); },
  Enter: () => { const lane = rows[chosen.row]?.lane; if (lane && chosen.span >= 0) around(lane.start[chosen.span], lane.end[chosen.span]); },
};

// ------------------------------------------------------------------------------------------------ hands

const place = (event) => { const box = canvas.getBoundingClientRect(); return { px: event.clientX - box.left, py: event.clientY - box.top }; };
let drag = null;

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const size = event.deltaMode === 1 ? 16 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) * size);
  else zoom(Math.exp(Math.min(Math.max(event.deltaY * size, -200), 200) * 0.0022), place(event).px);
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  canvas.setPointerCapture(event.pointerId);
  const { px } = place(event);
  drag = { px: event.clientX, py: event.clientY, marks: event.shiftKey };
  if (event.shiftKey) marked = { a: px, b: px };
  else canvas.classList.add("dragging");
});
canvas.addEventListener("pointermove", (event) => {
  const { px, py } = place(event);
  if (!drag) { showTip(describe(px, py), event.clientX, event.clientY); return; }
  tip.hidden = true;
  if (drag.marks) { drag.moved = true; marked.b = px; redraw(); return; }
  drag.moved ||= Math.abs(drag.px - event.clientX) + Math.abs(drag.py - event.clientY) > 2;
  if (!drag.moved) return;
  pan(drag.px - event.clientX);
  chart.scrollTop += drag.py - event.clientY;
  drag.px = event.clientX;
  drag.py = event.clientY;
});
function chooseAt(px, py) {
  const found = rowAt(py);
  if (found?.row.type !== "lane") return;
  const lane = found.row.lane, i = firstAfter(lane.end, t(px));
  chosen.row = found.index;
  chosen.span = i < lane.count && lane.start[i] <= t(px + 1) ? i : -1;
  showNames();
}
const release = (event) => {
  if (drag && !drag.moved && event.type === "pointerup") chooseAt(place(event).px, place(event).py);
  if (drag?.marks && marked && Math.abs(marked.a - marked.b) > 3) show(t(Math.min(marked.a, marked.b)), t(Math.max(marked.a, marked.b)));
  drag = marked = null;
  canvas.classList.remove("dragging");
  redraw();
};
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => { if (!drag) tip.hidden = true; });
canvas.addEventListener("dblclick", (event) => {
  const { px, py } = place(event), lane = rowAt(py)?.row.lane;
  const i = lane ? firstAfter(lane.end, t(px)) : -1;
  if (lane && i < lane.count && lane.start[i] <= t(px + 1)) around(lane.start[i], lane.end[i]);
});
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
canvas.addEventListener("blur", () => { tip.hidden = true; });
axis.addEventListener("pointermove", (event) => {
  const { px } = place(event), near = updates.find(([time]) => Math.abs(x(time) - px) < 8);
  showTip(near ? [`update: every replica serves ${data.strings[near[1]]}`, instant(near[0], 1e4)] : null, event.clientX, event.clientY);
});
axis.addEventListener("pointerleave", () => { tip.hidden = true; });
document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
chart.addEventListener("scroll", redraw);
new ResizeObserver(() => { measure(); draw(); }).observe(chart); // at once: a canvas of another size is empty

function buildLegend() {
  byId("legend").replaceChildren(...KINDS.map((kind) => {
    const item = document.createElement("li"), swatch = document.createElement("canvas"), scale = window.devicePixelRatio || 1;
    swatch.width = 22 * scale;
    swatch.height = 12 * scale;
    const pen = swatch.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = patterns[kind.name] ?? kind.fill;
    pen.fillRect(0, 0, 22, 12);
    item.append(swatch, kind.words);
    return item;
  }));
}
function dress() { readColours(); buildLegend(); redraw(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
dress();
layout();
