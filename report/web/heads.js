// What the heads of a run do: every score, their story, their births, their composition. Stands after page.js.

import { createCellGrid } from "./cell_grid.js";
import { chart } from "./charts.js";
import { colorIndex, isDark } from "./colors.js";
import { drawWiring } from "./composition.js";
import { $, el } from "./dom.js";
import { formatCount, formatWithError, readableName } from "./format.js";
import { headGridLayout, headName } from "./labels.js";
import { choose, columns, data, H, L, scoredSteps, state, steps } from "./store.js";
import { term } from "./terms.js";
import { addArrowKeys, addTooltip } from "./tooltip.js";
import { curve } from "./training.js";

const UNBOUNDED = ["distance", "importance"]; // the other scores are shares of 1
const SIGNED = ["copying"]; // from -1 to 1
const MEANING = {
  current_token: "the weight on the token itself",
  previous_token: "the weight on the token just before",
  sink: "the weight on the first token",
  duplicate_token: "at a token's second occurrence, the weight on its first",
  induction: "at a token's second occurrence, the weight on what followed the first",
  entropy: "0: all on one token; 1: even over itself and all before",
  distance: "how far back it looks, in tokens",
  copying: "how often it makes the token that it looks at likely, less how often unlikely",
  importance: "how much the validation loss rises without it, in nats",
};
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7"];
export const headNames = Array.from({ length: L * H }, (_, k) =>
  headName(Math.floor(k / H), k % H),
);
export const valueAt = (key, k) => columns[key]?.[k] ?? null;
// What stands beside a score has its own columns; what the loss of repeats gains without a head is in the conclusion.
export const scoreNames = [
  ...new Set(
    Object.keys(columns)
      .map(key => /^heads\/(\w+)\/L\d+H\d+$/.exec(key)?.[1])
      .filter(name => name && !/_se$|_without_first$/.test(name)),
  ),
];
// Of each score the places of the steps that have it.
export const measured = Object.fromEntries(
  scoreNames.map(name => [
    name,
    [...scoredSteps.keys()].filter(k =>
      headNames.some(head => valueAt(`heads/${name}/${head}`, k) !== null),
    ),
  ]),
);
const born = bornHeads();
const kinds = [
  ...new Set([...scoreNames.filter(name => !UNBOUNDED.includes(name)), ...born.map(b => b.score)]),
];
const colourOf = name => COLOURS[kinds.indexOf(name) % COLOURS.length];
const scoreMaps = {};
let scoresDrawn = ""; // under what circumstances: another head changes none of it

// A head's score at place k of the steps: its value, its standard error, its value without the first token.
export function scoreAt(name, layer, head, k) {
  const of = end => valueAt(`heads/${name}${end}/${headName(layer, head)}`, k);
  return { value: of(""), error: of("_se"), without: of("_without_first") };
}

// The place of the slider's step among those that have a score, or of the last before it.
function placeOf(name) {
  const of = measured[name];
  return of.findLast(k => scoredSteps[k] <= steps[state.step]) ?? (of.length === 1 ? of[0] : -1);
}

// Who was born when, as the last step that says so has it.
function bornHeads() {
  const keys = Object.keys(columns).filter(key => key.startsWith("emerged/"));
  const last = scoredSteps.findLastIndex((_, k) => keys.some(key => columns[key][k] !== null));
  return keys
    .filter(key => valueAt(key, last) !== null)
    .map(key => {
      const [, score, name] = key.split("/");
      const step = columns[key][last];
      const [layer, head] = name.slice(1).split("H").map(Number);
      const before = data.looked.findLast(at => at < step) ?? step;
      const when =
        step - before > 1
          ? `between steps ${formatCount(before)} and ${formatCount(step)}`
          : `at step ${formatCount(step)}`;
      const until = valueAt(`lost/${score}/${name}`, last);
      return { score, name, layer, head, step, when, until };
    })
    .sort((a, b) => a.step - b.step);
}

const WIRE =
  /^composition\/(\w+)\/L(\d+)H(\d+)\/(queries|keys|values)\/(L\d+H\d+|L\d+MLP|embedding)$/;
