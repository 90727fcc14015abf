// One sample: its prompt, its episodes with rewards and times, and an episode's tokens in colour.
const tokens = (() => {
  const box = byId("sample"), MOST_TOKENS = 4096;
  const sampled = (row, i) => !(row.versions?.[i] < 0); // other tokens have places, and no numbers
  const numbers = (row, name) => (name === "version" || name === "mask" ? every(row, name)
    : every(row, name)?.map((value, i) => (sampled(row, i) && row.mask?.[i] !== 0 ? value : null)));
  const every = (row, name) => (name === "gap" ? row.logprobs?.map((value, i) => minus(value, row.behaviour?.[i]))
    : name === "gap to the reference" ? row.logprobs?.map((value, i) => minus(value, row.columns?.ref_logprobs?.[i]))
    : name === "log-prob" ? row.logprobs : name === "entropy" ? row.entropy : name === "version" ? row.versions
    : name === "mask" ? row.mask : row.columns?.[name === "advantage" ? "advantages" : name]);
  const minus = (a, b) => (a == null || b == null ? null : a - b);
  const SIGNED = new Set(["gap", "gap to the reference", "advantage", "values", "returns"]);
  const HINTS = { version: "which version sampled the token", "log-prob": "the trainer's, in nats; the darker, the less likely",
    gap: "trainer's log-prob minus the engine's, in nats", advantage: "the token's weight in the loss", mask: "tokens that are trained on",
    entropy: "the trainer's, in nats", "gap to the reference": "trainer's log-prob minus the reference policy's" };
  let sample = null, episode = null, at = null, colour = "version";

  function clear(text) { sample = null; box.replaceChildren(make("p", "said", text)); }

  function showLine(row) { // a group of which nothing was kept
    sample = null;
    box.replaceChildren(title(row), facts([["fate", row.fate.replace("_", " ")], ["reason", row.reason], ["reward, mean", row.reward], ["length, mean", row.length],
      ["lag", row.lag], ["source", row.source]]), make("p", "said", "The text of this one was not kept: a few groups of each version are drawn (reports.samples)."));
  }

  function show(found) {
    sample = found;
    episode = found.episodes[0] ?? null;
    draw();
  }

  const title = (of) => make("h3", "", "validation" in of && of.validation !== undefined ? `Validation of version ${of.validation}, problem ${of.problem}`
    : of.fate === "validation" ? `Validation of version ${of.version}, ${of.name}` : `Group ${of.group}, version ${of.version}`);

  function facts(pairs) {
    const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
    return make("p", "account", ...shown.map(([name, value]) => make("span", "", make("span", "said", name), make("b", "", typeof value === "number" ? plain(value, 4) : String(value)))));
  }

  function draw() {
    const of = sample, times = of.times ?? {}, starts = of.episodes.map((one) => one.started).filter((time) => time != null);
    const began = starts.length ? Math.min(...starts) : null;
    const took = (from, to) => (from == null || to == null ? null : duration((to - from) * 1e6));
    box.replaceChildren(...[
      title(of),
      facts([["fate", of.fate?.replace("_", " ")], ["reason", of.reason], ["lag", of.lag], ["source", of.source], ["answer", of.answer], ["baseline", of.baseline],
        ["waited for an engine", took(times.admitted, began)], ["generated in", took(began, times.generated)], ["scored in", took(times.generated, times.rewarded)], ["waited and trained", took(times.rewarded, times.settled)]]),
      make("h4", "", "Prompt"), ...(of.messages ? turns(of.messages) : [text(of.prompt)]),
      make("h4", "", "Episodes"), episodes(), ...(of.left_out ? [make("p", "said", `Tokens of ${of.left_out} episodes are left out of this page for its size; headway show has them.`)] : []),
      ...(episode ? told(episode) : [])].filter(Boolean));
  }

  function episodes() {
    const buttons = sample.episodes.map((one) => {
      const button = make("button", "", `${one.k}: ${one.reward == null ? "no reward" : `reward ${plain(one.reward)}`}`);
      button.type = "button";
      button.setAttribute("aria-pressed", String(one === episode));
      button.addEventListener("click", () => { episode = one; draw(); box.querySelectorAll(".episodes button")[sample.episodes.indexOf(one)].focus(); });
      return button;
    });
    const row = make("div", "buttons episodes", ...buttons);
    row.style.flexWrap = "wrap";
    return row;
  }

  function* told(one) {
    const parts = Object.entries(one.parts ?? {}).map(([name, value]) => [`reward: ${name}`, value ?? "does not apply"]);
    yield facts([["length", one.length], ["turns", one.turns], ["finish", one.finish], ["limit", one.limit], ["failure", one.failure], ["replica", one.replica], ...parts,
      ["rewards of turns", one.turn_rewards?.length ? one.turn_rewards.map((value) => plain(value)).join(", ") : null],
      ["took", one.started == null || one.finished == null ? null : duration((one.finished - one.started) * 1e6)],
      ["waited", one.waited_s ? duration(one.waited_s * 1e6) : null], ["worked", one.worked_s ? duration(one.worked_s * 1e6) : null]]);
    if (one.rows?.length) {
      yield make("h4", "", sample.fate === "trained" ? "Tokens that were trained on" : "Tokens as the trainer saw them; nothing was trained on them");
      yield palette(one);
      for (const [i, row] of one.rows.entries()) {
        if (one.rows.length > 1) yield make("h4", "", `Row ${i + 1} of ${one.rows.length}`);
        const context = make("details", "", make("summary", "", `What the model read: ${row.prompt_length} tokens`), text(row.context ?? sample.prompt));
        yield context;
        yield tokenBox(row);
      }
      return;
    }
    yield make("h4", "", "Answer");
    if (one.conversation) yield* turns([...(one.conversation.completion ?? [])]);
    else yield text(one.text);
  }

  const text = (words) => { const pre = make("pre", "text", words || "(empty)"); pre.tabIndex = 0; return pre; };
  function turns(messages) {
    return messages.map((message) => {
      const content = typeof message.content === "string" ? message.content : message.content == null ? "" : JSON.stringify(message.content, null, 1);
      const calls = message.tool_calls ? `\n${JSON.stringify(message.tool_calls, null, 1)}` : "";
      return make("div", "turn", make("span", "said", message.role ?? "?"), text(content + calls));
    });
  }

  // ---------------------------------------------------------------------------------------------- colours

  function palette(one) {
    const columns = Object.keys(one.rows[0].columns ?? {});
    const names = ["version", "log-prob", "gap", "advantage", "mask", "entropy", ...(columns.includes("ref_logprobs") ? ["gap to the reference"] : []),
      ...columns.filter((name) => !["advantages", "ref_logprobs", "prox_logprobs"].includes(name))];
    if (!names.includes(colour)) colour = "version";
    const buttons = names.map((name) => {
      const button = make("button", "", name);
      button.type = "button";
      button.title = HINTS[name] ?? "";
      button.setAttribute("aria-pressed", String(name === colour));
      button.addEventListener("click", () => { colour = name; draw(); [...box.querySelectorAll(".colours button")].find((b) => b.textContent === name)?.focus(); });
      return button;
    });
    const row = make("div", "buttons colours", ...buttons);
    row.style.flexWrap = "wrap";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", "Colour of tokens");
    return row;
  }

  function scaleOf() { // value → background, and the legend that says so
    // One scale for all rows of the sample, so that its episodes can be compared.
    const rows = sample.episodes.flatMap((one) => one.rows ?? []), known = rows.flatMap((each) => numbers(each, colour) ?? []).filter((value) => value != null);
    if (!known.length) return { paint: () => "", legend: make("p", "scale", "nothing is known of it") };
    const high = known.reduce((a, b) => Math.max(a, b)), low = known.reduce((a, b) => Math.min(a, b));
    if (colour === "version") return versions(known);
    if (colour === "mask") return { paint: (value) => (value ? "rgb(var(--plain) / 0.3)" : ""), legend: make("p", "scale", swatch("rgb(var(--plain) / 0.3)"), "trained on", HINTS.mask) };
    const fixed = given.scales[colour === "gap to the reference" ? "gap" : colour];
    if (fixed) return stepped(fixed);
    if (SIGNED.has(colour)) {
      const most = Math.max(Math.abs(high), Math.abs(low), 1e-9);
      return { paint: (value) => (value == null ? "" : `rgb(var(--${value < 0 ? "low" : "high"}) / ${strength(Math.abs(value) / most)})`),
        legend: scale(`linear-gradient(90deg, rgb(var(--low) / 0.6), transparent, rgb(var(--high) / 0.6))`, plain(-most), plain(most)) };
    }
    const most = Math.max(high, 1e-9);
    return { paint: (value) => (value == null ? "" : `rgb(var(--plain) / ${strength(Math.max(value, 0) / most)})`),
      legend: scale("linear-gradient(90deg, transparent, rgb(var(--plain) / 0.6))", "0", plain(most)) };
  }
  const strength = (part) => (0.6 * Math.sqrt(Math.min(part, 1))).toFixed(3);
  const swatch = (background) => { const i = make("i", "swatch"); i.style.background = background; return i; };
  function scale(gradient, low, high) {
    const i = make("i");
    i.style.background = gradient;
    return make("p", "scale", low, i, high, make("span", "", HINTS[colour] ?? ""));
  }
  function stepped({ bounds, labels, strengths }) { // a step is from one bound up to, and without, the next
    const ink = (part) => (part ? `rgb(var(--${!SIGNED.has(colour) ? "plain" : part < 0 ? "low" : "high"}) / ${(0.6 * Math.abs(part)).toFixed(3)})` : "");
    const step = (value) => { const above = bounds.findIndex((bound) => value < bound); return strengths[above < 0 ? bounds.length : above]; };
    return { paint: (value) => (value == null ? "" : ink(step(value))),
      legend: make("p", "scale", ...strengths.flatMap((part, i) => [swatch(ink(part)), labels[i]]), make("span", "", HINTS[colour] ?? "")) };
  }
  function versions(known) {
    const all = [...new Set(known)].filter((version) => version >= 0).sort((a, b) => a - b);
    const paint = (value) => (value == null || value < 0 ? "" : `color-mix(in srgb, var(--c${all.indexOf(value) % 8}) 32%, transparent)`);
    return { paint, legend: make("p", "scale", ...all.flatMap((version) => [swatch(paint(version)), `v${version}`]), make("span", "", HINTS.version)) };
  }

  // ---------------------------------------------------------------------------------------------- tokens

  function tokenBox(row) {
    const { paint, legend } = scaleOf(), values = numbers(row, colour) ?? [], body = make("div", "text tokens");
    const pieces = row.pieces.slice(0, MOST_TOKENS), middle = row.cut ? Math.ceil(pieces.length / 2) : -1;
    const spans = pieces.map((piece, i) => {
      const span = make("span", row.mask?.[i] === 0 ? "off" : "", piece.replaceAll("\n", "⏎\n"));
      span.dataset.i = i;
      span.style.background = paint(values[i]);
      return span;
    });
    if (row.cut) spans.splice(middle, 0, make("em", "said", ` … ${row.cut} tokens are not kept … `));
    body.append(...spans);
    body.tabIndex = 0;
    body.setAttribute("role", "application");
    body.setAttribute("aria-label", "Tokens. Left and right tell of one after the other.");
    const of = (target) => target.closest?.("span[data-i]");
    body.addEventListener("pointermove", (event) => { const span = of(event.target); showTip(span && describe(row, Number(span.dataset.i)), event.clientX, event.clientY); });
    body.addEventListener("pointerleave", () => { tip.hidden = true; });
    body.addEventListener("click", (event) => { const span = of(event.target); if (span) mark(body, row, Number(span.dataset.i)); });
    body.addEventListener("blur", () => { tip.hidden = true; at?.classList.remove("at"); at = null; });
    body.addEventListener("keydown", (event) => {
      const now = at && body.contains(at) ? Number(at.dataset.i) : -1;
      const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: pieces.length - 1 }[event.key];
      if (event.key === "Escape") { tip.hidden = true; at?.classList.remove("at"); at = null; }
      if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      mark(body, row, Math.min(Math.max(next, 0), pieces.length - 1));
    });
    return make("div", "", legend, body);
  }

  function mark(body, row, i) {
    at?.classList.remove("at");
    at = body.querySelector(`span[data-i="${i}"]`);
    if (!at) return;
    at.classList.add("at");
    at.scrollIntoView({ block: "nearest" });
    const place = at.getBoundingClientRect(), lines = describe(row, i);
    byId("said").textContent = lines.join(", ");
    showTip(lines, place.left, place.bottom - 14);
  }

  function describe(row, i) {
    const of = (values) => (sampled(row, i) ? values?.[i] : null), gap = minus(of(row.logprobs), of(row.behaviour));
    const lines = [JSON.stringify(row.pieces[i]), `token ${i + 1} of ${row.pieces.length}${row.mask?.[i] === 0 ? ", not trained on" : ""}`];
    if (of(row.versions) >= 0) lines.push(`sampled by version ${of(row.versions)}`);
    if (of(row.logprobs) != null) lines.push(`log-prob ${plain(of(row.logprobs), 4)}: probability ${plain(Math.exp(of(row.logprobs)))}`);
    if (gap !== null) lines.push(`engine's ${plain(of(row.behaviour), 4)}, gap ${plain(gap)}`);
    if (of(row.entropy) != null) lines.push(`entropy ${plain(of(row.entropy))}`);
    for (const [name, values] of Object.entries(row.columns ?? {})) if (values?.[i] != null) lines.push(`${name.replace("_", " ")} ${plain(values[i], 4)}`);
    return lines;
  }

  clear("Choose a group to see what was said.");
  return { show, showLine, clear };
})();
