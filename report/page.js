// The page of a run, or of one prompt: its data, its state, its sections. Stands after draw.js and
// maps.js, in one module.

const data = JSON.parse($("data").textContent);
const [L, H] = data.shape ?? sizeFromScores();
const groups = data.groups && H % data.groups === 0 ? data.groups : H;
const scored = Object.values(data.scores ?? {}).map(s => s.steps).sort((a, b) => b.length - a.length);
const steps = data.steps.length ? data.steps : scored[0] ?? [];
const state = {
  step: Math.max(0, steps.length - 1), layer: 0, head: 0, probe: 0, weighted: false, average: false,
  token: null, held: null, block: null, // what is lit, what stays lit, whose rows are open
  needs: false, target: 0, // whether needs are looked at; of which next token the card tells
};

function sizeFromScores() {
  const heads = Object.values(data.scores ?? {}).flatMap(s => s.values.flat());
  return heads.length ? [Math.max(...heads.map(h => h[0])) + 1, Math.max(...heads.map(h => h[1])) + 1] : [0, 0];
}

const seen = () => ({ layer: state.layer, head: state.average ? null : state.head, weighted: state.weighted });

// ---- training

const curve = (key, name, colour, bold) => ({ name, colour, bold, xs: data.curves[key].steps,
  ys: data.curves[key].values });

function drawTraining() {
  const draw = (id, how) => chart($(id) ?? $("charts").appendChild(el("div", { id })), how);
  const small = (id, title, key, more = {}) =>
    draw(id, { title, series: [curve(key, title.toLowerCase(), "accent")], ...more });
  draw("chart-loss", {
    title: "Loss, nats per token", height: 240,
    series: [curve("train/loss", "training", "soft"), curve("val/loss", "validation", "accent", true)],
  });
  if (data.curves["probe/repeat_gain"].steps.length) draw("chart-gain", { title: "Repeat gain, nats", zero: 0.1,
    series: [{ ...curve("probe/repeat_gain", "repeat gain", "accent", true),
      errors: data.curves["probe/repeat_gain"].errors }] });
  small("chart-lr", "Learning rate", "train/lr");
  small("chart-speed", "Tokens per second", "train/tokens_per_second", { zero: 1 });
  small("chart-bits", "Bits per byte", "val/bits_per_byte");
  small("chart-norm", "Gradient norm", "train/grad_norm");
}

function setUpTraining() {
  $("training").hidden = false;
  const losses = data.curves["val/loss"], best = losses.values.reduce((b, v, k) => v < losses.values[b] ? k : b, 0);
  const spent = Object.entries(data.seconds), total = spent.reduce((sum, [, s]) => sum + s, 0);
  const figures = [
    losses.values.length && [figure(losses.values[best]), `best validation loss, at step ${count(losses.steps[best])}`],
    data.step !== null && [count(data.step), data.maxSteps > data.step ? `steps of ${count(data.maxSteps)} so far`
      : "steps"],
    data.tokens && [compact(Number(data.tokens.toPrecision(3))), "tokens seen"], total && [duration(total), "in all"],
  ].filter(Boolean);
  $("figures").append(...figures.map(([value, name]) => el("div", {}, el("b", {}, value), el("span", {}, name))));
  if (!figures.length) $("figures").append(el("p", { className: "quiet" }, "Nothing has been measured yet."));
  const most = Math.max(...Object.values(data.curves).map(c => c.of));
  $("points").hidden = most <= data.points;
  $("points").textContent =
    `Curves are drawn through ${count(data.points)} of up to ${count(most)} measured points, evenly chosen.`;
  const setting = ([key, value]) => el("tr", {}, el("th", { scope: "row" }, bdi(key)),
    el("td", {}, bdi(asText(value))));
  $("config").hidden = !data.config.length;
  $("config").querySelector("tbody").append(...data.config.map(setting));
  $("time").hidden = !total;
  $("time").parentElement.hidden = !total && !data.samples.length;
  showTime(spent, total);
  if (data.samples.length) setUpSamples(data.samples);
}

function showTime(spent, total) {
  const names = { train: "training", evaluate: "evaluating", attention: "looking at attention", save: "saving" };
  spent.forEach(([kind, s], k) => {
    const colour = `var(--time-${k})`, share = `${(100 * s / total).toFixed(1)}%`;
    $("time-bar").append(el("span", { style: `flex: ${s / total} 0 0; background: ${colour}`,
      title: `${names[kind]} ${duration(s)}` }));
    $("time-list").append(el("li", { style: `--c: ${colour}` }, names[kind], el("b", {}, duration(s)),
      el("i", {}, share)));
  });
}

