// Draws what is in view: at most one rectangle per span, and one stacked column per pixel where spans are narrower.

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; draw(); });
}

function draw() {
  const pen = canvas.getContext("2d"), offset = Math.max(chart.scrollTop, 0);
  pen.clearRect(0, 0, width, tall);
  drawAxis();
  for (const { row, index, top } of visible) {
    const y = top - offset;
    if (y + row.height < 0 || y > tall) continue;
    drawBackground(pen, row, index, y);
    if (row.type === "lane") drawLane(pen, row, index, y);
    else if (row.type === "marks") drawMarks(pen, row.marks, y, row.height);
    else if (row.type === "counter") drawCounter(pen, row.counter, y, row.height);
  }
  drawUpdates(pen);
  if (marked) {
    pen.globalAlpha = 0.18;
    pen.fillStyle = colours.accent;
    pen.fillRect(Math.min(marked.a, marked.b), 0, Math.abs(marked.a - marked.b), tall);
    pen.globalAlpha = 1;
  }
  const shown = view.to - view.from;
  byId("view").textContent = `${duration(shown)} of ${duration(END)}\nfrom ${instant(view.from, shown / 100)}`;
}

function drawBackground(pen, row, index, y) {
  pen.fillStyle = row.type === "group" ? colours.panel : index === chosen.row ? colours.faint : colours.page;
  pen.fillRect(0, y, width, row.height);
  pen.fillStyle = colours.faint;
  pen.fillRect(0, y + row.height - 1, width, 1);
}

function firstAfter(ends, time) {
  let low = 0, high = ends.length;
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] <= time) low = middle + 1; else high = middle; }
  return low;
}

function drawLane(pen, { lane, height: h, group }, index, y) {
  const inset = lane.annotates ? 2 : 3, top = y + inset, bar = h - 2 * inset;
  const column = { at: -1, time: new Float64Array(KINDS.length), used: 0 };
  const quiet = group === "Stages" ? 0.5 : 1; // stages wait most of the time: their idle time must not drown the rest
  const perPixel = (view.to - view.from) / width;
  for (let i = firstAfter(lane.end, view.from); i < lane.count && lane.start[i] < view.to; i++) {
    const left = x(lane.start[i]), right = x(lane.end[i]);
    if (right - left >= reduced) {
      flush(pen, column, top, bar, perPixel, quiet);
      drawBar(pen, lane, i, Math.max(left, -2), Math.min(right, width + 2), top, bar, quiet);
    } else {
      const at = Math.floor((left + right) / 2);
      if (at !== column.at) { flush(pen, column, top, bar, perPixel, quiet); column.at = at; }
      column.time[lane.kind[i]] += lane.end[i] - lane.start[i];
      column.used = 1;
    }
    if (index === chosen.row && i === chosen.span) {
      pen.strokeStyle = colours.text;
      pen.lineWidth = 2;
      pen.strokeRect(Math.max(left, -2), top - 1, Math.max(Math.min(right, width + 2) - Math.max(left, -2), 2), bar + 2);
    }
  }
  flush(pen, column, top, bar, perPixel, quiet);
}

function drawBar(pen, lane, i, left, right, top, bar, quiet) {
  const kind = KINDS[lane.kind[i]], wide = right - left, words = labelOf(lane, i);
  pen.globalAlpha = kind.idle ? quiet : 1;
  pen.fillStyle = wide > 5 && patterns[kind.name] ? patterns[kind.name] : kind.idle ? kind.flat : kind.fill;
  if (kind.name === "serve" && Number(words.match(/\d+/)?.[0] ?? 0) % 2) pen.fillStyle = colours["serve-other"];
  const gap = wide > 4 ? 0.5 : 0; // neighbours stay apart
  pen.fillRect(left, top, wide - gap, bar);
  pen.globalAlpha = 1;
  if (wide > 24) drawWords(pen, words, kind, left, wide, top, bar);
}

