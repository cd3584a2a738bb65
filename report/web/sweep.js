// The page of a sweep: its data, its state, its sections. Stands last, in one module.
// A setting is what runs that differ by their seed alone have in common; settings are numbered from the best, 0, on.

import { chart, compact, dots, shorten, ticks } from "./charts.js";
import { RAMP } from "./colors.js";
import { $, bdi, el } from "./dom.js";
import {
  formatCount,
  formatDuration,
  formatNumber,
  formatWithError,
  pluralize,
  printable,
  printableName,
  readableName,
} from "./format.js";
import { setTitle, setUpTheme } from "./frame.js";
import { fillTable } from "./table.js";
import { addArrowKeys } from "./tooltip.js";

const data = JSON.parse($("data").textContent);
const { runs } = data;
const keys = data.keys.map(keyOf);
for (const run of runs) run.values = run.values.map((value, k) => keys[k].values.indexOf(value)); // from now on places
const metric = { "val/loss": "nats per token", "val/bits_per_byte": "bits per byte" }[data.metric];
const runsOf = Array.from({ length: Math.max(0, ...runs.map(run => run.setting + 1)) }, (_, g) =>
  runs.filter(run => run.setting === g),
);
const finished = g => runsOf[g].filter(run => run.status === "finished");
const settings = runsOf.map((_, g) => resultOf(finished(g)));
const best = data.command ? 0 : null;
const crowned = data.oneSeed ? null : best; // of one seed each, none is the best
const seeds = runsOf.some(of => of.length > 1); // whether there are settings with more than one run
// the key that gives the colours, the settings that are singled out, what the table is sorted by
const state = { colour: 0, pinned: null, sort: { column: null, sign: 0 } };

// What was swept under a name: its values in their order, numbers by their size; how they are spread along an axis, as
// names or as numbers (`at`), evenly or by ratio, whichever makes the gaps more alike.
function keyOf({ name, values }) {
  const number = value => (/^[-+.\d]/.test(value) ? Number(value) : NaN);
  if (!values.every(value => Number.isFinite(number(value))))
    return { name, values, axis: "names", at: null };
  values.sort((a, b) => number(a) - number(b));
  const at = values.map(number);
  const pairs = at.slice(1).map((to, k) => [at[k], to]);
  if (at[0] <= 0 || at.length < 2 || pairs.some(([a, b]) => a === b))
    return { name, values, axis: "linear", at };
  const uneven = gaps => deviation(gaps) / mean(gaps);
  const isLog =
    at.length === 2
      ? at[1] >= 4 * at[0]
      : uneven(pairs.map(([a, b]) => Math.log(b / a))) < uneven(pairs.map(([a, b]) => b - a));
  return { name, values, axis: isLog ? "log" : "linear", at };
}

function mean(xs) {
  return xs.length ? xs.reduce((sum, x) => sum + x, 0) / xs.length : null;
}

function deviation(xs) {
  return Math.sqrt(xs.reduce((sum, x) => sum + (x - mean(xs)) ** 2, 0) / (xs.length - 1));
}

// The standard error of a mean.
function errorOf(xs) {
  return xs.length > 1 ? deviation(xs) / Math.sqrt(xs.length) : null;
}

// What came of a setting: means over its finished runs, and the standard error of the metric's.
function resultOf(done) {
  const known = (table, name) => done.map(run => run[table][name] ?? null).filter(x => x !== null);
  const names = table => [...new Set(done.flatMap(run => Object.keys(run[table])))];
  const losses = known("figures", data.metric);
  const ends = done.flatMap(run => Object.keys(run.heads));
  const last = score =>
    done.map(run => run.heads[score]?.values.at(-1)).filter(x => x !== undefined);
  return {
    n: losses.length,
    metric: mean(losses),
    error: errorOf(losses),
    figures: Object.fromEntries(names("figures").map(name => [name, mean(known("figures", name))])),
    errors: Object.fromEntries(
      names("figures").map(name => [name, errorOf(known("figures", name))]),
    ),
    emerged: Object.fromEntries(names("emerged").map(kind => [kind, known("emerged", kind)])),
    scores: Object.fromEntries([...new Set(ends)].map(score => [score, mean(last(score))])),
    scoreErrors: Object.fromEntries([...new Set(ends)].map(score => [score, errorOf(last(score))])),
  };
}