const wires = Object.keys(columns)
  .map(key => WIRE.exec(key))
  .filter(of => of && !/_se$|_direct$/.test(of[1]))
  .map(([key, score, l, h, read, from]) => ({
    key,
    score,
    to: [Number(l), Number(h)],
    read,
    from,
  }));
const wiresAt = k =>
  wires
    .map(wire => {
      const of = end => valueAt(wire.key.replace(wire.score, wire.score + end), k);
      return {
        ...wire,
        share: of(""),
        error: of("_se"),
        direct: of("_direct"),
        off: of("_direct_se"),
      };
    })
    .filter(({ share, error }) => share !== null && error !== null);

export function drawHeads() {
  $("heads").hidden = !scoreNames.length;
  if ($("heads").hidden) return;
  // First: their place beside the chart decides how wide that is.
  $("births").hidden = !born.length;
  $("composition").hidden = !wires.length;
  $("scored-at").textContent =
    data.kind === "run" ? `at step ${formatCount(steps[state.step] ?? 0)}` : "on random tokens";
  const drawn = [state.step, isDark(), $("scores").clientWidth, devicePixelRatio].join();
  $("scores").style.setProperty("--heads", H);
  if (drawn !== scoresDrawn) scoreNames.forEach(drawScore);
  const shares = scoreNames.filter(name => measured[name].length > 1 && !UNBOUNDED.includes(name));
  const series = shares.map(name => {
    const story = measured[name].map(k => scoreAt(name, state.layer, state.head, k));
    return {
      name: readableName(name),
      colour: colourOf(name),
      xs: measured[name].map(k => scoredSteps[k]),
      ys: story.map(of => of.value),
      errors: story.map(of => of.error),
    };
  });
  chart($("trajectory"), {
    title: `${headName(state.layer, state.head)} over the steps, ± one standard error`,
    height: 240,
    at: steps[state.step],
    zero: 1,
    series,
  });
  if (drawn !== scoresDrawn) drawBirths();
  scoresDrawn = drawn;
  const k = scoredSteps.findLastIndex(step => step <= steps[state.step]);
  if (!$("composition").hidden)
    drawWiring(
      $("composition"),
      [L, H],
      wiresAt(k),
      `Who feeds whom${data.kind === "run" ? ` at step ${formatCount(steps[state.step])}` : ""}`,
      [state.layer, state.head],
      choose,
    );
}

// The keyboard hears what a score means in its cells.
function headingOf(name) {
  return el(
    "h3",
    {},
    MEANING[name]
      ? Object.assign(term(readableName(name), MEANING[name]), { tabIndex: -1 })
      : readableName(name),
  );
}

function drawScore(name) {
  if (!scoreMaps[name]) {
    const host = el("div", { className: "cells" });
    const caption = el("span", { className: "quiet" });
    $("scores").append(el("figure", {}, el("figcaption", {}, headingOf(name), caption), host));
    scoreMaps[name] = Object.assign(createCellGrid(host, `${readableName(name)} of every head`), {
      caption,
    });
  }
  const { place, most, both, spec } = scoreCells(name);
  const unit = name === "distance" ? " tokens" : "";
  const when =
    measured[name].length === 1 && data.kind === "run"
      ? `, at step ${formatCount(scoredSteps[place])}`
      : "";
  const values = headNames.map(head => valueAt(`heads/${name}/${head}`, place));
  const none = values.filter(x => x === null);
  const asked =
    name === "copying" && none.length % values.length ? ", of induction heads alone" : "";
  scoreMaps[name].caption.textContent =
    `${both ? "−1" : "0"} to ${Number(most.toPrecision(2))}${unit}${when}${asked}`;
  scoreMaps[name](spec);
}

// A score beside the map of a deep model, small.
let overview = null;
export function drawOverview(host, name) {
  overview ??= createCellGrid(host, "a score of every head");
  overview({
    ...scoreCells(name).spec,
    high: Math.max(5, Math.min(12, (0.34 * innerHeight) / L)),
    write: null,
  });
}

