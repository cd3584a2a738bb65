/**
 * The data of a sweep's page: its runs, names, results, colors, and the highlighted settings.
 *
 * A setting is a combination of swept values; its runs differ only in their seed. Settings are
 * numbered from 0, best first. If any runs are compared, each is a setting of its own: the first
 * swept key is its name, and the others are the settings in which the runs differ.
 */

import { formatCompact, shortenToWidth } from "./chart_axes.js";
import { RAMP } from "./colors.js";
import { $, bdi, button, el } from "./dom.js";
import { formatCount, formatWithError, pluralize, printableName } from "./format.js";
import { censoredMedian, mean, standardDeviation, standardError } from "./statistics.js";
import { addArrowKeys } from "./tooltip.js";

/** In a comparison of runs that differ in more keys, charts are drawn against the runs only. */
const MAX_CHARTED_KEYS = 5;
/** Hues of values without an order, as names of CSS custom properties. */
const HUES = ["c1", "c2", "c3", "c4", "c6", "c7"];
/** When the hues are used up, they repeat with the next of these dashes. */
const DASHES = [
  { svg: "none", css: "solid" },
  { svg: "7 4", css: "dashed" },
  { svg: "2 3", css: "dotted" },
];
export const data = JSON.parse($("data").textContent);

/** @type {SweptKey[]} */
export const sweptKeys = data.keys.map(createSweptKey);

/** @type {SweepRun[]} */
export const runs = data.runs.map(run => ({
  ...run,
  valueIndices: run.values.map((value, k) => sweptKeys[k].values.indexOf(value)),
}));

/** @type {number[]} */
export const allSettings = [...new Set(runs.map(run => run.setting))];

/** The runs of each setting. */
export const runsOf = allSettings.map(setting => runs.filter(run => run.setting === setting));

/** The figures that any run has. @type {SweepFigure[]} */
export const figures = data.figures.filter(({ name }) =>
  runs.some(run => run.figures[name] !== null),
);

/** The figure that settings are compared by. @type {SweepFigure} */
export const lossFigure = data.figures.find(({ name }) => name === data.metric);

/** What a setting costs. */
export const costFigures = figures.filter(({ section }) => section === "cost");

/** What the page calls a setting: in a comparison each run is one. */
export const settingNoun = data.isComparison ? "run" : "setting";

/** The setting with the lowest loss; null if there is no result. */
export const lowestLossSetting = data.hasResult ? 0 : null;

/** The setting that is declared best; null without an error estimate. */
export const bestSetting = data.oneSeed ? null : lowestLossSetting;

export const hasSeveralSeeds = runsOf.some(runsOfSetting => runsOfSetting.length > 1);

/** Indices of the swept keys that charts are drawn against. */
export const chartedKeys =
  data.isComparison && sweptKeys.length > MAX_CHARTED_KEYS ? [0] : [...sweptKeys.keys()];

// --- values --------------------------------------------------------------------------------------

/** The runs whose results count: the finished ones, or in a comparison of runs each one so far. */
export function measuredRuns(setting) {
  return runsOf[setting].filter(run => run.status === "finished" || data.isComparison);
}

/** Return whether all runs of a setting have the same value of swept key k. */
export function hasSingleValue(setting, k) {
  return new Set(runsOf[setting].map(run => run.valueIndices[k])).size === 1;
}

/** The place of a run's value of key k on an axis: the number, or its index among the names. */
export function axisValue(run, k) {
  const index = run.valueIndices[k];
  return sweptKeys[k].numbers?.[index] ?? index;
}

/**
 * Put the values of a key in order and choose the axis that spaces them more evenly.
 *
 * @returns {SweptKey}
 */
function createSweptKey({ name, values }) {
  const toNumber = value => (/^[-+.\d]/.test(value) ? Number(value) : NaN);
  if (!values.every(value => Number.isFinite(toNumber(value)))) {
    return { name, values, axis: "names", numbers: null };
  }
  const sortedValues = [...values].sort((a, b) => toNumber(a) - toNumber(b));
  const numbers = sortedValues.map(toNumber);
  return { name, values: sortedValues, axis: isSpacedByRatio(numbers) ? "log" : "linear", numbers };
}

function isSpacedByRatio(numbers) {
  const pairs = numbers.slice(1).map((next, k) => [numbers[k], next]);
  if (numbers[0] <= 0 || numbers.length < 2 || pairs.some(([a, b]) => a === b)) return false;
  if (numbers.length === 2) return numbers[1] >= 4 * numbers[0];
  const unevenness = gaps => standardDeviation(gaps) / mean(gaps);
  const ratios = pairs.map(([a, b]) => Math.log(b / a));
  const differences = pairs.map(([a, b]) => b - a);
  return unevenness(ratios) < unevenness(differences);
}

