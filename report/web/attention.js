// The page of a run, or of one prompt: its data, its state, its attention. Stands after draw.js and maps.js, in one
// module with training.js and heads.js, which have the other sections, and start.js.

import { readAddress, writeAddress } from "./address.js";
import { createCellGrid } from "./cell_grid.js";
import { drawColorBar } from "./colors.js";
import { $, bdi, el } from "./dom.js";
import {
  formatCount,
  formatNumber,
  formatSigned,
  formatWithError,
  makeVisible,
  pluralize,
  shortenToken,
} from "./format.js";
import { setUpStepSlider, showStep } from "./frame.js";
import { scoreAt, scoreNames } from "./head_metrics.js";
import { drawHeads, drawOverview } from "./heads.js";
import { headName, labelToken, MIN_DEEP_LAYERS } from "./labels.js";
import { drawBreakdown, drawScoreAttribution, nextTokens } from "./logit_attribution.js";
import { headGrid, largest, load, mapOf, PRECISION, reader, withoutFirst } from "./maps.js";
import { blobs, unpacked } from "./packed.js";
import {
  choose,
  data,
  groups,
  H,
  L,
  probe,
  scoredSteps,
  seen,
  state,
  stepNow,
  steps,
} from "./store.js";
import { scoreLabel } from "./terms.js";
import { drawStripes, explainedOf, FAINT, resolved, stripes } from "./token_effect.js";
import { addArrowKeys } from "./tooltip.js";

// ---- attention

let drawGrid = null;
let tokens = [];
let drawMap = null;
let drawNear = null;
let current = null;
let explained = null; // what is known of the predictions, of the same probe and step
const looked = () => (state.rest ? (current.rest ??= withoutFirst(current)) : current);
const shownView = () => (state.needs && explained ? explained : looked());

export function setUpMaps() {
  drawMap = createCellGrid($("map"), "attention map; arrow keys read its cells");
  drawNear = createCellGrid($("zoom-map"), "part of the map, larger; arrow keys read its cells");
}

export function setUpGrid() {
  drawGrid = headGrid($("heads-grid"), [L, H], groups, choose, [state.layer, state.head]);
}

export function showHead() {
  const { layer, head } = state;
  $("heads-grid")
    .querySelectorAll("[role=radio]")
    .forEach((button, k) => {
      button.tabIndex = k === layer * H + head ? 0 : -1;
    });
  draw();
  if (L > MIN_DEEP_LAYERS) revealHead();
}

// Scroll the frame of the heads, and it alone, so far that the head in focus is seen.
export function revealHead() {
  const host = $("heads-grid");
  const button = host.querySelectorAll("[role=radio]")[state.layer * H + state.head];
  const inside = host.getBoundingClientRect();
  const at = button?.getBoundingClientRect();
  if (at && (at.top < inside.top || at.bottom > inside.bottom)) {
    host.scrollTop += at.top - inside.top - (inside.height - at.height) / 2;
  }
}

const loadStored = (p, s) =>
  load(`${p}/${s}`, [data.probes[p].maps[s], data.shape, data.probes[p]]);

function setUpText() {
  const host = $("text");
  const words = probe().tokens;
  Object.assign(state, { token: null, held: null, fresh: true, cell: null });
  tokens = words.map((word, i) => {
    const pieces = makeVisible(word)
      .split(/([·⏎⇥␍⍽]+)/)
      .filter(Boolean)
      .flatMap(part =>
        /[·⏎⇥␍⍽]/.test(part)
          ? [...part].flatMap(c =>
              c === "⏎" ? [el("i", {}, c), el("br")] : [el("wbr"), el("i", {}, c)],
            )
          : [part],
      );
    const span = el(
      "bdi",
      { className: "token", role: "button", "aria-label": `token ${i}` },
      ...pieces,
      ...(isOwn() ? lossUnder(i) : []),
    );
    if (isOwn()) span.classList.toggle("hidden-token", live.hidden.includes(i));
    span.onpointerenter = () => light(i);
    span.onfocus = () => light(i);
    span.onclick = () => hold(i);
    return span;
  });
  tokens.of = state.probe;
  host.classList.toggle("own", isOwn());
  host.replaceChildren(
    ...tokens.flatMap((span, i) => (isOwn() && /\n/.test(words[i]) ? [span, el("br")] : [span])),
  );
  if (data.prompted && tokens[data.prompted]) {
    tokens[data.prompted].before(el("span", { className: "border" }, "▏generated from here on▕"));
  }
  host.onpointerleave = () => light(null);
  addArrowKeys(host, tokens, 1, () => {}, Math.max(0, tokens.length - 1));
  const walk = host.onkeydown;
  host.onkeydown = event => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.target.click();
    } else if (event.key === "Escape") {
      state.held = null;
      light(null);
    } else if (event.key !== "ArrowUp" && event.key !== "ArrowDown") walk(event);
  };
}