function setUpSamples(samples, longest = 4000) {
  const select = $("sample-step"), at = () => Number(select.value);
  const show = (k, whole) => {
    const text = asText(samples[k].text), cut = !whole && text.length > longest;
    select.value = k;
    $("sample").textContent = cut ? `${text.slice(0, longest)}…` : text;
    $("sample-all").hidden = !cut;
    $("sample-all").textContent = `show all ${count(text.length)} characters`;
    $("sample-before").disabled = k === 0;
    $("sample-after").disabled = k === samples.length - 1;
  };
  $("samples").hidden = false;
  $("samples-note").textContent = data.samplesLeftOut
    ? `${data.samplesLeftOut} more are in the run's samples.jsonl` : "";
  select.append(...samples.map((s, k) => el("option", { value: k }, `after step ${count(s.step)}`)));
  select.onchange = () => show(at());
  $("sample-before").onclick = () => show(at() - 1);
  $("sample-after").onclick = () => show(at() + 1);
  $("sample-all").onclick = () => show(at(), true);
  show(samples.length - 1);
}

// ---- attention

const probe = () => data.probes[state.probe];
const newest = () => state.step === steps.length - 1;
let drawGrid = null, tokens = [], drawMap = null, drawRows = null, drawNear = null, current = null, rows = null;
let explained = null; // what is known of the predictions, of the same probe and step
const shownView = () => state.needs && explained ? explained : current;

function choose(layer, head) {
  Object.assign(state, { layer, head });
  $("heads-grid").querySelectorAll("[role=radio]").forEach((button, k) => {
    button.tabIndex = k === layer * H + head ? 0 : -1;
  });
  draw();
}

const loadView = (p, s) => load(`${p}/${s}`, [data.probes[p].maps[s], data.shape, data.probes[p], data.probes[p].kind,
  data.probes[p].block]);
const loadRows = p => load(`${p}/rows`, [data.probes[p].rows.maps, data.shape,
  { ...data.probes[p], largest: data.probes[p].rows.largest }, data.probes[p].rows.kind, 1]);

function setUpText() {
  const host = $("text"), words = probe().tokens;
  $("reading").hidden = !words;
  Object.assign(state, { token: null, held: words ? Math.floor(words.length * 0.6) : null, block: null });
  tokens = (words ?? []).map((word, i) => {
    const pieces = visible(word).split(/([·⏎⇥␍⍽]+)/).filter(Boolean).flatMap(part =>
      /[·⏎⇥␍⍽]/.test(part) ? [...part].flatMap(c => c === "⏎" ? [el("i", {}, c), el("br")]
        : [el("wbr"), el("i", {}, c)]) : [part]);
    const span = el("bdi", { className: "token", role: "button", "aria-label": `token ${i}` }, ...pieces);
    span.onpointerenter = () => light(i);
    span.onfocus = () => light(i);
    span.onclick = () => hold(i);
    return span;
  });
  tokens.of = state.probe;
  host.replaceChildren(...tokens);
  if (data.prompted && tokens[data.prompted]) {
    tokens[data.prompted].before(el("span", { className: "border" }, "▏generated from here on▕"));
  }
  host.onpointerleave = () => light(null);
  roving(host, tokens, 1, () => {}, Math.max(0, tokens.length - 1));
  const walk = host.onkeydown;
  host.onkeydown = event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.target.click(); }
    else if (event.key === "Escape") { state.held = null; light(null); }
    else if (event.key !== "ArrowUp" && event.key !== "ArrowDown") walk(event);
  };
}

