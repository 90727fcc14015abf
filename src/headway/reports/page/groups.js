// The ledger, and the list of groups: filtered, newest first, of which only the lines in view are elements.
const groups = (() => {
  const LINE = 28, FATES = ["trained", "filtered", "dropped", "failed", "in_flight", "validation"];
  const NAMED = { in_flight: "in flight" };
  const list = byId("list"), spacer = byId("spacer"), box = byId("groups");
  const all = new Map(), sampled = new Set(), sources = new Set(), filled = new WeakMap();
  const wanted = { fate: "", source: "", least: null, most: null, shortest: null, longest: null, sampled: false };
  let shown = [], chosen = null, damaged = 0, queued = false, stale = true, opens = () => {};

  const cells = ["group", "version", "fate", "source", "reward", "length", "lag"];
  byId("listhead").append(...cells.map((name, i) => make("span", i > 3 || i === 1 ? "n" : "", name)));

  // ---------------------------------------------------------------------------------------------- filters

  function choice(name, words, values) {
    const select = make("select", "", ...values.map(([value, label]) => { const option = make("option", "", label); option.value = value; return option; }));
    select.addEventListener("change", () => { wanted[name] = select.value; refresh(); });
    byId("filters").append(make("label", "", words, select));
    return select;
  }
  function bound(name, words) {
    const input = make("input");
    input.type = "number";
    input.step = "any";
    input.setAttribute("aria-label", words);
    input.addEventListener("input", () => { wanted[name] = input.value === "" ? null : Number(input.value); refresh(); });
    return input;
  }
  choice("fate", "fate", [["", "all"], ...FATES.map((fate) => [fate, NAMED[fate] ?? fate])]);
  const bySource = choice("source", "source", [["", "all"]]);
  byId("filters").append(
    make("label", "", "reward", bound("least", "least reward"), "to", bound("most", "most reward")),
    make("label", "", "length", bound("shortest", "least length"), "to", bound("longest", "most length")));
  const only = make("input");
  only.type = "checkbox";
  only.addEventListener("change", () => { wanted.sampled = only.checked; refresh(); });
  byId("filters").append(make("label", "", only, "with text"));

  const within = (value, low, high) => (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));
  const fits = (row) => (!wanted.fate || row.fate === wanted.fate) && (!wanted.source || row.source === wanted.source)
    && within(row.reward, wanted.least, wanted.most) && within(row.length, wanted.shortest, wanted.longest) && (!wanted.sampled || sampled.has(row.key));

  // ---------------------------------------------------------------------------------------------- rows

  function put(row) {
    all.set(row.key, row);
    if (row.source && !sources.has(row.source)) {
      sources.add(row.source);
      const option = make("option", "", row.source);
      option.value = row.source;
      bySource.append(option);
    }
  }
  function addGroups(lines) {
    for (const [group, version, source, fate, reason, reward, length, lag] of lines)
      put({ key: `group=${group}`, name: `#${group}`, order: version, group, version, source, fate, reason, reward, length, lag });
  }
  function addValidations(lines) {
    for (const [version, problem, source, reward, length] of lines)
      put({ key: `validation=${version}&problem=${problem}`, name: `problem ${problem}`, order: version, group: -problem - 1, version, source,
        fate: "validation", reason: null, reward, length, lag: null });
  }
  function addSamples(keys) { for (const key of keys) sampled.add(key); }
  function forget() { all.clear(); sampled.clear(); }

  function refresh() { stale = true; redraw(); }
  function redraw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; draw(); });
  }

  function sift() {
    stale = false;
    box.hidden = all.size === 0;
    const top = list.scrollTop > 0 ? shown[Math.floor(list.scrollTop / LINE)]?.key : null;
    shown = [...all.values()].filter(fits).sort((a, b) => b.order - a.order || b.group - a.group);
    spacer.style.height = `${Math.max(shown.length * LINE, LINE)}px`;
    if (top) { // what is being read stays where it is while lines come in above
      const place = shown.findIndex((row) => row.key === top);
      if (place >= 0) list.scrollTop = place * LINE + (list.scrollTop % LINE);
    }
    byId("counted").textContent = `${shown.length.toLocaleString("en")} of ${all.size.toLocaleString("en")} lines; ● have text${damaged ? `; damaged lines of samples.jsonl, which are left out: ${damaged.toLocaleString("en")}` : ""}`;
  }

  function draw() {
    if (stale) sift();
    const first = Math.max(Math.floor(list.scrollTop / LINE) - 4, 0), last = Math.min(first + Math.ceil(list.clientHeight / LINE) + 8, shown.length);
    while (spacer.children.length < last - first) spacer.append(emptyLine());
    const elements = [...spacer.children];
    for (const [i, element] of elements.entries()) { // a line keeps its element while it is in view
      const place = first + ((i - (first % elements.length) + elements.length) % elements.length), row = shown[place];
      element.hidden = place >= last;
      if (row) fill(element, row, place);
    }
    const place = shown.findIndex((row) => row.key === chosen);
    if (place >= first && place < last) list.setAttribute("aria-activedescendant", `line-${place}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function emptyLine() {
    const dot = make("i", "dot"), fate = make("span"), mark = make("span", "mark");
    const element = make("div", "line", make("span", "", make("span"), " ", mark), make("span", "n"), make("span", "fate", dot, fate),
      ...cells.slice(3).map((_, i) => make("span", i ? "n" : "")));
    element.setAttribute("role", "option");
    element.addEventListener("click", () => choose(element.dataset.key, true));
    return element;
  }
  function fill(element, row, place) {
    const state = [row, place, shown.length, row.key === chosen, sampled.has(row.key)], old = filled.get(element);
    if (old && state.every((value, i) => value === old[i])) return;
    filled.set(element, state);
    element.style.transform = `translateY(${place * LINE}px)`;
    element.id = `line-${place}`;
    element.className = `line ${row.fate}`;
    element.dataset.key = row.key;
    element.title = row.reason ?? "";
    element.setAttribute("aria-selected", String(row.key === chosen));
    element.setAttribute("aria-posinset", place + 1);
    element.setAttribute("aria-setsize", shown.length);
    const [name, version, fate, source, reward, length, lag] = element.children;
    name.firstChild.textContent = row.name;
    name.lastChild.textContent = sampled.has(row.key) ? "●" : "";
    version.textContent = `v${row.version}`;
    fate.lastChild.textContent = NAMED[row.fate] ?? row.fate;
    source.textContent = source.title = row.source;
    reward.textContent = row.reward === null ? "–" : plain(row.reward);
    length.textContent = row.length === null ? "–" : plain(row.length);
    lag.textContent = row.lag ?? "–";
  }

  // ---------------------------------------------------------------------------------------------- hands

  function choose(key, open) {
    chosen = key;
    if (open && all.has(key)) opens(all.get(key), sampled.has(key));
    redraw();
  }
  function move(by) {
    const place = shown.findIndex((row) => row.key === chosen), next = Math.min(Math.max(place < 0 ? 0 : place + by, 0), shown.length - 1);
    if (next < 0) return;
    const top = next * LINE;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + LINE > list.scrollTop + list.clientHeight) list.scrollTop = top + LINE - list.clientHeight;
    choose(shown[next].key, false);
  }
  const page = () => Math.floor(list.clientHeight / LINE);
  const keys = { ArrowUp: () => move(-1), ArrowDown: () => move(1), PageUp: () => move(-page()), PageDown: () => move(page()),
    Home: () => move(-shown.length), End: () => move(shown.length), Enter: () => choose(chosen, true), " ": () => choose(chosen, true) };
  list.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  list.addEventListener("scroll", redraw);
  new ResizeObserver(redraw).observe(list);

  // ---------------------------------------------------------------------------------------------- ledger

  function takeLedger({ groups: counts, episodes, reasons, failures, balanced, where }) {
    const fates = FATES.slice(0, 5), bar = make("div", "bar"), total = counts.admitted || 1;
    box.hidden = counts.admitted === 0 && all.size === 0;
    for (const fate of fates) {
      const part = make("i", fate);
      part.style.width = `${(100 * counts[fate]) / total}%`;
      if (counts[fate]) bar.append(part);
    }
    const line = (what, numbers) => make("p", "account", make("span", "", `${numbers.admitted.toLocaleString("en")} ${what} admitted =`),
      ...fates.filter((fate) => numbers[fate] || fate === "trained").map((fate) => make("span", fate, make("i", "dot"), `${numbers[fate].toLocaleString("en")} ${NAMED[fate] ?? fate}`)),
      what === "groups" ? make("span", balanced ? "good" : "bad", balanced ? "✓ each has one fate" : "✗ this does not add up") : null);
    const whys = Object.entries(reasons).flatMap(([fate, found]) => Object.entries(found).map(([why, count]) => [fate, why, count]));
    whys.push(...Object.entries(failures).map(([why, count]) => ["episode failed", why, count]));
    const now = counts.in_flight ? make("p", "hint", `in flight: ${where.generating} being generated or scored, ${where.queued} in the queue, ${where.training} being trained on`) : null;
    const open = byId("ledger").querySelector("details")?.open ?? false;
    byId("ledger").replaceChildren(bar, line("groups", counts), ...(episodes.admitted ? [line("episodes", episodes)] : []), ...(now ? [now] : []), ...(whys.length ? [table(whys, open)] : []));
  }
  function table(whys, open) {
    const body = whys.sort((a, b) => b[2] - a[2]).slice(0, 40).map(([fate, why, count]) => make("tr", "", make("td", "", fate), make("td", "", why), make("td", "number", count.toLocaleString("en"))));
    const details = make("details", "", make("summary", "", "Why groups were not trained"), make("table", "", make("tbody", "", ...body)));
    details.open = open;
    return details;
  }

  return { takeDamaged: (count) => { damaged = count; }, addGroups, addValidations, addSamples, takeLedger, choose, forget, refresh, onOpen: (then) => { opens = then; } };
})();