// Below a token of the reader's text what it cost, and what it did with nothing off.
function lossUnder(i) {
  const { losses, was } = live.explained;
  const now = losses[i - 1];
  const before = was?.losses[i - 1] ?? now;
  const number = x => (Number.isFinite(x) ? x.toFixed(1) : "\u00a0");
  const changed = number(now) !== number(before);
  return [
    el("small", {}, number(now)),
    ...(was
      ? [el("small", { className: "was" }, changed ? `was ${number(before)}` : "\u00a0")]
      : []),
  ];
}

// The token at which something happens: where the head in focus saved most, or else where a token was needed most.
function eventful() {
  const { layer, head } = state;
  const rows = Array.from({ length: Math.max(1, probe().tokens.length - 1) }, (_, i) => i);
  if (!explained) return Math.floor(rows.length * 0.6);
  const strongest = of => rows.reduce((best, i) => (of(i) > of(best) ? i : best), 0);
  const saved = strongest(i => explained.head_effect(layer, head, i));
  return explained.head_effect(layer, head, saved) >= FAINT
    ? saved
    : strongest(i => Math.max(0, ...Array.from({ length: i }, (_, j) => explained.at(0, 0, i, j))));
}

// Lights what token i attends to and what attends to it; null: what is held, or nothing.
function light(i) {
  state.token = i ?? state.held;
  if (!tokens.length || !current) return;
  const view = shownView();
  const read = reader(view, seen());
  const most = largest(view, state.weighted);
  const at = state.token ?? -1;
  const to = [];
  const from = [];
  for (let k = 0; at >= 0 && k < view.n; k++) {
    if (k <= at) to.push([read(at, k), k]);
    if (k >= at) from.push([read(k, at), k]);
  }
  // Twenty shades: what is faint alike is drawn alike, and need not be drawn again.
  const shade = found =>
    4 * Math.round(20 * Math.sqrt(Math.max(0, Math.min(1, Math.abs(found) / most || 0))));
  const colour = (kind, value) =>
    !view.signed ? kind : value < 0 ? "hindered" : kind === "to" ? "needed" : "from";
  tokens.forEach((span, k) => {
    const kind = at < 0 || k === at ? "" : k < at ? "to" : "from";
    const value = kind && (kind === "to" ? to[k][0] : from[k - at][0]);
    const share = kind && shade(value);
    const wanted = kind
      ? `background: color-mix(in oklab, var(--${colour(kind, value)}) ${share}%, transparent)`
      : "";
    if (span.shown !== wanted) span.style.cssText = span.shown = wanted;
    if (span.lit !== (k === state.token))
      span.classList.toggle("lit", (span.lit = k === state.token));
  });
  const under = to.map(([value, k]) => [-value, k]);
  $("lists").replaceChildren(
    ...(at < 0
      ? []
      : view.signed
        ? [
            list(view, "needed, nats", "needed", at, to),
            list(view, "had in its way, nats", "hindered", at, under),
            list(view, "was needed by, nats", "from", at, from),
          ]
        : [
            list(view, "attends to", "to", at, to),
            list(view, "is attended to by", "from", at, from),
          ]),
  );
  drawPrediction();
}

// Scroll the text, and it alone, so far that token i is seen.
function reveal(i) {
  if (!tokens[i]) return;
  const host = $("text");
  const inside = host.getBoundingClientRect();
  const at = tokens[i].getBoundingClientRect();
  if (at.top < inside.top) host.scrollTop -= inside.top - at.top + 20;
  else if (at.bottom > inside.bottom) host.scrollTop += at.bottom - inside.bottom + 20;
}

// What is expected after the lit token; and the card of the one that is held.
function drawPrediction() {
  const i = state.token;
  const known = probe().tokens;
  $("expected").hidden = !explained || i === null;
  const own = explained === live.explained ? explained : null; // whose card comes when it is asked for
  $("card-part").hidden = !explained || state.held === null || (own && own.card?.i !== state.held);
  if (own && state.held !== null) askCard(state.held, drawPrediction);
  if (!$("expected").hidden) {
    const pick = k => {
      state.target = k;
      light(state.token);
    };
    const { buttons, sentence } = nextTokens(explained, data.words, i, state.target, pick);
    const named = ([x, j], k) => [
      k ? ", " : " ",
      bdi(shortenToken(known[j]), "token"),
      ` ${formatSigned(x)}`,
    ];
    const needed = Array.from({ length: i }, (_, j) => [explained.at(0, 0, i, j), j])
      .filter(([x]) => x >= FAINT)
      .sort((a, b) => b[0] - a[0])
      .slice(0, 3)
      .flatMap(named);
    const when = explained.step === stepNow() ? "" : ` (at step ${formatCount(explained.step)})`;
    $("expected").replaceChildren(
      el("h4", {}, "After ", ...labelToken(explained, i), " the model expects", when),
      el("div", { className: "chances" }, ...buttons),
      el(
        "p",
        {},
        ...sentence,
        ...(needed.length ? [" Hidden, these raise it:", ...needed, "."] : []),
      ),
    );
  }
  if ($("card-part").hidden || i !== state.held) return;
  $("card-title").replaceChildren("Prediction breakdown after ", ...labelToken(explained, i));
  const { layer, head, target } = state;
  drawBreakdown($("card"), explained, i, {
    layer,
    head,
    target,
    tied: data.tied,
    words: data.words,
    choose,
  });
}