// Lights what token i attends to and what attends to it; null: what is held, or nothing.
function light(i) {
  state.token = i ?? state.held;
  if (!tokens.length || !current) return;
  const shown = shownView(), view = shown === current && newest() && rows ? rows : shown;
  const read = reader(view, seen()), most = largest(view, state.weighted);
  const at = state.token === null ? -1 : Math.floor(state.token / view.block), to = [], from = [];
  for (let k = 0; at >= 0 && k < view.n; k++) {
    if (k <= at) to.push([read(at, k), k]);
    if (k >= at) from.push([read(k, at), k]);
  }
  // Twenty shades: what is faint alike is drawn alike, and need not be drawn again.
  const shade = found => 4 * Math.round(20 * Math.sqrt(Math.max(0, Math.min(1, Math.abs(found) / most || 0))));
  const colour = (kind, value) => !view.signed ? kind : value < 0 ? "hindered" : kind === "to" ? "needed" : "from";
  tokens.forEach((span, k) => {
    const b = Math.floor(k / view.block), kind = at < 0 || b === at ? "" : b < at ? "to" : "from";
    const value = kind && (kind === "to" ? to[b][0] : from[b - at][0]), share = kind && shade(value);
    const wanted = kind ? `background: color-mix(in oklab, var(--${colour(kind, value)}) ${share}%, transparent)` : "";
    if (span.shown !== wanted) span.style.cssText = span.shown = wanted;
    if (span.lit !== (k === state.token)) span.classList.toggle("lit", span.lit = k === state.token);
  });
  const under = to.map(([value, k]) => [-value, k]);
  $("lists").replaceChildren(...at < 0 ? [] : view.signed ? [list(view, "needed, nats", "needed", at, to),
    list(view, "had in its way, nats", "hindered", at, under), list(view, "was needed by, nats", "from", at, from)]
    : [list(view, "attends to", "to", at, to), list(view, "is attended to by", "from", at, from)]);
  drawPrediction();
}

// Scroll the text, and it alone, so far that token i is seen.
function reveal(i) {
  if (!tokens[i]) return;
  const host = $("text"), inside = host.getBoundingClientRect(), at = tokens[i].getBoundingClientRect();
  if (at.top < inside.top) host.scrollTop -= inside.top - at.top + 20;
  else if (at.bottom > inside.bottom) host.scrollTop += at.bottom - inside.bottom + 20;
}

// What is expected after the lit token; and the card of the one that is held.
function drawPrediction() {
  const i = state.token, { tokens: known } = probe();
  $("expected").hidden = !explained || i === null || !known;
  $("card-part").hidden = !explained || state.held === null || !known;
  if (!$("expected").hidden) {
    const pick = k => { state.target = k; light(state.token); };
    const { rows: chances, says } = expected(explained, data.words, i, state.target, pick);
    const needed = Array.from({ length: i }, (_, j) => [explained.at(0, 0, i, j), j]).filter(([x]) => x >= 0.05)
      .sort((a, b) => b[0] - a[0]).slice(0, 3).flatMap(([x, j], k) => [k ? ", " : " ", bdi(short(known[j]), "token"), ` ${signed(x)}`]);
    const when = explained.step === steps[state.step] ? "" : ` (at step ${count(explained.step)})`;
    $("expected").replaceChildren(el("h4", {}, "After ", ...place(explained, i), " the model expects", when),
      el("div", { className: "chances" }, ...chances),
      el("p", {}, ...says, ...needed.length ? [" Hidden, these raise it:", ...needed, "."] : []));
  }
  if ($("card-part").hidden || i !== state.held) return;
  $("card-title").replaceChildren("The card of ", ...place(explained, i));
  const { layer, head, target } = state;
  drawCard($("card"), explained, i, { layer, head, target, tied: data.tied, words: data.words, choose });
}

function list(view, name, kind, at, found) {
  const best = found.filter(([w]) => w > 0).sort((a, b) => b[0] - a[0]).slice(0, 8), top = best[0]?.[0] ?? 1;
  const line = (w, k) => el("li", { style: `--w: ${(100 * w / top).toFixed(1)}%` }, el("span", {}, ...place(view, k)),
    el("b", {}, figure(w)));
  const lines = best.map(([w, k]) => line(w, k));
  return el("div", { className: kind }, el("h4", {}, ...place(view, at), ` ${name}`), el("ol", {}, ...lines),
    ...found.length > best.length ? [el("p", { className: "quiet" },
      `and ${count(found.length - best.length)} more`)] : []);
}