const panel = (host, id) => $(id) ?? host.appendChild(el("div", { id })); // of a chart

// ---- words

const last = keys.map(key => key.name.slice(key.name.lastIndexOf(".") + 1));
const keyName = k =>
  printableName(last.filter(name => name === last[k]).length > 1 ? keys[k].name : last[k]);
const valueOf = (run, k) => printableName(keys[k].values[run.values[k]]);
const same = (g, k) => new Set(runsOf[g].map(run => run.values[k])).size === 1;

// A value, with its key's name where it does not speak for itself.
function named(run, k) {
  const { axis, values } = keys[k];
  const speaks =
    keys.length > 1 &&
    axis === "names" &&
    !/^(true|false|null|none|)$/i.test(values[run.values[k]]);
  return speaks ? valueOf(run, k) : `${keyName(k)} ${valueOf(run, k)}`;
}
const settingName = g =>
  keys
    .map((_, k) => (same(g, k) ? named(runsOf[g][0], k) : ""))
    .filter(Boolean)
    .join(", ") || "all seeds";
const seedOf = run =>
  run.seed && seeds && keys[0].name !== "seed" ? [`seed ${printableName(run.seed)}`] : [];
const runName = run =>
  [...keys.map((_, k) => named(run, k)), ...seedOf(run)].join(", ") || printableName(run.name);
const digits = (x, n) => Number(x.toPrecision(n));
const within = (mean, error) =>
  error ? `${formatNumber(mean)} ± ${digits(error, 2)}` : formatNumber(mean);
const reached = run =>
  run.figures.step === null
    ? "before its first step"
    : `after ${formatCount(run.figures.step)} ${run.maxSteps ? `of ${formatCount(run.maxSteps)} ` : ""}steps`;
const outcome = run => (run.status === "finished" ? run.status : `${run.status} ${reached(run)}`);

function bytes(n) {
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, n)) / 3));
  return `${formatCount(digits(n / 1000 ** power, 3))} ${["bytes", "kB", "MB", "GB"][power]}`;
}

// What a setting costs: how it is called, what more there is to say of it, how it is written, on an
// axis too; whether it was measured.
const COSTS = {
  parameters: {
    name: "parameters",
    more: "",
    write: formatCount,
    brief: x => compact(digits(x, 3)),
  },
  kv_cache_bytes: { name: "KV cache", more: "of one full context", write: bytes, brief: bytes },
  tokens_per_second: {
    name: "tokens per second",
    more: "in training, on the run's machine",
    write: x => formatCount(digits(x, 3)),
    brief: x => compact(digits(x, 3)),
    measured: true,
  },
  train_seconds: {
    name: "training time",
    more: "",
    write: formatDuration,
    brief: x => `${compact(digits(x, 3))} s`,
    measured: true,
  },
};
const cost = (g, name) => settings[g].figures[name] ?? null;
const written = (name, x) => (x === null ? "–" : COSTS[name].write(x));
const lossOf = run => run.figures[data.metric];

// ---- colours: a path from pale to deep for values with an order, distinct hues for others, then dashes

const HUES = ["c1", "c2", "c3", "c4", "c6", "c7"];
const DASHES = [
  ["none", "solid"],
  ["7 4", "dashed"],
  ["2 3", "dotted"],
];
// place of the value
const colouredBy = g =>
  keys.length && same(g, state.colour) ? runsOf[g][0].values[state.colour] : null;
const hued = v => keys.length > 0 && v !== null && keys[state.colour].axis === "names";
const dash = v => DASHES[hued(v) ? Math.floor(v / HUES.length) % DASHES.length : 0];

function colour(v) {
  if (!keys.length || v === null) return "var(--c1)";
  if (hued(v)) return `var(--${HUES[v % HUES.length]})`;
  const { values } = keys[state.colour];
  const share = values.length > 1 ? v / (values.length - 1) : 1;
  const between = (from, to) => `rgb(${RAMP[Math.round(255 * (from + (to - from) * share))]})`;
  return `light-dark(${between(0.66, 0.1)}, ${between(0.42, 0.97)})`;
}

function setColours() {
  settings.forEach((_, g) =>
    document.documentElement.style.setProperty(`--s${g}`, colour(colouredBy(g))),
  );
}
const swatch = g =>
  el("span", { className: "swatch", style: `--c: var(--s${g})`, "aria-hidden": "true" });