/** A figure of a setting: the mean over its measured runs; of a time, the median. */
export function resultOf(setting, { name, isTime }) {
  const measured = measuredRuns(setting);
  const values = measured.map(run => run.figures[name]).filter(value => value !== null);
  const value = isTime ? censoredMedian(values, measured.length) : mean(values);
  return { value, error: isTime ? null : standardError(values), count: values.length };
}

// --- names ---------------------------------------------------------------------------------------

const lastParts = sweptKeys.map(({ name }) => name.slice(name.lastIndexOf(".") + 1));

/** The last part of a key's name, or all of it if that is ambiguous: n_head for model.n_head. */
export function keyName(k) {
  const isAmbiguous = lastParts.filter(name => name === lastParts[k]).length > 1;
  return printableName(isAmbiguous ? sweptKeys[k].name : lastParts[k]);
}

export const valueName = (run, k) => printableName(run.values[k]);

/** A value with its key, or alone if it explains itself: "n_head 4", "muon". */
export function keyAndValue(run, k) {
  const isWord = sweptKeys[k].axis === "names" && !/^(true|false|null|none|)$/i.test(run.values[k]);
  if (sweptKeys.length > 1 && isWord) return valueName(run, k);
  return `${keyName(k)} ${valueName(run, k)}`;
}

export function settingName(setting) {
  const [run] = runsOf[setting];
  if (data.isComparison) return runName(run);
  const parts = sweptKeys.map((_, k) => (hasSingleValue(setting, k) ? keyAndValue(run, k) : ""));
  return parts.filter(Boolean).join(", ") || "all seeds";
}

/** A star after the name of the setting that is declared best. */
export function bestMark(setting) {
  return setting !== null && setting === bestSetting ? " ★" : "";
}

export function runName(run) {
  if (data.isComparison) return printableName(run.name);
  const parts = sweptKeys.map((_, k) => keyAndValue(run, k));
  if (run.seed && hasSeveralSeeds && sweptKeys[0]?.name !== "seed") {
    parts.push(`seed ${printableName(run.seed)}`);
  }
  return parts.join(", ") || printableName(run.name);
}

/** How a run ended: "finished", "failed after 10 of 20 steps". */
export function outcome({ status, step, maxSteps }) {
  if (status === "finished") return status;
  if (!step) return `${status} before its first step`;
  if (!maxSteps) return `${status} after ${pluralize(step, "step")}`;
  return `${status} after ${formatCount(step)} of ${pluralize(maxSteps, "step")}`;
}

/** The name of a figure with its unit: "Throughput (tokens/s)". Bytes are written with their values. */
export function figureTitle({ title, unit }) {
  return unit && unit !== "B" ? `${title} (${unit})` : title;
}

/** Write a figure with its standard error, if that is known: 1.72 ± 0.01, 115k, 8.19 kB. */
export function formatFigure({ isLarge, unit }, value, error = null) {
  if (!isLarge || value === null) return formatWithError(value, error, 2);
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, value)) / 3));
  const size = 1000 ** power;
  const prefix = ["", "k", "M", "G"][power];
  const number = error
    ? formatWithError(value / size, error / size, 2)
    : formatCompact(Number((value / size).toPrecision(3)));
  return unit === "B" ? `${number} ${prefix}B` : number + prefix;
}

/** What a tooltip says about a mark of a chart, whose name may have a star; a line for each detail. */
export function describeMark(name, star, value, unit, details) {
  return [
    el("div", {}, el("b", {}, bdi(name)), star),
    el("div", { className: "value" }, el("b", {}, value), ` ${unit}`),
    ...details.map(text => el("div", {}, el("small", {}, text))),
  ];
}

// --- colors --------------------------------------------------------------------------------------

const state = {
  colorKey: 0, // index of the swept key that gives the colors
  pinned: null, // set of settings that stay highlighted
  near: null, // setting that is pointed at
};

/** The index of the value that gives a setting its color; null if its runs have several. */
function colorValue(setting) {
  if (!sweptKeys.length || !hasSingleValue(setting, state.colorKey)) return null;
  return runsOf[setting][0].valueIndices[state.colorKey];
}