let turn = 0;
async function show() {
  const mine = ++turn, p = state.probe;
  showStep(state.step, steps[state.step] ?? 0);
  if (data.probes.length) {
    const view = await loadView(p, state.step);
    if (mine !== turn) return;
    const all = probe().explained ?? [], at = all.findLastIndex((one, k) => one && k <= state.step);
    const found = at < 0 ? null : await load(`${p}/${at}/explained`, [all[at], data.shape, probe()], explainedOf);
    if (found) found.step = steps[at]; // needs are not measured at every step
    if (mine !== turn) return;
    [current, rows, explained] = [view, null, found];
  }
  draw();
  if (data.probes.length && newest() && probe().rows) {
    await new Promise(done => setTimeout(done, 50)); // the page first
    const found = await loadRows(p);
    if (mine === turn) { rows = found; light(state.token); drawBlockRows(); }
  }
}

function draw() {
  if (current) drawAttention();
  if (data.scores) drawHeads();
  keepAddress();
}

function drawAttention() {
  const view = shownView(), by = state.weighted && view.norms, { period } = probe();
  drawGrid(current, seen());
  sayWhatIsSeen(view, by); // first: its title decides where the map begins
  drawMap(mapOf(view, seen(), {
    most: mostWide(),
    over: view.block === 1 ? (...where) => {
      if (period) drawStripes(period)(...where);
      else drawBorder(view.n, ...where);
    } : null,
    enter: (i, j) => { if (view.block === 1) { light(i); reveal(i); drawZoom(i, j); } }, leave: () => light(null),
    pick: i => view.block > 1 ? openRows(i) : hold(i),
  }));
  if (view.signed) signedBar($("bar"), "nats", view.largest);
  else colourBar($("bar"), by ? "weight × ‖v W_O‖" : "weight", largest(view, state.weighted));
  light(state.token);
  drawZoom(state.held ?? 0, state.held ?? 0);
  drawBlockRows();
}

// Of a map whose tokens have no room for their names the part around a cell, with names.
const ZOOM = 24; // cells along its side
function drawZoom(i, j) {
  const view = shownView(), room = Math.min($("map").clientWidth, mostWide());
  $("zoom").hidden = view.block > 1 || !view.tokens || view.n <= ZOOM || (room - 92) / view.n >= 8.5;
  if ($("zoom").hidden) return;
  const [from, left] = [i, j].map(k => Math.min(view.n - ZOOM, Math.max(0, k - ZOOM / 2)));
  const spec = mapOf(view, seen()), names = start => spec.rowNames.slice(start, start + ZOOM);
  $("zoom-title").textContent = `Tokens ${from} to ${from + ZOOM - 1} on tokens ${left} to ${left + ZOOM - 1}`;
  drawNear({
    ...spec, rows: ZOOM, cols: ZOOM, most: 620, least: 0, rowNames: names(from), colNames: names(left),
    start: [i - from, j - left], level: (a, b) => spec.level(from + a, left + b),
    tell: (a, b) => spec.tell(from + a, left + b), enter: a => { light(from + a); reveal(from + a); },
    leave: () => light(null), pick: a => hold(from + a),
  });
}

// Between the prompt and what the model made of it.
function drawBorder(n, context, { left, cell, high }) {
  if (!(data.prompted > 0 && data.prompted < n)) return;
  context.strokeStyle = resolved("var(--accent)");
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(left, data.prompted * high);
  context.lineTo(left + data.prompted * cell, data.prompted * high);
  context.lineTo(left + data.prompted * cell, n * high);
  context.stroke();
}

// So wide that the whole map is on the first screen, as far as its labels stay legible.
function mostWide() {
  const top = $("map").getBoundingClientRect().top + scrollY;
  return innerWidth < 1000 ? 900 : Math.min(900, Math.max(520, innerHeight - top - 14));
}