// ---- singling settings out: marks of the others fade

function single(groups) {
  const wanted = groups ?? state.pinned;
  document.body.classList.toggle("single", Boolean(wanted));
  for (const mark of document.querySelectorAll("[data-group]")) {
    mark.classList.toggle(
      "lit",
      Boolean(wanted) && mark.dataset.group.split(" ").some(g => wanted.has(Number(g))),
    );
  }
}

const as = groups => groups && [...groups].join(" ");
function pin(groups) {
  state.pinned = as(groups) === as(state.pinned) ? null : groups;
  showPinned();
}

function showPinned() {
  $("all").hidden = !state.pinned;
  for (const chip of $("chips").children) {
    chip.setAttribute(
      "aria-pressed",
      Boolean(state.pinned) && chip.dataset.group === as(state.pinned),
    );
  }
  single(null);
}

let nearOne = null;
function near(of) {
  const group = of?.group ?? null;
  if (group !== nearOne) single((nearOne = group) === null ? null : new Set([group]));
}
const pick = of => pin(new Set([of.group]));

function drawLegend() {
  $("legend").hidden = settings.length < 2 || !keys.length;
  if ($("legend").hidden) return;
  const chips = keys[state.colour].values.map((value, v) => {
    const groups = new Set(settings.map((_, g) => g).filter(g => colouredBy(g) === v));
    const ofBest = groups.has(crowned);
    const chip = el(
      "button",
      {
        type: "button",
        className: "chip",
        "aria-pressed": "false",
        "data-group": [...groups].join(" "),
        style: `--c: ${colour(v)}; --dash: ${dash(v)[1]}`,
        title: ofBest ? "the best setting has this value" : "",
      },
      bdi(shorten(printableName(value), 200)),
      ofBest ? " ★" : "",
    );
    chip.onpointerenter = chip.onfocus = () => single(groups);
    chip.onpointerleave = chip.onblur = () => single(null);
    chip.onclick = () => pin(groups);
    return chip;
  });
  $("colour-name").textContent = keyName(state.colour);
  $("chips").replaceChildren(...chips);
  addArrowKeys($("chips"), chips, 1, () => {});
}

// ---- the best setting, and what went wrong

function showBest() {
  $("nothing").hidden = best !== null;
  $("best").hidden = best === null;
  $("nothing").textContent = runs.some(run => run.status === "finished")
    ? "No finished run has a validation loss that is a number."
    : "No run has finished yet.";
  if (best === null) return;
  const of = settings[best];
  const one = (value, name) => el("div", {}, el("b", {}, value), el("span", {}, name));
  const chosen = keys
    .map((_, k) => k)
    .filter(k => same(best, k))
    .map(k => one(bdi(valueOf(runsOf[best][0], k)), keyName(k)));
  const costs = Object.keys(COSTS).filter(name => cost(best, name) !== null);
  $("figures").append(
    ...chosen,
    one(
      within(of.metric, of.error),
      `validation loss, ${metric}${of.n > 1 ? `; mean ± standard error of ${of.n} seeds` : ""}`,
    ),
    ...costs.map(name =>
      one(written(name, cost(best, name)), `${COSTS[name].name} ${COSTS[name].more}`),
    ),
  );
  $("as-good").hidden = !data.asGood && !data.oneSeed;
  $("as-good").replaceChildren(
    "But ",
    bdi(data.asGood ?? ""),
    " is within the error: it may be as good.",
  );
  if (data.oneSeed) {
    $("best-title").textContent = "The lowest loss";
    $("as-good").textContent =
      "One seed: a difference this small is no finding. Add seed=1,2,3 to learn how " +
      "much seeds differ.";
  }
  $("best-command").textContent = data.command;
  $("copy").onclick = async () => {
    try {
      await navigator.clipboard.writeText(data.command);
    } catch {
      // where that is not allowed
      getSelection().selectAllChildren($("best-command"));
      document.execCommand("copy");
    }
    $("copy").textContent = "copied";
    setTimeout(() => {
      $("copy").textContent = "copy";
    }, 1500);
  };
}

