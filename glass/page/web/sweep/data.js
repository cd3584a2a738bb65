/**
 * The data of a sweep's page: its settings, their names and colors, and which are highlighted.
 *
 * A setting is a row of the table: a combination of swept values, whose runs differ only in their
 * seed, or one of several runs that are compared. Settings are numbered from 0, best first.
 */

import { $, bdi, button, el } from "../base/dom.js";
import { printableName } from "../base/format.js";
import { addArrowKeys, valueLine } from "../base/tooltip.js";
import { shortenToWidth } from "../charts/chart_axes.js";
import { RAMP } from "../charts/colors.js";

/** Colors of values without an order, as names of CSS custom properties. */
const HUES = ["c1", "c2", "c3", "c4", "c6", "c7", "c5"];
/** Ratio of the largest to the smallest value of a key from which its axis is logarithmic. */
const MIN_LOG_RATIO = 5;

export const data = JSON.parse($("data").textContent);

/** @type {SweepRun[]} */
export const runs = data.runs;

/** @type {number[]} */
export const allSettings = [...data.settings.keys()];

export const settingName = setting => printableName(data.settings[setting]);

export const runsOf = setting => runs.filter(run => run.setting === setting);

/** The runs whose results count: the finished ones, or in a comparison of runs each one so far. */
export const measuredRuns = setting =>
  runsOf(setting).filter(run => run.status === "finished" || data.isComparison);

/** @type {SweptKey[]} */
export const sweptKeys = data.keys.map(({ name, values }) => {
  const isNumeric = values.every(value => /\d/.test(value) && Number.isFinite(Number(value)));
  const levels = [...new Set(values)];
  if (isNumeric) levels.sort((a, b) => Number(a) - Number(b));
  const positionOf = value => (isNumeric ? Number(value) : levels.indexOf(value));
  const [first, last] = [positionOf(levels[0]), positionOf(levels.at(-1))];
  return {
    name: printableName(name),
    values,
    levels,
    positions: values.map(positionOf),
    ticks: levels.map(level => [positionOf(level), printableName(level)]),
    axis: !isNumeric ? "names" : first > 0 && last >= MIN_LOG_RATIO * first ? "log" : "linear",
  };
});

/** The index of the swept key with the most values; of the first such one. */
export function keyWithMostValues(keys = sweptKeys) {
  const counts = keys.map(({ levels }) => levels.length);
  return counts.indexOf(Math.max(...counts));
}

/** What a tooltip says about a value of a chart. */
export const describeMark = (name, value, detail = "") => [
  el("div", {}, el("b", {}, bdi(name))),
  valueLine(value),
  el("div", {}, el("small", {}, detail)),
];

// --- colors --------------------------------------------------------------------------------------

let colorKey = keyWithMostValues(); // -1 if only the seed is swept

/** The color of a level of the key that gives the colors: of numbers from pale to deep. */
function colorOf(level) {
  if (colorKey < 0) return "var(--c1)";
  const { axis, levels } = sweptKeys[colorKey];
  const index = levels.indexOf(level);
  if (axis === "names") return `var(--${HUES[index % HUES.length]})`;
  const share = levels.length > 1 ? index / (levels.length - 1) : 1;
  // The part of the ramp that stands out from the background of each theme
  const rampColor = (from, to) => `rgb(${RAMP[Math.round(255 * (from + (to - from) * share))]})`;
  return `light-dark(${rampColor(0.66, 0.1)}, ${rampColor(0.42, 0.97)})`;
}

/** Set the CSS custom property `--s<setting>` of each setting to its color. */
function assignColors() {
  for (const setting of allSettings) {
    const color = colorOf(sweptKeys[colorKey]?.values[setting]);
    document.documentElement.style.setProperty(`--s${setting}`, color);
  }
}

export const colorSwatch = setting =>
  el("span", { className: "swatch", style: `--c: var(--s${setting})`, "aria-hidden": "true" });

// --- highlight -----------------------------------------------------------------------------------

let pinned = ""; // settings that stay highlighted, as in an attribute `data-group`
let near = null; // setting that is pointed at

/** Highlight settings, or the pinned ones if there are none: the marks of the others fade. */
export function highlight(group) {
  const highlighted = String(group ?? pinned).split(" ");
  document.body.classList.toggle("single", highlighted[0] !== "");
  for (const mark of document.querySelectorAll("[data-group]")) {
    const groups = mark.getAttribute("data-group").split(" ");
    mark.classList.toggle(
      "lit",
      groups.some(setting => highlighted.includes(setting)),
    );
  }
}

/** Highlight the setting that is pointed at in a chart; null or undefined: none. */
export function highlightNear(setting = null) {
  if (setting === near) return;
  near = setting;
  highlight(setting);
}

/** Keep settings highlighted, or no longer if they were. */
export function togglePinnedSettings(group) {
  pinned = String(group) === pinned ? "" : String(group);
  showPinned();
}

export function showPinned() {
  $("all").hidden = !pinned;
  for (const chip of $("chips").children) {
    chip.setAttribute("aria-pressed", String(chip.getAttribute("data-group") === pinned));
  }
  highlight(null);
}

// --- legend --------------------------------------------------------------------------------------

/** Draw one button for each value of the key that gives the colors. */
function drawLegend() {
  const { levels, values } = sweptKeys[colorKey];
  const chips = levels.map(level => {
    const group = allSettings.filter(setting => values[setting] === level).join(" ");
    const attributes = { className: "chip", "data-group": group, style: `--c: ${colorOf(level)}` };
    const chip = button(attributes, bdi(shortenToWidth(printableName(level), 200)));
    chip.onpointerenter = chip.onfocus = () => highlight(group);
    chip.onpointerleave = chip.onblur = () => highlight(null);
    chip.onclick = () => togglePinnedSettings(group);
    return chip;
  });
  $("chips").replaceChildren(...chips);
  addArrowKeys($("chips"), chips);
}

/** Set up the legend, the choice of the key that gives the colors, and the end of highlighting. */
export function setUpLegend() {
  assignColors();
  $("legend").hidden = allSettings.length < 2 || !sweptKeys.length;
  if ($("legend").hidden) return;
  $("color").append(...sweptKeys.map(({ name }, k) => el("option", { value: k }, name)));
  $("color").value = colorKey;
  $("color").onchange = () => {
    colorKey = Number($("color").value);
    assignColors();
    drawLegend();
    showPinned();
  };
  $("all").onclick = () => {
    togglePinnedSettings("");
    $("chips").querySelector("[tabindex='0']").focus();
  };
  addEventListener("keydown", event => {
    if (event.key === "Escape" && pinned) togglePinnedSettings("");
  });
  drawLegend();
}