function sayWhatIsSeen(view, by) {
  const { layer, head, average } = state, { name, period, says } = probe(), step = steps[state.step];
  const kind = view.signed ? [["needed", "what it needed"], ["hindered", "what was in its way"], ["from", "what needed it"]]
    : [["to", "what it attends to"], ["from", "what attends to it"]];
  $("map-note").hidden = !view.signed;
  $("text-keys").replaceChildren(...kind.flatMap(([key, text]) => [el("span", { className: `key ${key}` }, text), " "]));
  const key = ([score, colour]) => el("span", { className: "key", style: `--c: var(--${colour})` }, score);
  const stripe = period && view.block === 1 ? [" The scores read the framed cells: ", ...stripes(period).map(key)] : [];
  if (view.signed) {
    const after = data.kind === "run" ? ` after ${count(view.step)} steps` : "";
    $("map-title").textContent = `What each prediction needed${after}`;
    $("seen").replaceChildren("Row: the token after which the next one is predicted; column: a token that is hidden from all "
      + "later ones, in every head. Red: hidden, it raises the next token's loss by so many nats; blue: it lowers the "
      + "loss. All of it is measured by running the model again.", ...stripe);
    $("precision").textContent = "";
    return;
  }
  $("map-title").textContent = (average ? `Layer ${layer}, the average of its ${H} heads,`
    : `Head ${headName(layer, head)}`)
    + (data.kind === "run" ? ` after ${count(step)} steps` : "");
  const on = data.kind === "prompt" ? "the prompt" : name === "text" ? "the beginning of the validation text"
    : `${period} random tokens, then the same ${period} again`;
  const cell = by ? `weight × ‖v W_O‖, the length of the vector that it adds${average ? ", averaged" : ""}`
    : "an attention weight; a row sums to 1";
  const scores = average ? [] : scoreNames.filter(score => data.scores[score].steps.includes(step))
    .map(score => [score, scoreAt(score, layer, head)]).filter(([, { value }]) => value !== null)
    .map(([score, { value, error }]) => `${plain(score)} ${known(value, error)}`);
  const looking = view.block > 1 ? "tokens that look" : "token that looks";
  $("seen").replaceChildren(`On ${on}. Row: the ${looking}; column: what is looked at. `
    + `A cell is ${cell}.${scores.length ? ` Its scores: ${scores.join(", ")}.` : ""}`, ...stripe);
  $("precision").textContent = (state.needs ? "What predictions needed is not in this page for this step. " : "")
    + `${says} ${data.thinned}`;
}

function hold(i) {
  state.held = state.held === i ? null : i;
  state.target = 0;
  light(i);
  keepAddress();
}

function openRows(block) {
  state.block = block;
  drawBlockRows();
  $("rows").scrollIntoView({ block: "nearest" });
}

// The rows of the tokens of the chosen block, where they are kept.
function drawBlockRows() {
  const b = state.block, { block, T } = probe();
  $("rows").hidden = b === null || block === 1 || shownView() !== current;
  if ($("rows").hidden) return;
  const from = b * block, size = Math.min(block, T - from), kept = probe().rows;
  $("rows-title").textContent = `The rows of tokens ${from} to ${from + size - 1}`
    + (!kept ? " are not kept in this page"
    : !newest() ? ` are kept for step ${count(steps.at(-1))} only` : rows ? "" : ": unpacking…");
  $("rows-map").hidden = !rows;
  if (!rows) return;
  const read = reader(rows, seen()), most = largest(rows, state.weighted);
  drawRows({
    rows: size, cols: T, high: 18, rowNames: probe().tokens?.slice(from, from + size).map(t => short(t)), least: 0,
    start: [0, 0],
    level: (i, j) => j > from + i ? -1 : level(read(from + i, j) / most),
    tell: (i, j) => reading(rows, seen(), from + i, j),
    enter: i => { light(from + i); reveal(from + i); }, leave: () => light(null), pick: i => hold(from + i),
  });
}

// ---- heads

const UNBOUNDED = ["distance", "importance"]; // the other scores are shares of 1
const SIGNED = ["copying"]; // from -1 to 1
const MEANING = {
  previous_token: "the weight on the token just before", sink: "the weight on the first token",
  duplicate_token: "at a token's second occurrence, the weight on its first",
  induction: "at a token's second occurrence, the weight on what followed the first",
  entropy: "0: all on one token; 1: even over itself and all before", distance: "how far back it looks, in tokens",
  copying: "how often it makes the token that it looks at likely, less how often unlikely",
  importance: "how much the validation loss rises without it, in nats",
};
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6"];
// What the loss of repeats gains without a head is told in the conclusion.
const scoreNames = Object.keys(data.scores ?? {}).filter(name => !name.endsWith("_cost"));
const kinds = [...new Set([...scoreNames.filter(name => !UNBOUNDED.includes(name)),
  ...(data.births ?? []).map(b => b.score)])];
const colourOf = name => COLOURS[kinds.indexOf(name) % COLOURS.length];
const scoreMaps = {};
let scoresDrawn = ""; // under what circumstances: another head changes none of it