function list(view, name, kind, at, found) {
  const best = found
    .filter(([w]) => w > 0)
    .sort((a, b) => b[0] - a[0])
    .slice(0, 8);
  const top = best[0]?.[0] ?? 1;
  const line = (w, k) =>
    el(
      "li",
      { style: `--w: ${((100 * w) / top).toFixed(1)}%` },
      el("span", {}, ...labelToken(view, k)),
      el("b", {}, formatNumber(w)),
    );
  const lines = best.map(([w, k]) => line(w, k));
  return el(
    "div",
    { className: kind },
    el("h4", {}, ...labelToken(view, at), ` ${name}`),
    el("ol", {}, ...lines),
    ...(found.length > best.length
      ? [el("p", { className: "quiet" }, `and ${formatCount(found.length - best.length)} more`)]
      : []),
  );
}

let turn = 0;
export async function show() {
  const mine = ++turn;
  const p = state.probe;
  showStep(state.step, stepNow());
  if (isOwn()) return readAgain();
  if (data.probes.length) {
    const view = await loadStored(p, state.step);
    if (mine !== turn) return;
    const all = probe().needs;
    const at = all.findLastIndex((one, k) => one && k <= state.step);
    const rest = probe().rest?.[state.step];
    if (state.rest && rest)
      view.rest ??= withoutFirst(view, await load(`${p}/rest`, [rest, data.shape, probe()]));
    const found =
      at < 0
        ? null
        : await load(`${p}/${at}/explained`, [all[at], data.shape, probe()], explainedOf);
    if (found) found.step = steps[at]; // needs are not measured at every step
    if (mine !== turn) return;
    [current, explained] = [view, found];
    if (state.fresh) Object.assign(state, { held: eventful(), fresh: false });
  }
  draw();
}

export function draw() {
  if (current && (!isOwn() || current === live.view)) drawAttention();
  drawHeads();
  drawSwitches();
  keepAddress();
}

function drawAttention() {
  const view = shownView();
  const by = state.weighted;
  const { period } = probe();
  const grid = looked(); // of a text that is typed, after what the eye is on
  if (isOwn())
    setTimeout(() => {
      if (grid === looked()) drawGrid(grid, seen());
    });
  else drawGrid(grid, seen());
  sayWhatIsSeen(view, by); // first: its title decides where the map begins
  drawMap(
    mapOf(view, seen(), {
      most: mostWide(),
      over: (...where) => {
        if (period) drawStripes(period)(...where);
        else drawBorder(view.n, ...where);
      },
      enter: (i, j) => {
        light(i);
        reveal(i);
        drawZoom(i, j);
      },
      leave: () => light(null),
      pick: pickCell,
    }),
  );
  fitFrame();
  explainCell();
  drawColorBar(
    $("bar"),
    view.signed ? "nats" : by ? "weight × ‖v W_O‖" : "weight",
    largest(view, by),
    view.signed,
  );
  light(state.token);
  drawZoom(state.held ?? 0, state.held ?? 0);
}

// Of a deep model: the grid of heads in a frame that ends with the window, below a score of every head.
function fitFrame() {
  $("overview").hidden = L <= MIN_DEEP_LAYERS || !scoreNames.length;
  if (L <= MIN_DEEP_LAYERS) return;
  if (!$("overview").hidden) drawOverview($("overview-map"), $("overview-score").value);
  const top = $("heads-grid").getBoundingClientRect().top + scrollY;
  $("heads-grid").style.maxHeight =
    innerWidth < 1000 ? "420px" : `${Math.max(260, innerHeight - top - 10)}px`;
}