function showTroubles() {
  const number = status => runs.filter(run => run.status === status).length;
  const bad = runs.filter(run => ["failed", "unfinished"].includes(run.status) || run.reason);
  const says = ["failed", "unfinished"]
    .filter(number)
    .map(status => `${pluralize(number(status), "run")} ${status}`);
  $("troubles").hidden = !bad.length;
  $("troubles").querySelector("h3").textContent =
    says.join(", ") || "Finished runs that could not go on";
  $("troubles")
    .querySelector("ul")
    .append(
      ...bad.map(run =>
        el(
          "li",
          {},
          el("b", {}, bdi(runName(run))),
          ` ${outcome(run)}`,
          ...(run.reason ? [": ", bdi(printable(run.reason))] : []),
        ),
      ),
    );
}

// ---- tables

// Columns of a table of the settings, see `fillTable`
const keyColumns = () =>
  keys.map((key, k) => ({
    name: keyName(k),
    text: true,
    write: g => (same(g, k) ? bdi(valueOf(runsOf[g][0], k)) : "all"),
    of: g => (same(g, k) ? (key.at?.[runsOf[g][0].values[k]] ?? runsOf[g][0].values[k]) : null),
  }));

function settingColumns() {
  const bits = g => settings[g].figures["val/bits_per_byte"];
  const ran = g => `${settings[g].n} of ${runsOf[g].length}`;
  return [
    ...keyColumns(),
    {
      name: metric,
      of: g => settings[g].metric,
      write: g => within(settings[g].metric, settings[g].error),
    },
    ...(seeds
      ? [
          {
            name: "runs",
            of: g => settings[g].n,
            write: g => (settings[g].n === runsOf[g].length ? settings[g].n : ran(g)),
          },
        ]
      : []),
    ...(data.metric === "val/loss"
      ? [
          {
            name: "bits per byte",
            of: bits,
            write: g => within(bits(g), settings[g].errors["val/bits_per_byte"]),
          },
        ]
      : []),
    ...Object.keys(COSTS).map(name => ({
      name: COSTS[name].name,
      of: g => cost(g, name),
      write: g =>
        written(name, cost(g, name)) +
        (settings[g].errors[name] ? ` ± ${written(name, settings[g].errors[name])}` : ""),
    })),
  ];
}

// Of each kind of head the score at the end and the birth.
function headColumns() {
  const kinds = [...new Set(settings.flatMap(s => Object.keys(s.scores)))];
  const birth = (g, kind) => {
    const born = settings[g].emerged[kind];
    const n = finished(g).length;
    const off = born && errorOf(born) ? ` ± ${formatCount(Math.round(errorOf(born)))}` : "";
    const some = born?.length < n ? ` in ${born.length} of ${n}` : "";
    return born ? `, born ${formatCount(Math.round(mean(born)))}${off}${some}` : "";
  };
  return [
    ...keyColumns(),
    ...kinds.map(kind => ({
      name: readableName(kind),
      of: g => settings[g].scores[kind] ?? null,
      write: g =>
        `${kind in settings[g].scores ? formatWithError(settings[g].scores[kind], settings[g].scoreErrors[kind]) : "–"}` +
        birth(g, kind),
    })),
  ];
}

function settingLine(g) {
  const row = el(
    "tr",
    { "data-group": g },
    el("td", {}, swatch(g), g === crowned ? el("b", { title: "the best setting" }, "★") : ""),
  );
  row.onpointerenter = () => single(new Set([g]));
  row.onpointerleave = () => single(null);
  row.onclick = () => pin(new Set([g]));
  return row;
}

function setUpTables() {
  $("table").hidden = !settings.length;
  $("table-note").textContent =
    `Best first, by the validation loss (${metric}) at each run's best step` +
    `${seeds ? ", the mean ± its standard error over the finished runs" : ""}. ` +
    "A column's name sorts by it; a click on a row singles the setting out." +
    (data.metric === "val/loss"
      ? ""
      : " The vocabulary differs between the runs: " +
        "bits per byte compare across it, losses per token do not.");
  fillTable($("settings"), settingColumns(), [...settings.keys()], settingLine, state.sort);
  const name = run => bdi(printableName(run.name));
  fillTable(
    $("runs"),
    [
      { name: "setting", text: true, write: run => bdi(settingName(run.setting)) },
      ...(seeds
        ? [{ name: "seed", text: true, write: run => printableName(run.seed || "–") }]
        : []),
      { name: "outcome", text: true, write: outcome },
      { name: metric, write: run => formatNumber(lossOf(run)) },
      {
        name: "folder",
        text: true,
        write: run => (run.page ? el("a", { href: run.page }, name(run)) : name(run)),
      },
    ],
    runs,
    run => el("tr", { "data-group": run.setting }, el("td", {}, swatch(run.setting))),
  );
  const ended = [...settings.keys()].filter(g => Object.keys(settings[g].scores).length);
  $("heads-ends").hidden = !ended.length;
  fillTable($("heads-ends"), headColumns(), ended, settingLine);
}