// A score's row for the slider's step: that step's, or the last before it.
function scoreRow(name) {
  const { steps: at, values } = data.scores[name];
  const k = at.findLastIndex(step => step <= steps[state.step]);
  return k >= 0 ? values[k] : at.length === 1 ? values[0] : null;
}
// A head's score as such a row has it: its value, standard error, value without the first token.
const asScore = ([, , value = null, error = null, without = null] = []) =>
  ({ value, error, without });
const ofHead = (row, layer, head) => asScore(row?.find(([l, h]) => l === layer && h === head));
const scoreAt = (name, layer, head) => ofHead(scoreRow(name), layer, head);

function drawHeads() {
  $("heads").hidden = !scoreNames.length;
  if ($("heads").hidden) return;
  // First: their place beside the chart decides how wide that is.
  $("births").hidden = !data.births.length;
  $("wiring").hidden = !data.wiring.values.some(wires => wires.length);
  $("wiring").parentElement.hidden = $("births").hidden && $("wiring").hidden;
  $("scored-at").textContent = data.kind === "run" ? `at step ${count(steps[state.step] ?? 0)}`
    : "on random tokens that come twice, or on the prompt";
  const drawn = [state.step, isDark(), $("scores").clientWidth, devicePixelRatio].join();
  if (drawn !== scoresDrawn) scoreNames.forEach(drawScore);
  const shares = scoreNames.filter(name => data.scores[name].steps.length > 1 && !UNBOUNDED.includes(name));
  const story = name => data.scores[name].values.map(row => ofHead(row, state.layer, state.head));
  const series = shares.map(name => ({
    name: plain(name), colour: colourOf(name), xs: data.scores[name].steps,
    ys: story(name).map(of => of.value), errors: story(name).map(of => of.error),
  }));
  chart($("trajectory"), {
    title: `${headName(state.layer, state.head)} over the steps, ± one standard error`,
    height: 240, at: steps[state.step], zero: 1, series,
  });
  if (drawn !== scoresDrawn) drawBirths();
  scoresDrawn = drawn;
  const k = data.wiring.steps.findLastIndex(step => step <= steps[state.step]);
  if (!$("wiring").hidden) drawWiring($("wiring"), [L, H], data.wiring.values[k] ?? [], "Who feeds whom "
    + `at step ${count(steps[state.step])}`, [state.layer, state.head], choose);
}

function drawScore(name) {
  const { steps: at, values } = data.scores[name];
  if (!scoreMaps[name]) {
    const host = el("div", { className: "cells" }), caption = el("span", { className: "quiet" });
    $("scores").append(el("figure", {}, el("figcaption", {}, el("h3", {}, plain(name)), caption), host));
    scoreMaps[name] = Object.assign(cells(host, `${plain(name)} of every head`), { caption });
  }
  const table = new Map((scoreRow(name) ?? []).map(found => [found[0] * H + found[1], found]));
  const of = (l, h) => asScore(table.get(l * H + h)), value = (l, h) => of(l, h).value;
  // one scale for all steps
  const most = UNBOUNDED.includes(name) ? values.flat().reduce((top, v) => Math.max(top, v[2]), 1e-9) : 1;
  const unit = name === "distance" ? " tokens" : "", when = at.length === 1 && data.kind === "run" ? `, at step ${count(at[0])}` : "";
  const both = SIGNED.includes(name);
  scoreMaps[name].caption.textContent = `${both ? "−1" : "0"} to ${Number(most.toPrecision(2))}${unit}${when}`;
  scoreMaps[name]({
    rows: L, cols: H, start: [0, 0], least: 0, upright: true, most: 64 * H + 26,
    high: Math.min(46, Math.max(14, 360 / Math.max(L, H))),
    rowNames: Array.from({ length: L }, (_, l) => `L${l}`), colNames: Array.from({ length: H }, (_, h) => `H${h}`),
    signed: both, level: (l, h) => value(l, h) === null ? -1 : (both ? signedLevel : level)(value(l, h) / most),
    write: (l, h) => brief(of(l, h), most), pick: choose,
    tell: (l, h) => aboutScore(name, l, h, of(l, h)),
  });
}

// What is said of a head's score: its value as far as it is known, and without the first token.
function aboutScore(name, l, h, { value, error, without }) {
  const of = [el("div", {}, `${headName(l, h)} ${plain(name)}`),
    el("div", { className: "value" }, el("b", {}, known(value, error))),
    ...MEANING[name] ? [el("div", { className: "quiet" }, MEANING[name])] : []];
  const rest = "with attention to the first token left out";
  return without === null ? of : [...of, el("div", {}, `${without.toFixed(2)} ${rest}`)];
}