/** The color and dash of lines: from pale to deep for numbers, distinct hues for names. */
function styleOf(value) {
  if (value === null) return { color: "var(--c1)", dash: DASHES[0] };
  const { axis, values } = sweptKeys[state.colorKey];
  if (axis === "names") {
    const dash = DASHES[Math.floor(value / HUES.length) % DASHES.length];
    return { color: `var(--${HUES[value % HUES.length]})`, dash };
  }
  // The part of the ramp that stands out from the background of each theme
  const share = values.length > 1 ? value / (values.length - 1) : 1;
  const rampColor = (from, to) => `rgb(${RAMP[Math.round(255 * (from + (to - from) * share))]})`;
  const color = `light-dark(${rampColor(0.66, 0.1)}, ${rampColor(0.42, 0.97)})`;
  return { color, dash: DASHES[0] };
}

/** An SVG `stroke-dasharray`. */
export function settingDash(setting) {
  return styleOf(colorValue(setting)).dash.svg;
}

/** Set the CSS custom property `--s<setting>` of each setting to its color. */
function assignColors() {
  for (const setting of allSettings) {
    const { color } = styleOf(colorValue(setting));
    document.documentElement.style.setProperty(`--s${setting}`, color);
  }
}

export function colorSwatch(setting) {
  const style = `--c: var(--s${setting})`;
  return el("span", { className: "swatch", style, "aria-hidden": "true" });
}

// --- highlight -----------------------------------------------------------------------------------

/** Highlight a set of settings, or those that are pinned if it is null: the others' marks fade. */
export function highlight(settings) {
  const highlighted = settings ?? state.pinned;
  document.body.classList.toggle("single", Boolean(highlighted));
  for (const mark of document.querySelectorAll("[data-group]")) {
    const groups = mark.getAttribute("data-group").split(" ").map(Number);
    mark.classList.toggle(
      "lit",
      groups.some(group => highlighted?.has(group)),
    );
  }
}

/** Highlight the setting of the mark that is pointed at, if there is one. */
export function highlightNear(mark) {
  const setting = mark?.group ?? null;
  if (setting === state.near) return;
  state.near = setting;
  highlight(setting === null ? null : new Set([setting]));
}

const joinSettings = settings => settings && [...settings].join(" ");

/** Keep a set of settings highlighted, or no longer if it was. */
export function togglePin(settings) {
  state.pinned = joinSettings(settings) === joinSettings(state.pinned) ? null : settings;
  showPinned();
}

export function showPinned() {
  const pinned = joinSettings(state.pinned);
  $("all").hidden = !state.pinned;
  for (const chip of $("chips").children) {
    chip.setAttribute("aria-pressed", String(chip.getAttribute("data-group") === pinned));
  }
  highlight(null);
}

/** Draw one button for each value of the key that gives the colors. */
export function drawLegend() {
  $("legend").hidden = allSettings.length < 2 || !sweptKeys.length;
  if ($("legend").hidden) return;
  const chips = sweptKeys[state.colorKey].values.map(legendChip);
  $("color-name").textContent = keyName(state.colorKey);
  $("chips").replaceChildren(...chips);
  addArrowKeys($("chips"), chips);
}

function legendChip(name, value) {
  const settings = new Set(allSettings.filter(setting => colorValue(setting) === value));
  const isOfBest = settings.has(bestSetting);
  const { color, dash } = styleOf(value);
  const attributes = {
    className: "chip",
    "data-group": joinSettings(settings),
    style: `--c: ${color}; --dash: ${dash.css}`,
    title: isOfBest ? "The best setting has this value." : "",
  };
  const text = bdi(shortenToWidth(printableName(name), 200));
  const chip = button(attributes, text, isOfBest ? " ★" : "");
  chip.onpointerenter = chip.onfocus = () => highlight(settings);
  chip.onpointerleave = chip.onblur = () => highlight(null);
  chip.onclick = () => togglePin(settings);
  return chip;
}

/**
 * Set up the choice of the key that gives the colors, and the keys that end highlighting; `redraw`
 * draws everything that has a setting's color.
 */
export function setUpLegend(redraw) {
  const valueCounts = sweptKeys.map(({ values }) => values.length);
  state.colorKey = Math.max(0, valueCounts.indexOf(Math.max(...valueCounts)));
  $("color").append(...sweptKeys.map((_, k) => el("option", { value: k }, keyName(k))));
  $("color").value = state.colorKey;
  $("color-choice").hidden = sweptKeys.length < 2;
  $("color-name").hidden = sweptKeys.length > 1;
  $("color").onchange = () => {
    state.colorKey = Number($("color").value);
    assignColors();
    redraw();
  };
  $("all").onclick = () => {
    togglePin(null);
    $("chips").querySelector("[tabindex='0']").focus();
  };
  addEventListener("keydown", event => {
    if (event.key === "Escape" && state.pinned) togglePin(null);
  });
  assignColors();
}