// ---- curves

// The mean over the finished runs of a setting, at the steps that all of them have; null where none is finished.
function meanCurve(g, of) {
  const curves = finished(g)
    .map(of)
    .filter(c => c?.steps.length);
  if (!curves.length) return null;
  const tables = curves.map(c => new Map(c.steps.map((step, k) => [step, c.values[k]])));
  const xs = curves[0].steps.filter(step => tables.every(table => table.has(step)));
  const at = step => tables.map(table => table.get(step));
  return {
    xs,
    ys: xs.map(step => mean(at(step))),
    errors: xs.map(step => errorOf(at(step))),
    runs: curves.length,
  };
}

// Lines of all settings: each run faint behind the mean. What has not finished has a dashed line of its own.
function lines(of, { bold = true, emerged = () => [] } = {}) {
  const faint = [];
  const strong = [];
  settings.forEach((_, g) => {
    const label = `${settingName(g)}${g === crowned ? " ★" : ""}`;
    const mean = meanCurve(g, of);
    const look = { colour: `s${g}`, group: g, dash: dash(colouredBy(g))[0] };
    for (const run of runsOf[g].filter(run => of(run)?.steps.length)) {
      const line = {
        ...look,
        name: runName(run),
        xs: of(run).steps,
        ys: of(run).values,
        run,
        dots: emerged(run, of(run)),
      };
      if (run.status !== "finished") strong.push({ ...line, dash: "3 3" });
      else if (mean.runs > 1) faint.push({ ...line, faint: true });
      else strong.push({ ...line, bold, label });
    }
    if (mean?.runs > 1)
      strong.push({ ...look, ...mean, name: settingName(g), seeds: mean.runs, bold, label });
  });
  return [...faint, ...strong.reverse()]; // the best on top
}

const tipOf = unit => (s, k) => {
  const more = [
    `step ${formatCount(s.xs[k])}`,
    s.seeds && `mean of ${s.seeds} runs`,
    s.run && s.run.status !== "finished" && s.run.status,
  ].filter(Boolean);
  return [
    el("div", {}, el("b", {}, bdi(s.name)), s.group === crowned ? " ★" : ""),
    el("div", { className: "value" }, el("b", {}, formatNumber(s.ys[k])), ` ${unit}`),
    el("div", {}, el("small", {}, more.join(", "))),
  ];
};

// The steep beginning, which is much the same in all runs, and what diverges would flatten all differences.
function capOf(of) {
  const found = runs.map(of).filter(c => c?.steps.length > 1);
  const starts = found.map(c => c.values[0]).sort((a, b) => a - b);
  const after = c => c.values[c.steps.findIndex((step, k) => k > 0 && step >= c.steps.at(-1) / 10)];
  return found.length
    ? Math.min(1.02 * starts[starts.length >> 1], Math.max(...found.map(after)))
    : Infinity;
}

const BOLD = seeds ? "Bold: the mean over a setting's finished runs; thin: each run." : "";

function drawCurves() {
  const all = [
    { of: run => run.curves[data.metric], name: "Validation loss", unit: metric, bold: true },
  ];
  if (data.metric === "val/loss") {
    all.push({
      of: run => run.curves["train/loss"],
      name: "Training loss",
      unit: metric,
      bold: false,
    });
  }
  const drawn = all.filter(({ of }) => runs.some(run => of(run).steps.length > 1));
  const height = $("curves").clientWidth > 1500 ? 400 : 320;
  drawn.forEach((_, k) => panel($("curves-charts"), `curve-${k}`)); // all of them first: they share the width
  drawn.forEach(({ of, name, unit, bold }, k) =>
    chart($(`curve-${k}`), {
      title: `${name}, ${unit}`,
      series: lines(of, { bold }),
      height,
      cap: capOf(of),
      xName: "steps",
      tip: tipOf(unit),
      near,
    }),
  );
  const any = test => drawn.some(({ of }) => runs.some(run => test(of(run), run, capOf(of))));
  const measured = Math.max(0, ...drawn.flatMap(({ of }) => runs.map(run => of(run).of)));
  $("curves").hidden = !drawn.length;
  $("curves-note").textContent = [
    BOLD,
    any((c, run) => run.status !== "finished" && c.steps.length)
      ? "Dashed: a run that has not finished."
      : "",
    any((c, run, cap) => c.values.some(v => v > cap))
      ? "What is above the frame, the steep beginning or a run that diverges, is cut off."
      : "",
    all.length > 1
      ? ""
      : "Training losses are left out: they are per token, and the tokens differ.",
    measured > data.points
      ? `Curves go through ${formatCount(data.points)} of up to ${formatCount(measured)} points, evenly chosen.`
      : "",
  ]
    .filter(Boolean)
    .join(" ");
}