// A score in a cell: .15, 12.3, fewer digits where its error leaves fewer
function brief({ value, error }, most) {
  const digits = error ? Math.max(0, -Math.floor(Math.log10(error))) : 2;
  const text = value.toFixed(Math.min(digits, most >= 10 ? 1 : 2));
  return text.replace(/^-(0\.?0*)$/, "$1").replace(/^(-?)0\./, "$1.");
}

function drawBirths() {
  if (!data.births.length) return;
  const marks = [], born = kinds.filter(kind => data.births.some(b => b.score === kind));
  const under = (svg, x, top, width) => {
    let y = top + 12;
    for (const kind of born) {
      svg.append(el("svg:text", { x: 4, y: y + 4, class: "lane", style: `fill: var(--${colourOf(kind)})` },
        plain(kind)));
      y += 18;
      const ends = [];
      for (const birth of data.births.filter(b => b.score === kind)) {
        const name = headName(birth.layer, birth.head), wide = 14 + 7 * name.length;
        const at = Math.min(x(birth.step), width - wide);
        const free = ends.findIndex(end => end < at - 6), row = free < 0 ? ends.length : free; // names do not overlap
        const middle = y + row * 15, colour = `var(--${colourOf(kind)})`;
        ends[row] = at + wide;
        const says = `${plain(kind)}, born ${birth.when}`;
        const choice = () => choose(birth.layer, birth.head);
        const mark = el("svg:g", { "data-birth": name, role: "button", "aria-label": `${name}: ${says}`, tabindex: -1 },
          el("svg:line", { x1: x(birth.step), x2: x(birth.step), y1: 10, y2: middle, class: "stem",
            style: `stroke: ${colour}` }),
          el("svg:circle", { cx: at, cy: middle, r: 4, style: `fill: ${colour}` }),
          el("svg:text", { x: at + 7, y: middle + 4 }, name));
        mark.onpointerenter = mark.onfocus = () => {
          const p = mark.getBoundingClientRect();
          tell([el("b", {}, name), el("div", {}, says)], p.right, p.bottom - 12);
        };
        mark.onpointerleave = mark.onblur = () => tell(null);
        mark.onclick = choice;
        mark.addEventListener("keydown", event => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choice(); }
        });
        marks.push(svg.appendChild(mark));
      }
      y += 15 * ends.length + 8;
    }
    return y - top;
  };
  const focused = [...document.querySelectorAll("[data-birth]")].indexOf(document.activeElement);
  chart($("births"), { title: "When heads were born", height: 200, at: steps[state.step], under,
    domain: data.births.map(b => b.step),
    series: [curve("train/loss", "training loss", "soft"), curve("val/loss", "validation loss", "accent", true)] });
  const svg = $("births").querySelector("svg"), read = svg.onkeydown;
  roving(svg, marks, 1, () => {}, Math.max(0, focused));
  const walk = svg.onkeydown;
  svg.onkeydown = event => event.target === svg ? read(event) : walk(event);
  if (focused >= 0) marks[focused].focus();
}

// ---- all together

function setUpControls() {
  $("step").max = Math.max(0, steps.length - 1);
  $("steps").hidden = steps.length < 2;
  stepSlider(() => steps.length - 1, () => state.step, k => { state.step = k; show(); });
  $("probe").append(...data.probes.map((p, k) => el("option", { value: k }, p.label)));
  $("probe").parentElement.hidden = data.probes.length < 2;
  $("probe").onchange = () => { state.probe = Number($("probe").value); setUpProbe(); show(); };
  $("raw").onchange = $("weighted").onchange = () => { state.weighted = $("weighted").checked; draw(); };
  $("average").onchange = () => { state.average = $("average").checked; draw(); };
  $("looks").onchange = $("needs").onchange = () => { state.needs = $("needs").checked; setUpProbe(); draw(); };
}