function drawWords(pen, words, kind, left, wide, top, bar) {
  const room = wide - 10, small = bar < 14;
  pen.font = `${small ? 9.5 : 11}px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  let text = words;
  if (pen.measureText(text).width > room) {
    const fits = Math.floor((text.length * room) / pen.measureText(text).width) - 1;
    if (fits < Math.min(0.6 * text.length, 14)) return;
    text = `${text.slice(0, fits).trimEnd()}…`;
  }
  pen.textBaseline = "middle";
  if (kind.idle) {
    pen.fillStyle = colours[kind.name];
    pen.fillRect(left + 3, top + 2, Math.min(pen.measureText(text).width + 6, wide - 4), bar - 4);
  }
  pen.fillStyle = kind.idle || kind.name === "serve" ? colours.text : colours["on-bar"];
  pen.fillText(text, left + 6, top + bar / 2 + 0.5);
}

function flush(pen, column, top, bar, perPixel, quiet) {
  if (!column.used) return;
  let bottom = top + bar;
  for (const idle of [false, true])
    for (let k = 0; k < KINDS.length; k++)
      if (column.time[k] > 0 && IDLE[k] === idle) {
        const part = Math.max(Math.min(column.time[k] / perPixel, 1) * bar, idle ? 0 : 1.5);
        pen.globalAlpha = idle ? quiet : 1;
        pen.fillStyle = KINDS[k].flat;
        pen.fillRect(column.at, Math.max(bottom - part, top), 1, Math.min(part, bottom - top));
        bottom = Math.max(bottom - part, top);
      }
  pen.globalAlpha = 1;
  column.time.fill(0);
  column.used = 0;
}

function drawMarks(pen, marks, y, h) {
  pen.fillStyle = colours[marks.kind];
  let last = -10;
  for (const [time] of marks.points) {
    const at = x(time);
    if (at < -3 || at > width + 3 || at - last < 0.7) continue;
    last = at;
    pen.fillRect(at - 0.75, y + 4, 1.5, h - 8);
  }
}

function drawCounter(pen, counter, y, h) {
  const base = y + h - 4, most = Math.max(counter.limit ?? 0, counter.most, 1e-9), scale = (h - 12) / most;
  pen.beginPath();
  let i = Math.max(firstAfter(counter.times, view.from) - 1, 0), at = Math.max(x(counter.times[i] ?? END), 0);
  pen.moveTo(at, base);
  for (; i < counter.times.length && counter.times[i] < view.to; i++) {
    const from = Math.max(x(counter.times[i]), 0), to = Math.min(x(counter.times[i + 1] ?? END), width);
    pen.lineTo(from, base - counter.values[i] * scale);
    pen.lineTo(to, base - counter.values[i] * scale);
    at = to;
  }
  pen.lineTo(at, base);
  pen.fillStyle = pen.strokeStyle = colours.counter;
  pen.globalAlpha = 0.22;
  pen.fill();
  pen.globalAlpha = 1;
  pen.lineWidth = 1;
  pen.stroke();
  pen.fillStyle = colours.soft;
  pen.font = '10px system-ui, "DejaVu Sans", sans-serif';
  pen.textBaseline = "middle";
  const top = base - most * scale;
  if (counter.limit) {
    pen.strokeStyle = colours.soft;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(0, top);
    pen.lineTo(width, top);
    pen.stroke();
    pen.setLineDash([]);
  }
  const words = counter.limit ? `${most.toLocaleString("en")} slots` : `most ${most.toLocaleString("en")}`;
  const room = pen.measureText(words).width + 8;
  pen.fillStyle = colours.page;
  pen.globalAlpha = 0.8;
  pen.fillRect(width - room, top + 2, room, 13);
  pen.globalAlpha = 1;
  pen.fillStyle = colours.soft;
  pen.fillText(words, width - room + 4, top + 9);
}

function drawUpdates(pen) {
  const inView = updates.filter(([time]) => time >= view.from && time <= view.to);
  pen.globalAlpha = inView.length > width / 6 ? 0.15 : 0.75;
  pen.strokeStyle = colours.update;
  pen.lineWidth = 1;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  for (const [time] of inView) {
    const at = Math.round(x(time)) + 0.5;
    pen.moveTo(at, 0);
    pen.lineTo(at, tall);
  }
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

function tickStep() {
  const rough = ((view.to - view.from) / width) * 110, power = 10 ** Math.floor(Math.log10(rough));
  const steps = rough < 1e6 ? [1, 2, 5, 10].map((n) => n * power)
    : [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].map((n) => n * 1e6);
  return steps.find((step) => step >= rough) ?? Math.ceil(rough / 86400e6) * 86400e6;
}

function drawAxis() {
  const pen = axis.getContext("2d"), step = tickStep();
  pen.clearRect(0, 0, width, AXIS);
  pen.font = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  pen.textBaseline = "alphabetic";
  pen.fillStyle = colours.soft;
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const at = x(time);
    pen.fillRect(Math.round(at), 34, 1, 10);
    const label = instant(time, step), room = pen.measureText(label).width + 4;
    pen.fillText(label, at + room > width ? at - room : at + 4, 37);
  }
  if (data.measured) {
    pen.fillStyle = colours.accent;
    pen.fillRect(x(data.measured[0]), AXIS - 3, x(data.measured[1]) - x(data.measured[0]), 2);
  }
  let free = -1;
  for (const [time, words] of updates) {
    const at = x(time), label = data.strings[words], room = pen.measureText(label).width + 8, left = Math.min(at, width - room);
    if (at < 0 || at > width) continue;
    pen.fillStyle = colours.update;
    if (left < free) { pen.fillRect(Math.round(at), 18, 1, 5); continue; }
    pen.fillRect(left, 5, room, 15);
    pen.fillRect(Math.round(at), 18, 1, 5);
    pen.fillStyle = colours["on-bar"];
    pen.fillText(label, left + 4, 16.5);
    free = left + room + 3;
  }
}