// ---- what was swept, and its price

const nodesOf = (name, g, value, ...more) => [
  el("div", {}, el("b", {}, bdi(name)), g === crowned ? " ★" : ""),
  el("div", { className: "value" }, el("b", {}, value), ` ${metric}`),
  ...more.filter(Boolean).map(text => el("div", {}, el("small", {}, text))),
];
function meanPoint(g, at, ...more) {
  const { metric: y, error, n } = settings[g];
  return {
    at,
    y,
    error,
    group: g,
    nodes: nodesOf(settingName(g), g, within(y, error), n > 1 && `mean of ${n} runs`, ...more),
  };
}

const alongOf = (key, k) => ({
  axis: key.axis,
  whole: true,
  ticks: key.values.map((value, v) => [key.at?.[v] ?? v, printableName(value)]),
  name: `${keyName(k)}${key.axis === "log" ? ", logarithmic" : ""}`,
});

function drawAgainst() {
  keys.forEach((key, k) => {
    if (key.values.length < 2 && keys.length > 1) return;
    const at = run => key.at?.[run.values[k]] ?? run.values[k];
    const has = g => same(g, k) && settings[g].metric !== null;
    const means = settings
      .map((_, g) => g)
      .filter(has)
      .map(g => meanPoint(g, at(runsOf[g][0])));
    const each = runs
      .filter(
        run => lossOf(run) !== null && !(has(run.setting) && runsOf[run.setting].length === 1),
      )
      .map(run => ({
        at: at(run),
        y: lossOf(run),
        group: run.setting,
        small: 1,
        nodes: nodesOf(runName(run), null, formatNumber(lossOf(run)), outcome(run)),
      }));
    dots(panel($("against-charts"), `against-${k}`), {
      title: `Validation loss against ${keyName(k)}`,
      points: [...each, ...means],
      along: alongOf(key, k),
      joined: key.axis === "names" ? [] : joined(means, k),
      ringed: crowned,
      near,
      pick,
    });
  });
  const said = drawCosts();
  $("against").hidden = !runs.some(run => lossOf(run) !== null);
  $("against-note").textContent = [
    `Validation loss (${metric}) at each run's best step; lower is better.`,
    seeds ? "Large: a setting's mean, with its standard error; small: each run." : "",
    crowned === null ? "" : "The ring is the best setting.",
    document.querySelector("#against .joined") && keys.length > 1
      ? "Lines join settings that differ in this alone."
      : "",
    document.querySelector("#against .beyond") ? "An arrowhead stands far above the frame." : "",
    said,
  ]
    .filter(Boolean)
    .join(" ");
}

// Points of settings that differ in key k alone, in its order, under what they have in common.
function joined(means, k) {
  const found = new Map();
  for (const p of means) {
    const others = keys
      .map((_, other) => (other === k ? null : runsOf[p.group][0].values[other]))
      .join();
    found.set(others, [...(found.get(others) ?? []), p]);
  }
  const name = line =>
    keys
      .map((_, other) => (other === k ? "" : named(runsOf[line[0].group][0], other)))
      .filter(Boolean)
      .join(", ");
  return [...found.values()]
    .filter(line => line.length > 1)
    .map(line =>
      Object.assign(
        line.sort((a, b) => a.at - b.at),
        { name: name(line) },
      ),
    );
}

