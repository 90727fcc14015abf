// What the parts of the page share: elements, the tip, numbers and times as words.
//
//   rows, drawing, hands: the timeline      curves: small charts      groups: the list      tokens: one group's sample
//   story: gives each part its data, at once or, on a live page, as it comes
const byId = (id) => document.getElementById(id);
const tip = byId("tip");

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.filter((child) => child != null));
  return element;
}

function showTip(lines, px, py) {
  if (!lines) { tip.hidden = true; return; }
  tip.replaceChildren(...lines.map((line, i) => make(i ? "span" : "b", "", line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, px + 16 + box.width > innerWidth ? px - box.width - 12 : px + 16)}px`;
  tip.style.top = `${Math.max(4, py + 18 + box.height > innerHeight ? py - box.height - 12 : py + 18)}px`;
}

function duration(us) {
  const s = us / 1e6;
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${us.toPrecision(3).replace(/\.0+$/, "")} µs`;
  if (s < 1) return `${(s * 1e3).toPrecision(3)} ms`;
  if (s < 60) return `${s.toPrecision(3)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600).toLocaleString("en")} h ${Math.round((s % 3600) / 60)} min`;
}

const share = (part) => `${part > 0 && part < 0.01 ? "<1" : Math.round(100 * part)}%`;

function plain(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function many(value) {
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (value >= size) return `${Number((value / size).toPrecision(3))}${name}`;
  return String(Math.round(value));
}

function canvasPen(target) {
  const scale = window.devicePixelRatio || 1, width = target.clientWidth, height = target.clientHeight;
  const w = Math.round(width * scale), h = Math.round(height * scale);
  if (target.width !== w || target.height !== h) { target.width = w; target.height = h; }
  const pen = target.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function lowerBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle + 1; else high = middle; }
  return low;
}
