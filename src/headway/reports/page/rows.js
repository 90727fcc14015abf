// What is shown: the run's data unpacked into rows, their layout, colours, and numbers as words.
// Times are whole microseconds since the run's first event.
//
//   rows.js: data ─▶ rows ─▶ layout        drawing.js: what is in view ─▶ canvas        hands.js: wheel, pointer, keys
const given = JSON.parse(byId("data").textContent);
const chart = byId("chart"), canvas = byId("canvas"), axis = byId("axis"), names = byId("names");
const LANE = 24, THIN = 15, HEAD = 24, COUNTER = 46, AXIS = 44;
const reduced = 1.5; // pixels under which a span is drawn as part of a column

// ------------------------------------------------------------------------------------------------ data

function unpack(lane) {
  const count = lane.spans.length / 4, start = new Float64Array(count), end = new Float64Array(count);
  const kind = new Uint8Array(count), label = new Uint32Array(count);
  for (let i = 0, at = 0; i < count; i++) {
    start[i] = at += lane.spans[4 * i];
    end[i] = at += lane.spans[4 * i + 1];
    kind[i] = lane.spans[4 * i + 2];
    label[i] = lane.spans[4 * i + 3];
  }
  return { ...lane, count, start, end, kind, label };
}

function buildRows() {
  const rows = [], groups = new Map();
  const add = (group, row) => groups.get(group)?.push(row) ?? groups.set(group, [row]);
  for (const lane of data.lanes)
    add(lane.group, { type: "lane", height: lane.annotates ? THIN : LANE, name: lane.name, lane: unpack(lane) });
  for (const marks of data.marks)
    if (marks.row) add("Run", { type: "marks", height: 20, name: marks.name, marks });
  for (const counter of data.counters) add("Over time", { type: "counter", height: COUNTER, name: counter.name, counter });
  const order = ["Trainer", "Replicas", "Over time", "Run", "Parameter update", "Stages"];
  const place = (group) => (order.indexOf(group) + order.length + 1) % (order.length + 1);
  for (const group of [...groups.keys()].sort((a, b) => place(a) - place(b))) {
    rows.push({ type: "group", height: HEAD, name: group, group });
    for (const row of groups.get(group)) rows.push({ ...row, group });
  }
  return rows;
}

const closed = new Set(), view = { from: 0, to: 0 }, chosen = { row: -1, span: -1 };
let data, KINDS, END = 0, IDLE, rows = [], updates;

function take(timeline) { // another timeline of the same run, longer than the last one
  const whole = view.from === 0 && view.to === END, name = rows[chosen.row]?.name;
  data = timeline;
  KINDS = data.kinds;
  END = data.end || 1e6;
  IDLE = KINDS.map((kind) => kind.idle);
  rows = buildRows();
  updates = data.marks.find((marks) => marks.kind === "update")?.points ?? [];
  chosen.row = rows.findIndex((row) => row.type === "lane" && row.name === name);
  if (whole || view.to > END) { view.from = 0; view.to = END; }
}
take(given.timeline.data);
let visible = [], height = 0, width = 0, tall = 0, colours = {}, patterns = {}, marked = null, queued = false;

// ------------------------------------------------------------------------------------------------ words

function instant(us, step) {
  const s = us / 1e6, digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step / 1e6) - 1e-9)));
  if (END < 120e6 || step < 1e6 && s < 60) return `${s.toFixed(digits)} s`;
  const two = (n) => String(n).padStart(2, "0"), whole = Math.floor(s + 1e-9), part = (s - whole).toFixed(digits).slice(1);
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${digits ? part : ""}`;
}
const labelOf = (lane, i) => data.strings[lane.label[i]];
const x = (t) => ((t - view.from) / (view.to - view.from)) * width;
const t = (px) => view.from + (px / width) * (view.to - view.from);

// ------------------------------------------------------------------------------------------------ layout

function layout() {
  visible = [];
  height = 0;
  rows.forEach((row, index) => {
    if (row.type !== "group" && closed.has(row.group)) return;
    visible.push({ row, index, top: height });
    height += row.height;
  });
  byId("times").hidden = !rows.length;
  names.replaceChildren(...visible.map(nameOf));
  byId("rows").style.height = names.style.height = `${height}px`;
  measure();
}

function nameOf({ row, index }) {
  const isGroup = row.type === "group", element = document.createElement(isGroup ? "button" : "div");
  element.className = `name ${isGroup ? "group" : ""} ${row.height === THIN ? "thin" : ""} ${index === chosen.row ? "chosen" : ""}`;
  element.style.height = `${row.height}px`;
  const text = document.createElement("span");
  text.textContent = element.title = row.name;
  element.append(text);
  if (isGroup) {
    element.type = "button";
    element.setAttribute("aria-expanded", String(!closed.has(row.name)));
    element.addEventListener("click", () => {
      closed.has(row.name) ? closed.delete(row.name) : closed.add(row.name);
      layout();
      [...names.querySelectorAll("button")].find((b) => b.textContent === row.name)?.focus();
    });
  } else if (row.lane?.busy != null) {
    const busy = document.createElement("span");
    busy.className = "busy";
    busy.textContent = share(row.lane.busy);
    busy.title = "busy, of its time in the run";
    element.append(busy);
  }
  return element;
}

function measure() {
  width = Math.max(byId("rows").clientWidth, 50);
  tall = Math.min(height, Math.max(chart.clientHeight - AXIS, 60));
  for (const [target, h] of [[canvas, tall], [axis, AXIS]]) {
    const scale = window.devicePixelRatio || 1;
    target.style.height = `${h}px`;
    target.width = Math.round(width * scale);
    target.height = Math.round(h * scale);
    target.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  }
  redraw();
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const used = ["page", "panel", "line", "faint", "text", "soft", "accent", "idle-hatch", "halted-hatch", "serve-other",
    "counter", "on-bar", ...data.marks.map((m) => m.kind), ...KINDS.map((k) => k.name)];
  colours = Object.fromEntries(used.map((name) => [name, read(name)]));
  patterns = { idle: hatch("idle"), halted: hatch("halted") };
  KINDS.forEach((kind, i) => { kind.fill = colours[kind.name]; kind.flat = colours[`${kind.name}-hatch`] ?? kind.fill; kind.index = i; });
}

function hatch(name) {
  const tile = document.createElement("canvas"), scale = window.devicePixelRatio || 1;
  tile.width = tile.height = Math.round(7 * scale);
  const pen = tile.getContext("2d");
  pen.scale(tile.width / 7, tile.width / 7);
  pen.fillStyle = colours[name];
  pen.fillRect(0, 0, 7, 7);
  pen.strokeStyle = colours[`${name}-hatch`];
  pen.lineWidth = name === "halted" ? 1.8 : 1.1;
  pen.beginPath();
  for (const shift of [-7, 0, 7]) { pen.moveTo(shift - 1, 8); pen.lineTo(shift + 8, -1); }
  pen.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