// The loss against each price that differs; what is the same for all is returned as a sentence.
function drawCosts() {
  const said = [];
  for (const [name, { name: called, more, write, brief, measured }] of Object.entries(COSTS)) {
    const found = [...new Set(settings.map((_, g) => cost(g, name)).filter(x => x !== null))].sort(
      (a, b) => a - b,
    );
    const [low, high] = [found[0], found.at(-1)];
    const host = panel($("against-charts"), `cost-${name}`);
    const log = low > 0 && high > 8 * low;
    host.hidden = !(high > low);
    if (found.length === 1 && !measured && settings.length > 1) {
      said.push(
        name === "parameters" ? `${formatCount(low)} parameters` : `a KV cache of ${write(low)}`,
      );
    }
    if (host.hidden) continue;
    const stops =
      !measured && found.length < 9
        ? found
        : log
          ? ticks(Math.log2(low), Math.log2(high), 4).map(t => 2 ** t)
          : ticks(low, high, 3);
    dots(host, {
      title: `Validation loss against ${called}`,
      joined: [],
      ringed: crowned,
      near,
      pick,
      points: settings
        .map((_, g) => g)
        .filter(g => cost(g, name) !== null)
        .map(g => meanPoint(g, cost(g, name), `${called}: ${write(cost(g, name))}`)),
      along: {
        axis: log ? "log" : "linear",
        ticks: stops.map(t => [t, brief(t)]),
        name: `${called} ${more}${log ? ", logarithmic" : ""}`,
      },
    });
  }
  const all = settings.every((_, g) => finished(g).length)
    ? "All settings have"
    : "All that finished have";
  return said.length ? `${all} ${said.join(" and ")}.` : "";
}

// ---- what formed

const FORMED = {
  copying_gain: { title: "Repeat gain, nats", write: x => x.toFixed(2) },
  "tokens_at_emergence/induction": {
    title: "Induction head born, tokens seen",
    write: x => compact(digits(x, 2)),
  },
  "loss_at_emergence/induction": {
    title: "Validation loss when it was born",
    write: x => x.toFixed(2),
  },
  "heads/induction": { title: "Strongest induction head, score", write: x => x.toFixed(2) },
  "tokens_at_emergence/previous_token": {
    title: "Previous-token head born, tokens seen",
    write: x => compact(digits(x, 2)),
  },
  "heads/previous_token": {
    title: "Strongest previous-token head, score",
    write: x => x.toFixed(2),
  },
};

// A setting's mean of what formed, with its standard error; null where it formed in no run.
function formedPoint(g, at, { write }, of) {
  const found = finished(g)
    .map(of)
    .filter(x => x !== undefined && x !== null);
  const n = finished(g).length;
  if (!found.length) return null;
  const off = errorOf(found);
  const says = `${write(mean(found))}${off ? ` ± ${write(off)}` : ""}`;
  const seeds = `in ${found.length} of ${n} runs`;
  return {
    at,
    y: mean(found),
    error: off,
    group: g,
    nodes: [
      el("div", {}, el("b", {}, bdi(settingName(g)))),
      el("div", { className: "value" }, el("b", {}, says)),
      el("div", {}, el("small", {}, seeds)),
    ],
  };
}