// What cells() draws of a score of every head, on one scale for all steps.
function scoreCells(name) {
  const place = placeOf(name);
  const of = (l, h) => scoreAt(name, l, h, place);
  const value = (l, h) => of(l, h).value;
  const most = !UNBOUNDED.includes(name)
    ? 1
    : headNames.reduce(
        (top, head) => Math.max(top, ...(columns[`heads/${name}/${head}`] ?? [])),
        1e-9,
      );
  const both = SIGNED.includes(name);
  return {
    place,
    most,
    both,
    spec: {
      ...headGridLayout(L, H, 360),
      signed: both,
      level: (l, h) => (value(l, h) === null ? -1 : colorIndex(value(l, h) / most, both)),
      write: (l, h) => brief(of(l, h), most),
      pick: choose,
      tell: (l, h) => aboutScore(name, l, h, of(l, h)),
    },
  };
}

// What is said of a head's score: its value as far as it is known, and without the first token.
function aboutScore(name, l, h, { value, error, without }) {
  const of = [
    el("div", {}, `${headName(l, h)} ${readableName(name)}`),
    el("div", { className: "value" }, el("b", {}, formatWithError(value, error))),
    ...(MEANING[name] ? [el("div", { className: "quiet" }, MEANING[name])] : []),
  ];
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
  if (!born.length) return;
  const marks = [];
  const lanes = kinds.filter(kind => born.some(b => b.score === kind));
  const under = (svg, x, top, width) => {
    let y = top + 12;
    for (const kind of lanes) {
      svg.append(
        el(
          "svg:text",
          { x: 4, y: y + 4, class: "lane", style: `fill: var(--${colourOf(kind)})` },
          readableName(kind),
        ),
      );
      y += 18;
      const ends = [];
      for (const birth of born.filter(b => b.score === kind)) {
        const { name } = birth;
        const wide = 14 + 7 * name.length;
        const at = Math.min(x(birth.step), width - wide);
        const free = ends.findIndex(end => end < at - 6);
        const row = free < 0 ? ends.length : free; // names do not overlap
        const middle = y + row * 15;
        const colour = `var(--${colourOf(kind)})`;
        ends[row] = at + wide;
        const says =
          birth.until === null
            ? `${readableName(kind)}, born ${birth.when}`
            : `${readableName(kind)} from step ${formatCount(birth.step)} to ${formatCount(birth.until)}, and no more`;
        const mark = el(
          "svg:g",
          { "data-birth": name, role: "button", "aria-label": `${name}: ${says}`, tabindex: -1 },
          el("svg:line", {
            x1: x(birth.step),
            x2: x(birth.step),
            y1: 10,
            y2: middle,
            class: "stem",
            style: `stroke: ${colour}`,
          }),
          el("svg:circle", {
            cx: at,
            cy: middle,
            r: 4,
            style:
              birth.until === null
                ? `fill: ${colour}`
                : `fill: var(--paper); stroke: ${colour}; stroke-width: 1.5`,
          }),
          el("svg:text", { x: at + 7, y: middle + 4 }, name),
        );
        addTooltip(
          mark,
          () => [el("b", {}, name), el("div", {}, says)],
          () => choose(birth.layer, birth.head),
        );
        marks.push(svg.appendChild(mark));
      }
      y += 15 * ends.length + 8;
    }
    return y - top;
  };
  const focused = [...document.querySelectorAll("[data-birth]")].indexOf(document.activeElement);
  chart($("births"), {
    title: "When heads were born",
    height: 200,
    at: steps[state.step],
    under,
    domain: born.map(b => b.step),
    series: [
      curve("train/loss", "training loss", "soft"),
      curve("val/loss", "validation loss", "accent", true),
    ],
  });
  const svg = $("births").querySelector("svg");
  const read = svg.onkeydown;
  addArrowKeys(svg, marks, 1, () => {}, Math.max(0, focused));
  const walk = svg.onkeydown;
  svg.onkeydown = event => (event.target === svg ? read(event) : walk(event));
  if (focused >= 0) marks[focused].focus();
}
