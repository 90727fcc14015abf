// Gives each part its data: at once where the page holds it, and on a live page as it comes.
const samples = new Map();
let live = null, asked = 0;

groups.onOpen((row, hasText) => {
  const mine = ++asked;
  if (!hasText) { tokens.showLine(row); return; }
  if (!live) { tokens.show(samples.get(row.key)); return; }
  fetch(`sample?${row.key}`).then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(`the server said ${answer.status}`))))
    .then((sample) => { if (mine === asked) tokens.show(sample); }, (error) => { if (mine === asked) tokens.clear(`This sample could not be read: ${error.message}`); });
});

function holdSamples(list) {
  for (const sample of list)
    samples.set(sample.validation !== undefined ? `validation=${sample.validation}&problem=${sample.problem}` : `group=${sample.group}`, sample);
  groups.addSamples(samples.keys());
}

showStatus(given.status);
showFigures(given.figures, given.sentence);
showNotes(given.timeline);
if (given.curves) curves.take(given.curves);
if (given.groups) {
  groups.addGroups(given.groups);
  groups.takeLedger(given.ledger);
  groups.addValidations(given.validations);
  holdSamples(given.samples);
  groups.refresh();
}

// ------------------------------------------------------------------------------------------------ live

function startLive() {
  live = { epoch: -1, timeline: 0, wanted: 0, fetching: false };
  const stream = new EventSource("stream");
  stream.addEventListener("message", (event) => receive(JSON.parse(event.data)));
  let full = false; // more pages are open than the server feeds: it hangs up, and the browser asks again
  stream.addEventListener("full", (event) => { full = true; showStatus({ status: "waiting", reason: `${event.data} pages of this run are open, and no more are fed; close one of them` }); });
  stream.addEventListener("error", () => { if (full) full = false; else showStatus({ status: "not connected", reason: "headway watch does not answer: it was stopped, or its machine cannot be reached" }); });
  document.addEventListener("visibilitychange", fetchTimeline);
}

function receive(message) {
  if (message.epoch !== live.epoch) { // the run began again from a checkpoint: nothing that was shown counts
    live.epoch = message.epoch;
    groups.choose(null);
    tokens.clear("Choose a group to see what was said.");
  }
  showStatus(message.status);
  showFigures(message.figures, message.sentence);
  curves.take(message.curves);
  groups.takeLedger(message.ledger);
  groups.forget();
  groups.addGroups(message.groups);
  groups.addValidations(message.validations);
  groups.addSamples(message.sampled);
  groups.takeDamaged(message.damaged);
  groups.refresh();
  live.wanted = message.timeline;
  fetchTimeline();
}

function fetchTimeline() {
  if (live.fetching || document.hidden || live.wanted === live.timeline) return;
  live.fetching = true;
  const wanted = live.wanted;
  fetch("timeline").then((answer) => answer.json()).then((parts) => {
    live.timeline = wanted;
    showTimeline(parts);
  }, () => {}).finally(() => { live.fetching = false; });
}

function showTimeline(parts) {
  take(parts.data);
  dress();
  layout();
  showNotes(parts);
}

function showNotes({ reasons, remarks }) {
  byId("remarks").replaceChildren(...remarks.map((remark) => make("p", "", remark)));
  const line = (cell, row) => make("tr", "", ...row.map((text, i) => make(cell, i > 1 ? "number" : "", text)));
  if (reasons.length === 0) byId("reasons").replaceChildren(make("p", "", "Nothing was trained, so there is no wall time to share out."));
  else byId("reasons").replaceChildren(make("table", "", make("thead", "", line("th", ["who", "why it did nothing", "time", "share of the wall time"])),
    make("tbody", "", ...reasons.map((row) => line("td", row)))));
}

function showFigures(figures, sentence) {
  byId("figures").replaceChildren(...figures.map(([name, value, beside]) => make("div", "", make("dt", "", name), make("dd", "", value, beside ? " " : "", beside ? make("small", "", beside) : null))));
  byId("sentence").textContent = sentence;
}

function showStatus({ status, reason, words }) {
  byId("status").replaceChildren(make("span", `status ${status.replace(" ", "_")}`, words ?? status), ...(reason ? [make("p", "why", reason)] : []));
}

if (given.live) startLive();