function setUpProbe() {
  $("asking").hidden = !probe().explained?.some(Boolean);
  if ($("asking").hidden) { state.needs = false; $("looks").checked = true; }
  $("weighting").hidden = state.needs || probe().maps.some(([, norms]) => norms === null);
  if ($("weighting").hidden) { state.weighted = false; $("raw").checked = true; }
  $("average").parentElement.hidden = state.needs || H < 2;
  if (state.needs) state.average = $("average").checked = false;
  if (tokens.of !== state.probe) setUpText();
}

// ---- the address of what is looked at

function keepAddress() {
  const { layer, head, held, needs, weighted, average } = state, last = newest() && data.maxSteps > data.step;
  writeAddress({
    head: L ? headName(layer, head) : null,
    step: steps.length > 1 && !last ? steps[state.step] : null, // the newest of a run that goes on is followed
    token: held, view: needs ? "needs" : null, weights: weighted ? "value" : null, heads: average ? "average" : null,
    on: state.probe ? probe().name : null,
  });
}

// Look at what the address asks for, as far as the page has it.
function takeAddress() {
  const asked = readAddress(), [layer, head] = asked.head ?? [L, H];
  const step = asked.step === null ? -1 : steps.findLastIndex(step => step <= asked.step);
  if (layer < L && head < H) Object.assign(state, { layer, head });
  state.step = step < 0 ? Math.max(0, steps.length - 1) : step;
  state.probe = Math.max(0, data.probes.findIndex(p => p.name === asked.on));
  $(asked.view === "needs" ? "needs" : "looks").checked = true;
  $(asked.weights === "value" ? "weighted" : "raw").checked = true;
  $("average").checked = asked.heads === "average";
  Object.assign(state, { needs: $("needs").checked, weighted: $("weighted").checked, average: $("average").checked });
  if (!data.probes.length) return;
  $("probe").value = state.probe;
  setUpProbe();
  if (asked.token < tokens.length && asked.token !== null) state.held = asked.token;
}

// [layer, head] that tells most: of induction, where there is any, else of the token before.
function firstHead() {
  const best = name => data.scores?.[name]?.values.at(-1)?.reduce((best, v) => v[2] > best[2] ? v : best, [0, 0, 0]);
  const found = best("induction"), [layer, head] = found?.[2] >= 0.15 ? found : best("previous_token") ?? found ?? [0, 0];
  return [layer, head];
}

async function start() {
  document.title = `${visible(data.title).replaceAll("·", " ")} · GlassGPT`;
  $("title").textContent = visible(data.title).replaceAll("·", " ");
  const some = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;
  const shared = groups < H ? ` over ${some(groups, "key/value head")}` : "";
  const facts = L ? [some(L, "layer"), some(H, "head") + shared] : [];
  if (data.probes.length) facts.push(`${some(data.probes[0].T, "token")}${data.kind === "run" ? " of text shown" : ""}`);
  if (data.steps.length > 1) facts.push(some(data.steps.length, "snapshot"));
  $("summary").textContent = facts.join(" · ");
  $("conclusion").hidden = !data.conclusion?.length;
  $("conclusion").append(...(data.conclusion ?? []).map(sentence => el("li", {}, sentence)));
  if (!("DecompressionStream" in window)) {
    data.probes = [];
    $("nothing").textContent = "This browser is too old to unpack the attention maps.";
  }
  $("nothing").hidden = data.probes.length > 0;
  $("looking").hidden = !data.probes.length;
  [state.layer, state.head] = firstHead();
  setUpTheme(() => { if (data.kind === "run") drawTraining(); draw(); });
  setUpControls();
  if (data.kind === "run") { setUpTraining(); drawTraining(); }
  if (data.probes.length) {
    drawMap = cells($("map"), "attention map; arrow keys read its cells");
    drawNear = cells($("zoom-map"), "part of the map, larger; arrow keys read its cells");
    drawRows = cells($("rows-map"), "rows of single tokens; arrow keys read their cells");
    $("looking").querySelector(".stage").classList.toggle("many", H > 14);
  }
  takeAddress();
  if (data.probes.length) drawGrid = headGrid($("heads-grid"), [L, H], groups, choose, [state.layer, state.head]);
  onhashchange = () => {
    takeAddress();
    choose(state.layer, state.head);
    show();
  };
  const seconds = Object.values(data.seconds ?? {}).reduce((sum, s) => sum + s, 0);
  if (data.kind === "run") follow($("alive"), { ...data, seconds }, () => $("play").textContent !== "▶");
  await show();
  scrollAsBefore();
}

start();