function drawFormed() {
  const shares = settings.map((_, g) =>
    mean(finished(g).map(run => run.formed.pairs_again ?? NaN)),
  );
  const texts = shares.every(Number.isFinite) && Math.max(...shares) - Math.min(...shares) > 0.02;
  const host = $("formed-charts");
  const all = [...settings.keys()];
  const sizes = [...new Set(all.map(g => cost(g, "kv_cache_bytes")))]
    .filter(x => x !== null)
    .sort((a, b) => a - b);
  const caches = sizes.length > 1 && keys.some(key => /n_kv_head$/.test(key.name)) ? sizes : null;
  for (const [name, how] of Object.entries(FORMED)) {
    const of = run => run.formed[name];
    if (!runs.some(run => of(run) !== undefined)) continue;
    const charts = keys
      .map((key, k) => ({
        id: k,
        k,
        at: run => key.at?.[run.values[k]] ?? run.values[k],
        along: alongOf(key, k),
      }))
      .filter(({ k }) => keys[k].values.length > 1);
    if (texts)
      charts.push({
        id: "text",
        k: null,
        at: run => shares[run.setting],
        along: {
          axis: "linear",
          whole: true,
          name: "share of tokens whose pair came before",
          ticks: [...new Set(shares)].sort((a, b) => a - b).map(x => [x, x.toFixed(2)]),
        },
      });
    if (caches)
      charts.push({
        id: "cache",
        k: null,
        at: run => run.figures.kv_cache_bytes,
        along: {
          axis: "log",
          whole: true,
          name: "KV cache, logarithmic",
          ticks: caches.map(x => [x, bytes(x)]),
        },
      });
    for (const { id, k, at, along } of charts) {
      const means = all
        .map(g => runsOf[g].length && formedPoint(g, at(runsOf[g][0]), how, of))
        .filter(Boolean);
      const some = run =>
        run.status === "finished" && of(run) !== undefined && runsOf[run.setting].length > 1;
      const each = runs.filter(some).map(run => ({
        at: at(run),
        y: of(run),
        group: run.setting,
        small: 1,
        nodes: [
          el("div", {}, el("b", {}, bdi(runName(run)))),
          el("div", { className: "value" }, el("b", {}, how.write(of(run)))),
        ],
      }));
      dots(panel(host, `formed-${name}-${id}`), {
        points: [...each, ...means],
        along,
        ringed: null,
        near,
        pick,
        whole: true,
        title: `${how.title}, against ${k !== null ? keyName(k) : id === "cache" ? "the KV cache" : "the text"}`,
        joined: k === null || keys[k].axis === "names" ? [] : joined(means, k),
      });
    }
  }
  $("formed").hidden = !host.childElementCount;
  $("formed-note").textContent =
    (data.oneSeed ? "One seed each: a difference this small is no finding. " : "") +
    (seeds
      ? "Large: a setting's mean, with its standard error over seeds; small: each run. "
      : "") +
    "A setting in which no run has such a head has no dot.";
}

// ---- heads

const AVERAGED = { entropy: "entropy (1: looks evenly)", distance: "distance, in tokens" };

function drawHeads() {
  const kinds = [...new Set(runs.flatMap(run => Object.keys(run.heads)))].filter(kind =>
    runs.some(run => run.heads[kind]?.steps.length > 1),
  );
  const emerged = kind => (run, c) =>
    [c.steps.findLastIndex(step => step <= run.emerged[kind])].filter(k => k >= 0);
  $("heads").hidden = !kinds.length;
  for (const kind of kinds) {
    const title = AVERAGED[kind] ?? readableName(kind);
    chart(panel($("heads-charts"), `head-${kind}`), {
      title: title[0].toUpperCase() + title.slice(1),
      height: 220,
      zero: AVERAGED[kind] ? false : 0.3,
      series: lines(run => run.heads[kind], { emerged: emerged(kind) }),
      xName: "steps",
      tip: tipOf(readableName(kind)),
      near,
    });
  }
  const averaged = kinds.filter(kind => AVERAGED[kind]).join(" and ");
  const means = averaged ? `; of ${averaged} the mean over the heads` : "";
  $("heads-note").textContent = [
    `What the strongest head scores, step by step${means}.`,
    BOLD,
    runs.some(run => Object.keys(run.emerged).length)
      ? "A dot: the first such head is born."
      : "No head was born.",
  ]
    .filter(Boolean)
    .join(" ");
}

// ---- all together

function draw() {
  drawLegend();
  drawCurves();
  drawAgainst();
  drawFormed();
  drawHeads();
  showPinned();
}

function start() {
  setTitle(data.title, "GlassGPT sweep");
  $("summary").textContent = [
    keys.map((key, k) => `${keyName(k)} (${key.values.length})`).join(" × "),
    pluralize(settings.length, "setting"),
    pluralize(runs.length, "run"),
  ]
    .filter(Boolean)
    .join(" · ");
  state.colour = keys.reduce(
    (most, key, k) => (key.values.length > keys[most].values.length ? k : most),
    0,
  );
  $("colour").append(...keys.map((_, k) => el("option", { value: k }, keyName(k))));
  $("colour").value = state.colour;
  $("colouring").hidden = keys.length < 2;
  $("colour-name").hidden = keys.length > 1;
  $("colour").onchange = () => {
    state.colour = Number($("colour").value);
    setColours();
    draw();
  };
  $("all").onclick = () => {
    pin(null);
    $("chips").querySelector("[tabindex='0']").focus();
  };
  addEventListener("keydown", event => {
    if (event.key === "Escape" && state.pinned) pin(null);
  });
  setColours();
  showBest();
  showTroubles();
  setUpTables();
  setUpTheme(draw);
  draw();
}

start();