// Of a map whose tokens have no room for their names the part around a cell, with names.
const ZOOM = 24; // cells along its side
function drawZoom(i, j) {
  const view = shownView();
  const room = Math.min($("map").clientWidth, mostWide());
  $("zoom").hidden = view.n <= ZOOM || (room - 50) / view.n >= 8.5;
  if ($("zoom").hidden) return;
  const [from, left] = [i, j].map(k => Math.min(view.n - ZOOM, Math.max(0, k - ZOOM / 2)));
  const spec = mapOf(view, seen());
  const names = start => spec.rowNames.slice(start, start + ZOOM);
  $("zoom-title").textContent =
    `Tokens ${from} to ${from + ZOOM - 1} on tokens ${left} to ${left + ZOOM - 1}`;
  drawNear({
    ...spec,
    rows: ZOOM,
    cols: ZOOM,
    most: 620,
    least: 0,
    rowNames: names(from),
    colNames: names(left),
    start: [i - from, j - left],
    level: (a, b) => spec.level(from + a, left + b),
    tell: (a, b) => spec.tell(from + a, left + b),
    enter: a => {
      light(from + a);
      reveal(from + a);
    },
    leave: () => light(null),
    pick: a => hold(from + a),
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
  return innerWidth < 1000 ? 900 : Math.min(900, Math.max(460, innerHeight - top - 4));
}

function sayWhatIsSeen(view, by) {
  const { layer, head, average } = state;
  const { name, period } = probe();
  const step = steps[state.step];
  const kind = view.signed
    ? [
        ["needed", "what it needed"],
        ["hindered", "what was in its way"],
        ["from", "what needed it"],
      ]
    : [
        ["to", "what it attends to"],
        ["from", "what attends to it"],
      ];
  $("map-note").hidden = !view.signed;
  const legend = ([key, text]) => [el("span", { className: `key ${key}` }, text), " "];
  $("text-keys").replaceChildren(...kind.flatMap(legend));
  const key = ([score, colour]) =>
    el("span", { className: "key", style: `--c: var(--${colour})` }, score);
  const stripe = period ? [" The scores read the framed cells: ", ...stripes(period).map(key)] : [];
  if (view.signed) {
    const after = data.kind === "run" ? ` after ${formatCount(view.step)} steps` : "";
    $("map-title").textContent = `What each prediction needed${after}`;
    $("seen").replaceChildren(
      "Row: the token after which the next one is predicted; column: a token that is hidden " +
        "from all later ones, in every head. Red: hidden, it raises the next token's loss by so many nats; blue: it " +
        "lowers the loss; what is below a tenth of a nat is pale. All of it is measured by running the model again.",
      ...stripe,
    );
    $("precision").textContent = "";
    return;
  }
  $("map-title").textContent =
    (average ? `Layer ${layer}, the average of its ${H} heads,` : headName(layer, head)) +
    (data.kind === "run" ? ` after ${formatCount(step)} steps` : "");
  const on = isOwn()
    ? "your text"
    : data.kind === "prompt"
      ? "the prompt"
      : name === "text"
        ? "the beginning of the validation text"
        : `${period} random tokens, then the same ${period} again`;
  const cell = by
    ? `weight × ‖v W_O‖, the length of the vector that it adds${average ? ", averaged" : ""}`
    : "an attention weight; a row sums to 1";
  const hint = kept.length && !average ? " A click on one tells why the head looked there." : "";
  const k = scoredSteps.indexOf(step);
  const scores =
    average || k < 0
      ? []
      : scoreNames
          .map(score => [score, scoreAt(score, layer, head, k)])
          .filter(([, { value }]) => value !== null)
          .map(
            ([score, { value, error }]) =>
              `${scoreLabel(score).toLowerCase()} ${formatWithError(value, error)}`,
          );
  const without = state.rest
    ? " Without the first token; the rows are made to sum to 1 again."
    : "";
  const border = data.prompted ? " Below the line: what the model made." : "";
  $("seen").replaceChildren(
    `On ${on}.${border} Row: the token that looks; column: what is looked at. ` +
      `A cell is ${cell}.${without}${hint}${scores.length ? ` Its scores: ${scores.join(", ")}.` : ""}`,
    ...stripe,
  );
  $("precision").textContent =
    (state.needs ? "What predictions needed is not in this page for this step. " : "") +
    (isOwn()
      ? "The weights are computed in this page, of the model's numbers in float16." +
        (live.explained.step === step
          ? ""
          : ` They are those of step ${formatCount(live.explained.step)}.`)
      : PRECISION) +
    (steps.length < data.of
      ? ` ${steps.length} of ${data.of} snapshots are in this page, so that it stays small.`
      : "") +
    (data.unread ? ` ${data.unread} more cannot be read, and are left out.` : "");
}

function hold(i) {
  Object.assign(state, { held: state.held === i ? null : i, fresh: false });
  state.target = 0;
  light(i);
  drawSwitches();
  keepAddress();
}

// A click on a cell holds its token, and tells why the head looked there.
function pickCell(i, j) {
  Object.assign(state, { held: i, fresh: false, cell: [i, j], target: 0 });
  light(i);
  explainCell();
  keepAddress();
}

async function explainCell() {
  const { cell, layer, head, average, needs } = state;
  const step = stepNow();
  const p = state.probe;
  const mine = isOwn();
  $("why").hidden = !cell || average || needs || !kept.length || !probe().ids.length;
  if ($("why").hidden) return;
  (innerWidth < 1000 ? $("zoom") : $("expected")).before($("why")); // where it is seen beside the cell
  if (!mine && !kept.includes(step)) {
    $("why").replaceChildren(
      el(
        "p",
        { className: "quiet" },
        "Why the head looked there can be told where the model's " +
          `weights are in this page: at ${kept.length > 1 ? "steps" : "step"} ${kept.map(formatCount).join(", ")}.`,
      ),
    );
    return;
  }
  const [i, j] = cell;
  const changes = mine ? {} : { off: [], hidden: [] };
  const terms = await askOf("why", probe().ids, { layer, head, i, j, ...changes }).catch(cannotRun);
  if (
    cell !== state.cell ||
    layer !== state.layer ||
    head !== state.head ||
    p !== state.probe ||
    step !== stepNow()
  )
    return;
  if (typeof terms === "string")
    return $("why").replaceChildren(el("p", { className: "quiet" }, terms));
  drawScoreAttribution($("why"), terms, [
    `Why ${headName(layer, head)} looked from `,
    ...labelToken(current, i),
    " at ",
    ...labelToken(current, j),
  ]);
}

// ---- all together

export function setUpControls() {
  $("step").max = Math.max(0, steps.length - 1);
  $("steps").hidden = steps.length < 2;
  setUpStepSlider(
    () => steps.length - 1,
    () => state.step,
    k => {
      state.step = k;
      show();
    },
  );
  $("probe").append(
    ...data.probes.map((p, k) =>
      el(
        "option",
        { value: k },
        p === live
          ? live.name
          : p.name === "text"
            ? "text"
            : `random tokens, repeated after ${p.period}`,
      ),
    ),
  );
  $("probe").parentElement.hidden = data.probes.length < 2;
  $("probe").onchange = () => {
    chooseProbe(Number($("probe").value));
  };
  $("raw").onchange = $("weighted").onchange = () => {
    state.weighted = $("weighted").checked;
    draw();
  };
  $("average").onchange = () => {
    state.average = $("average").checked;
    draw();
  };
  $("rest").onchange = () => {
    state.rest = $("rest").checked;
    show();
  };
  $("overview-score").append(
    ...scoreNames.map(name => el("option", { value: name }, scoreLabel(name))),
  );
  if (scoreNames.includes("induction")) $("overview-score").value = "induction";
  $("overview-score").onchange = draw;
  $("looks").onchange = $("needs").onchange = () => {
    state.needs = $("needs").checked;
    setUpProbe();
    if (state.needs && isOwn() && live.explained) askNeeds();
    draw();
  };
}

function chooseProbe(k) {
  if (k === state.probe && tokens.of === k) return;
  state.probe = k;
  $("probe").value = k;
  setUpProbe();
  show();
}

export function setUpProbe() {
  $("asking").hidden = !isOwn() && !probe().needs.some(Boolean);
  if ($("asking").hidden) {
    state.needs = false;
    $("looks").checked = true;
  }
  $("weighting").hidden = state.needs;
  if ($("weighting").hidden) {
    state.weighted = false;
    $("raw").checked = true;
  }
  $("average").parentElement.hidden = state.needs || H < 2;
  $("resting").hidden = state.needs;
  if (state.needs) state.average = $("average").checked = false;
  if (tokens.of !== state.probe && (!isOwn() || live.explained)) setUpText();
}

// ---- the address of what is looked at

function keepAddress() {
  const { layer, head, held, needs, weighted, average } = state;
  const last = state.step === steps.length - 1 && data.maxSteps > data.step;
  writeAddress({
    head: L ? headName(layer, head) : null,
    step: steps.length > 1 && !last ? steps[state.step] : null, // the newest of a run that goes on is followed
    token: held,
    view: needs ? "needs" : null,
    weights: weighted ? "value" : null,
    heads: average ? "average" : null,
    first: state.rest ? "no" : null,
    on: state.probe && !isOwn() ? probe().name : null,
    text: isOwn() && $("typed").value.length <= LETTERS ? $("typed").value : null,
    off: isOwn() && live.off.length ? live.off.join(",") : null,
    hidden: isOwn() && live.hidden.length ? live.hidden.join(",") : null,
  });
}

// Look at what the address asks for, as far as the page has it.
export function takeAddress() {
  const asked = readAddress();
  const [layer, head] = asked.head ?? [L, H];
  takeText(asked);
  const step = asked.step === null ? -1 : steps.findLastIndex(step => step <= asked.step);
  if (layer < L && head < H) Object.assign(state, { layer, head });
  state.step = step < 0 ? Math.max(0, steps.length - 1) : step;
  state.probe = Math.max(
    0,
    data.probes.findIndex(p => (asked.text === null ? p.name === asked.on : p === live)),
  );
  $(asked.view === "needs" ? "needs" : "looks").checked = true;
  $(asked.weights === "value" ? "weighted" : "raw").checked = true;
  $("average").checked = asked.heads === "average";
  $("rest").checked = state.rest = asked.first === "no";
  Object.assign(state, {
    needs: $("needs").checked,
    weighted: $("weighted").checked,
    average: $("average").checked,
  });
  if (!data.probes.length) return;
  $("probe").value = state.probe;
  setUpProbe();
  if (asked.token < tokens.length && asked.token !== null)
    Object.assign(state, { held: asked.token, fresh: false });
}

// A text of the reader's own: read by the model in a worker as it is typed, with heads switched off and tokens hidden,
// and continued. It is one more probe, "your text", in the views of page.js, after which it stands.

const LETTERS = 4000; // of a text in the address
const WAIT = 30; // milliseconds in which keys are gathered

// The worker, made of the page's own text: `ask` gives what it answers, `tell` hears the parts before that.
const engine = {
  worker: null,
  asked: new Map(),
  last: 0,
  ask(name, given = {}, tell = () => {}) {
    if (!this.worker) {
      const url = URL.createObjectURL(
        new Blob([$("engine").textContent], { type: "text/javascript" }),
      );
      this.worker = new Worker(url);
      this.worker.onmessage = ({ data: { id, part, answer, error } }) => {
        const { done, failed, tell: hear } = this.asked.get(id);
        if (part) return hear(part);
        this.asked.delete(id);
        if (error) failed(new Error(error));
        else done(answer);
      };
      this.worker.onerror = event => {
        for (const { failed } of this.asked.values())
          failed(new Error(event.message ?? "no worker can be made here"));
        this.asked.clear();
      };
    }
    const id = ++this.last;
    return new Promise((done, failed) => {
      this.asked.set(id, { done, failed, tell });
      this.worker.postMessage({ id, ask: name, ...given });
    });
  },
  stop(what) {
    this.worker?.postMessage({ id: this.last, ask: "stop", what });
  },
};

export const kept = Object.keys(data.weights?.blobs ?? {}).map(Number); // steps whose weights are in the page
export const live = {
  name: "your text",
  period: null,
  needs: [],
  maps: [],
  tokens: [],
  ids: [],
  T: 0,
  off: [],
  hidden: [],
  view: null,
  explained: null,
  busy: false,
  again: false,
};
const isOwn = () => probe() === live;

let begun = null;
function begin() {
  return (begun ??= blobText(data.weights.tokenizer).then(text =>
    engine.ask("begin", { config: data.shapes, tokenizer: JSON.parse(text) }),
  ));
}

const blobText = async number => new TextDecoder().decode(await unpacked(number));

// The step whose weights stand for the slider's: the last one up to it, else the first.
const stepOf = step => kept.findLast(one => one <= step) ?? kept[0];

const given = new Map(); // step → when the worker has its weights
async function withWeights(step) {
  await begin();
  if (!given.has(step)) {
    const packed = blobs[data.weights.blobs[step]].textContent;
    given.set(step, engine.ask("weights", { step, tensors: data.weights.tensors, packed }));
  }
  await given.get(step);
}

// A question about ids at the slider's step, with what is switched off.
async function askOf(name, ids, more = {}, tell) {
  const step = stepOf(stepNow());
  await withWeights(step);
  return engine.ask(name, { ids, step, off: live.off, hidden: live.hidden, ...more }, tell);
}

const cannotRun = e =>
  `The model in this page cannot be run (${e.message}); what is stored is shown.`;

// ---- what is typed becomes a view

// Read the text again: at once where nothing is being read, else when that is done.
async function readAgain() {
  if (live.busy) {
    live.again = true;
    return;
  }
  live.busy = true;
  const began = performance.now();
  try {
    await begin();
    const whole = await engine.ask("encode", { text: $("typed").value });
    const ids = whole.slice(-data.shapes.block_size);
    live.hidden = live.hidden.filter(j => j < ids.length - 1);
    const step = stepOf(stepNow());
    const found = ids.length ? await askOf("look", ids) : null;
    const left = whole.length - ids.length;
    $("try-says").textContent = !found
      ? ""
      : `${pluralize(ids.length, "token")}${left ? `, the last of ${whole.length}` : ""}, ` +
        `${Math.round(performance.now() - began)} ms`;
    const edited = ids.length !== live.ids.length || ids.some((id, t) => id !== live.ids[t]);
    if (found) take(ids, await engine.ask("words", { ids }), found, step);
    if (found && isOwn()) showLive(edited);
    drawSwitches();
  } catch (e) {
    $("try-says").textContent =
      begun && e.message.startsWith("the character") ? `${e.message}.` : cannotRun(e);
  }
  live.busy = false;
  if (live.again) {
    live.again = false;
    readAgain();
  }
}

// What was found becomes the probe's view, and what is known of its predictions.
function take(
  ids,
  tokens,
  { maps, norms, largest, next, chances, losses, was, words: named },
  step,
) {
  const T = ids.length;
  const N = (T * (T + 1)) / 2;
  const view = {
    L,
    H,
    T,
    tokens,
    n: T,
    exact: true,
    norms,
    largest,
    size: maps.length,
    bound: () => 0,
    at: (l, h, i, j) => maps[(l * H + h) * N + (i * (i + 1)) / 2 + j],
  };
  Object.assign(data.words, named);
  Object.assign(live, {
    ids,
    tokens,
    T,
    view,
    explained: liveExplained(T, tokens, { next, chances, losses, was }, step),
  });
  ["token_effect", "head_effect"].forEach(what => engine.stop(what));
}

// What is known of the predictions of the text, as needs.js has it of a stored one: the card and what was needed come
// when they are asked for.
function liveExplained(T, tokens, { next, chances, losses, was }, step) {
  const known = {
    L,
    H,
    T,
    tokens,
    parts: L * (H + 1) + 2,
    largest: 1e-3,
    signed: true,
    n: T,
    norms: null,
    step,
    losses,
    need: [],
    lost: [],
    card: null,
    was,
  };
  const none = () => NaN;
  const card = read => (known.card ? read(known.card) : NaN);
  return Object.assign(known, {
    at: (l, h, i, j) => (j < i ? (known.need[j]?.need[i - j - 1] ?? NaN) : 0),
    bound: none,
    kl: (i, j) => known.need[j]?.kl[i - j - 1] ?? NaN,
    loss: i => losses[i],
    head_effect: (l, h, i) => (known.card?.i === i ? (known.lost[l * H + h] ?? NaN) : NaN),
    lens: k => card(({ lens }) => lens[k]),
    direct: (p, i, target) => card(({ direct }) => direct[p][target]),
    predicted: i =>
      next[i].map((id, k) => ({ id, chance: chances[i][k], was: was?.chances[i][k] })),
    writes: (l, h) => (known.card?.of[0] === l && known.card.of[1] === h ? known.card.writes : []),
  });
}

// Show the text, and what was held in it where it is the same text.
function showLive(edited) {
  const { held, target } = state;
  [current, explained] = [live.view, live.explained];
  setUpText();
  const stays = live.wanted ?? (edited ? null : held);
  Object.assign(state, { held: Math.min(stays ?? live.T - 1, live.T - 1), fresh: false, target });
  live.wanted = null;
  drawAttention();
  if (state.needs) askNeeds();
  keepAddress();
}

// The card of the token that is held, when it is there.
async function askCard(i, draw) {
  const known = live.explained;
  const of = [state.layer, state.head];
  const key = JSON.stringify([i, of]);
  if (known.asked === key) return;
  const same = known.card?.i === i;
  known.asked = key;
  const card = await askOf("card", live.ids, { i, of });
  if (known !== live.explained || known.asked !== key) return;
  Object.assign(data.words, card.words);
  Object.assign(known, { card }, same ? {} : { lost: [] });
  draw();
  if (same || i + 1 >= live.T) return;
  await askOf("head_effect", live.ids, { i }, ({ k, nats }) => {
    known.lost[k] = nats;
  });
  if (known === live.explained && known.asked === key) draw();
}

// What predictions needed, a column at a time.
async function askNeeds() {
  const known = live.explained;
  if (known.asksNeeds) return;
  known.asksNeeds = true;
  let drawn = 0;
  await askOf("token_effect", live.ids, {}, ({ j, effects: need, kl }) => {
    known.need[j] = { need, kl };
    known.largest = need.reduce((most, x) => Math.max(most, Math.abs(x) || 0), known.largest);
    if (known !== live.explained || !state.needs || performance.now() - drawn < 200) return;
    drawn = performance.now();
    drawAttention();
  });
  if (known === live.explained && state.needs && isOwn()) drawAttention();
}

// ---- switches

function toggle(list, one) {
  const at = list.indexOf(one);
  if (at < 0) list.push(one);
  else list.splice(at, 1);
  readAgain();
}

// A head off, or on again; a token hidden from all later ones, or seen again.
const toggleHead = (layer, head) => toggle(live.off, headName(layer, head));
const toggleToken = i => toggle(live.hidden, i);

function drawSwitches() {
  const mine = isOwn();
  const { layer, head, held } = state;
  const name = headName(layer, head);
  $("switches").hidden = !mine;
  $("head-off").textContent = `switch ${name} ${live.off.includes(name) ? "on" : "off"} (x)`;
  $("hide").hidden = held === null || held >= live.T - 1;
  $("hide").textContent = `${live.hidden.includes(held) ? "show" : "hide"} token ${held} (h)`;
  $("reset").disabled = !live.off.length && !live.hidden.length;
  const off = [...live.off, ...live.hidden.map(j => `token ${j}`)];
  const mean = of => {
    const found = of.filter(Number.isFinite);
    return found.length ? found.reduce((a, b) => a + b) / found.length : NaN;
  };
  const { losses, was } = live.explained ?? { losses: [] };
  $("changed").replaceChildren(
    ...(losses.length > 1
      ? [
          `Its tokens cost ${formatNumber(mean(losses))} nats in the mean`,
          ...(was
            ? [
                `; with nothing off it was ${formatNumber(mean(was.losses))}. Off: ${off.join(", ")}.`,
              ]
            : ["."]),
        ]
      : []),
  );
  $("heads-grid").classList.toggle("own", mine);
  $("heads-grid")
    .querySelectorAll("[role=radio]")
    .forEach((button, k) =>
      button.classList.toggle("off", mine && live.off.includes(headName(Math.floor(k / H), k % H))),
    );
}

async function goOn() {
  if (live.going) return stopGoing();
  live.going = true;
  $("go-on").textContent = "stop";
  chooseProbe(data.probes.indexOf(live));
  try {
    await begin();
    const ids = await engine.ask("encode", { text: $("typed").value });
    const asked = { temperature: Number($("temperature").value) || 0, most: 1000 };
    await askOf("goOn", ids.length ? ids : live.ids.slice(0, 1), asked, ({ text }) => {
      if (!live.going) return;
      $("typed").value = text;
      $("typed").scrollTop = 1e6;
      readSoon();
    });
  } catch {
    /* readAgain says why */
  }
  stopGoing();
}

function stopGoing() {
  if (live.going) engine.stop("goOn");
  live.going = false;
  $("go-on").textContent = "continue";
  readSoon();
}

let soon = 0;
function readSoon() {
  if (soon && live.going) return; // while a text goes on, its views follow five times a second
  clearTimeout(soon);
  soon = setTimeout(
    () => {
      soon = 0;
      readAgain();
    },
    live.going ? 200 : WAIT,
  );
}

// The section, and what people with a console have.
export function setUpTrying(first) {
  $("try").hidden = !kept.length;
  const bytes = data.weights?.bytes;
  $("too-large").hidden = !bytes;
  if (bytes)
    $("too-large").textContent =
      `The model's weights take ${Math.ceil(bytes / 1e6)} MB, too many for a page. For a ` +
      'text of your own: python sample.py run_dir=… prompt="…" attention=page.html';
  if (!kept.length) return;
  $("typed").value = first;
  $("typed").oninput = () => {
    chooseProbe(data.probes.indexOf(live));
    readSoon();
  };
  $("go-on").onclick = goOn;
  $("head-off").onclick = () => toggleHead(state.layer, state.head);
  $("hide").onclick = () => toggleToken(state.held);
  $("heads-grid").addEventListener(
    "click",
    event => {
      // on the switch of a head
      const button = event.target.closest("[role=radio]");
      const box = button?.getBoundingClientRect();
      if (
        !box ||
        !isOwn() ||
        event.clientX < box.right - 17 ||
        event.clientY > box.top + 32 ||
        !event.detail
      )
        return;
      event.stopPropagation();
      const k = [...$("heads-grid").querySelectorAll("[role=radio]")].indexOf(button);
      toggleHead(Math.floor(k / H), k % H);
    },
    true,
  );
  $("reset").onclick = () => {
    Object.assign(live, { off: [], hidden: [] });
    readAgain();
  };
  for (const [id, key, press] of [
    ["heads-grid", "x", () => toggleHead(state.layer, state.head)],
    [
      "text",
      "h",
      () => {
        if (state.held !== null) toggleToken(state.held);
      },
    ],
  ]) {
    $(id).addEventListener("keydown", event => {
      if (event.key === key && isOwn()) press();
    });
  }
  const ask = (name, ids, { off = [], hidden = [] } = {}) =>
    withWeights(kept.at(-1)).then(() =>
      engine.ask(name, { ids: [...ids], off, hidden, step: kept.at(-1) }),
    );
  window.glass = {
    encode: text => begin().then(() => engine.ask("encode", { text })),
    decode: ids => begin().then(() => engine.ask("decode", { ids: [...ids] })),
    logits: (ids, changes) => ask("logits", ids, changes),
    maps: (ids, changes) => ask("maps", ids, changes),
  };
}

// The text that an address asks for, with what is switched off.
function takeText({ text, off, hidden, token }) {
  if (!kept.length || text === null) return;
  $("typed").value = text;
  Object.assign(live, { off: off.filter(name => /^L\d+H\d+$/.test(name)), hidden, wanted: token });
}
