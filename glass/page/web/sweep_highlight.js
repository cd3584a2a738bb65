/**
 * Colors of the settings of a sweep, the legend, and highlighting: the marks of other settings
 * fade.
 */

import { shortenToWidth } from "./chart_axes.js";
import { RAMP } from "./colors.js";
import { $, bdi, el } from "./dom.js";
import { printableName } from "./format.js";
import { allSettings, bestSetting, hasSingleValue, runsOf, sweptKeys } from "./sweep_data.js";
import { keyName } from "./sweep_names.js";
import { addArrowKeys } from "./tooltip.js";

/** Hues of values without an order, as names of CSS custom properties. */
const HUES = ["c1", "c2", "c3", "c4", "c6", "c7"];
/** When the hues are used up, they repeat with the next of these dashes. */
const DASHES = [
  { svg: "none", css: "solid" },
  { svg: "7 4", css: "dashed" },
  { svg: "2 3", css: "dotted" },
];
/**
 * Parts of the color ramp, from the lowest value to the highest, that stand out from the
 * background.
 */
/** @type {[number, number]} */
const LIGHT_THEME_RANGE = [0.66, 0.1];
/** @type {[number, number]} */
const DARK_THEME_RANGE = [0.42, 0.97];

/**
 * @type {{colorKey: number, pinned: Set<number> | null, near: number | null}} colorKey: index of
 *   the swept key that gives the colors; pinned: settings that stay highlighted; near: setting that
 *   is pointed at in a chart
 */
const state = { colorKey: 0, pinned: null, near: null };

/**
 * The value of a setting that gives its color.
 *
 * @param {number} setting
 * @returns {number | null} Index of the value; null if its runs have several.
 */
function colorValue(setting) {
  if (!sweptKeys.length || !hasSingleValue(setting, state.colorKey)) return null;
  return runsOf[setting][0].valueIndices[state.colorKey];
}

/**
 * Whether a value has a hue, because it has no place in an order.
 *
 * @param {number | null} value - Index of the value.
 * @returns {boolean}
 */
function hasHue(value) {
  return value !== null && sweptKeys[state.colorKey].axis === "names";
}

/** @param {number | null} value index of the value */
function dashOf(value) {
  return hasHue(value) ? DASHES[Math.floor(value / HUES.length) % DASHES.length] : DASHES[0];
}

/**
 * @param {number} setting
 * @returns {string} An SVG `stroke-dasharray`.
 */
export function settingDash(setting) {
  return dashOf(colorValue(setting)).svg;
}

/**
 * Color of a value: from pale to deep for numbers, distinct hues for names.
 *
 * @param {number | null} value - Index of the value.
 * @returns {string} A CSS color.
 */
function colorOf(value) {
  if (value === null) return "var(--c1)";
  if (hasHue(value)) return `var(--${HUES[value % HUES.length]})`;
  const valueCount = sweptKeys[state.colorKey].values.length;
  const share = valueCount > 1 ? value / (valueCount - 1) : 1;
  const rampColor = ([from, to]) => `rgb(${RAMP[Math.round(255 * (from + (to - from) * share))]})`;
  return `light-dark(${rampColor(LIGHT_THEME_RANGE)}, ${rampColor(DARK_THEME_RANGE)})`;
}

/** Set the CSS custom property `--s<setting>` of each setting to its color. */
function assignColors() {
  for (const setting of allSettings) {
    const color = colorOf(colorValue(setting));
    document.documentElement.style.setProperty(`--s${setting}`, color);
  }
}

/**
 * A small square in the color of a setting.
 *
 * @param {number} setting
 * @returns {HTMLElement}
 */
export function colorSwatch(setting) {
  return el("span", {
    className: "swatch",
    style: `--c: var(--s${setting})`,
    "aria-hidden": "true",
  });
}

/**
 * Highlight settings.
 *
 * @param {Set<number> | null} settings - Null: those that are pinned.
 */
export function highlight(settings) {
  const highlighted = settings ?? state.pinned;
  document.body.classList.toggle("single", Boolean(highlighted));
  for (const mark of document.querySelectorAll("[data-group]")) {
    const groups = mark.getAttribute("data-group").split(" ").map(Number);
    mark.classList.toggle(
      "lit",
      Boolean(highlighted) && groups.some(group => highlighted.has(group)),
    );
  }
}

/**
 * Highlight the setting of a mark that is pointed at.
 *
 * @param {{group?: number} | null} mark - Null when the pointer has left.
 */
export function highlightNear(mark) {
  const setting = mark?.group ?? null;
  if (setting === state.near) return;
  state.near = setting;
  highlight(setting === null ? null : new Set([setting]));
}

/** @param {Set<number> | null} settings */
function joinSettings(settings) {
  return settings && [...settings].join(" ");
}

/**
 * Keep settings highlighted, or no longer if they were.
 *
 * @param {Set<number> | null} settings
 */
export function togglePin(settings) {
  state.pinned = joinSettings(settings) === joinSettings(state.pinned) ? null : settings;
  showPinned();
}

/**
 * Keep the setting of a mark highlighted, or no longer if it was.
 *
 * @param {{group: number}} mark
 */
export function togglePinOfMark(mark) {
  togglePin(new Set([mark.group]));
}

/** Show which settings are pinned. */
export function showPinned() {
  $("all").hidden = !state.pinned;
  for (const chip of $("chips").children) {
    const isPinned =
      Boolean(state.pinned) && chip.getAttribute("data-group") === joinSettings(state.pinned);
    chip.setAttribute("aria-pressed", String(isPinned));
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
  addArrowKeys($("chips"), chips, 1, () => {});
}

/**
 * @param {string} name
 * @param {number} value - Index of the value.
 */
function legendChip(name, value) {
  const settings = new Set(allSettings.filter(setting => colorValue(setting) === value));
  const isOfBest = settings.has(bestSetting);
  const attributes = {
    type: "button",
    className: "chip",
    "aria-pressed": "false",
    "data-group": joinSettings(settings),
    style: `--c: ${colorOf(value)}; --dash: ${dashOf(value).css}`,
    title: isOfBest ? "The best setting has this value." : "",
  };
  const chip = el(
    "button",
    attributes,
    bdi(shortenToWidth(printableName(name), 200)),
    isOfBest ? " ★" : "",
  );
  chip.onpointerenter = chip.onfocus = () => highlight(settings);
  chip.onpointerleave = chip.onblur = () => highlight(null);
  chip.onclick = () => togglePin(settings);
  return chip;
}

/**
 * Set up the choice of the key that gives the colors, and the keys that end highlighting.
 *
 * @param {() => void} redraw - Draws everything that has a setting's color.
 */
export function setUpLegend(redraw) {
  state.colorKey = sweptKeys.reduce(
    (best, key, k) => (key.values.length > sweptKeys[best].values.length ? k : best),
    0,
  );
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
