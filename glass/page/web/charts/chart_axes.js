/**
 * Scales, axes and labels that all charts share. Knows nothing about the data that is shown.
 *
 * An element with a `data-group` attribute belongs to a group of marks that a page can highlight.
 */

import { el } from "../base/dom.js";
import { formatCompact } from "../base/format.js";

// In pixels
/** Between the top of a chart and its plotting area. */
export const TOP_MARGIN = 10;
/** Below the plotting area, for the tick labels of the x axis. */
export const BOTTOM_MARGIN = 24;
/** Below the tick labels, for the name of the x axis. */
export const AXIS_NAME_HEIGHT = 14;
/** Left of the plotting area, for the tick labels of the y axis. */
const LEFT_MARGIN = 48;
/** Width below which lines have no labels at their ends, but a legend. */
const MIN_LABELED_WIDTH = 300;
/** Width of the longest label, with its line; if one is longer, there is only a legend. */
const MAX_LABEL_WIDTH = 190;
/** How far a label may be moved away from the end of its line. */
const MAX_LABEL_SHIFT = 48;
/** Between the baselines of two labels. */
const LABEL_SPACING = 13;

/** Round numbers between two values, at most about `maxCount` of them. */
export function tickValues(low, high, maxCount) {
  const minStride = (high - low) / maxCount || 1;
  const unit = 10 ** Math.floor(Math.log10(minStride));
  const stride = [1, 2, 5, 10].find(multiple => multiple * unit >= minStride) * unit;
  const ticks = [];
  for (let k = Math.ceil(low / stride - 1e-9); k * stride <= high + stride * 1e-9; k++) {
    ticks.push(Number((k * stride).toPrecision(12)));
  }
  return ticks;
}

/** The range of an axis, which is never empty: values that differ by rounding only are equal. */
export function axisRange(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low > 1e-9 * size) return [low, high];
  const margin = (size || 1) / 10;
  return [low - margin, low + margin];
}

/** Create a scale that maps values from `low` to `high` to pixels. */
export function createScale(low, high, lowPixel, highPixel, isLog = false) {
  const transform = isLog ? Math.log10 : Number;
  const start = transform(low);
  const span = transform(high) - start || 1;
  return value => lowPixel + ((transform(value) - start) / span) * (highPixel - lowPixel);
}

/** The ticks of the x axis, [value, text], at their pixels, without those that would touch others. */
export function readableTicks(ticks, x, maxWidth) {
  /** @type {[number, string][]} */
  const shown = [];
  let minX = -Infinity;
  for (const [value, name] of ticks) {
    const text = shortenToWidth(name, Math.max(40, maxWidth));
    const halfWidth = textWidth(text) / 2;
    if (x(value) - halfWidth <= minX) continue;
    shown.push([x(value), text]);
    minX = x(value) + halfWidth + 5;
  }
  return shown;
}

let frameCount = 0;

/**
 * Create an empty chart as wide as its host, with `labelWidth` right of the plotting area.
 *
 * @returns {ChartFrame}
 */
export function createFrame(host, height, labelWidth) {
  const width = Math.max(120, host.clientWidth || 320);
  const left = LEFT_MARGIN;
  const right = width - labelWidth;
  const bottom = height - BOTTOM_MARGIN;
  frameCount += 1;
  const id = `frame-${frameCount}`;
  // Lines and dots at the border of the plotting area are drawn in full.
  const area = el("svg:rect", {
    x: left - 10,
    y: TOP_MARGIN - 8,
    width: right - left + 20,
    height: bottom - TOP_MARGIN + 16,
  });
  const svg = el("svg:svg", {}, el("svg:clipPath", { id }, area));
  const plot = el("svg:g", { "clip-path": `url(#${id})` });
  return { svg, plot, width, height, left, right };
}

/** Set the height of the whole chart. */
export function setChartHeight({ svg, width }, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", String(height));
}

/**
 * Draw the grid lines and tick labels of the y axis, at the values `yTicks`, and the name of the x
 * axis and its tick labels, [pixels, text].
 */
export function drawAxes({ svg, width, height, left, right }, y, yTicks, xTicks, xName) {
  for (const tick of yTicks) {
    const label = { x: left - 6, y: y(tick) + 4, "text-anchor": "end" };
    svg.append(
      el("svg:line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "rule" }),
      el("svg:text", label, formatCompact(tick)),
    );
  }
  for (const [x, text] of xTicks) {
    const anchor = x > width - 24 ? "end" : "middle";
    svg.append(el("svg:text", { x, y: height - 7, "text-anchor": anchor }, text));
  }
  svg.append(el("svg:text", { x: right, y: height + 9, "text-anchor": "end" }, xName));
}

const measuringContext = document.createElement("canvas").getContext("2d");

/** Return the width of a chart's label, in pixels. */
function textWidth(text) {
  measuringContext.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  return measuringContext.measureText(text).width;
}

/** Shorten a chart's label with an ellipsis until it fits. */
export function shortenToWidth(text, maxWidth) {
  let shortened = text;
  for (let length = [...text].length; length > 1; length--) {
    if (textWidth(shortened) <= maxWidth) break;
    shortened = `${[...shortened].slice(0, length - 2).join("")}…`;
  }
  return shortened;
}

/**
 * Place labels at the right ends of lines, moved apart so that they do not overlap. If a label is
 * too long or would be far from its line, none is placed, and the chart needs a legend. Return the
 * width that they take, and a function that draws them.
 *
 * @param {HTMLElement} host
 * @param {EndLabel[]} labels
 * @param {number} bottom - Lower end of the plotting area.
 */
export function placeEndLabels(host, labels, bottom) {
  const placed = labels.map(label => ({ ...label, labelY: label.y })).sort((a, b) => a.y - b.y);
  let minY = TOP_MARGIN;
  for (const label of placed) {
    label.labelY = Math.max(label.y, minY);
    minY = label.labelY + LABEL_SPACING;
  }
  let maxY = bottom + 4;
  for (const label of placed.toReversed()) {
    label.labelY = Math.min(label.labelY, maxY);
    maxY = label.labelY - LABEL_SPACING;
  }
  const isNearLine = ({ y, labelY }) =>
    labelY >= TOP_MARGIN - 1 && Math.abs(labelY - y) < MAX_LABEL_SHIFT;
  const width = 18 + Math.max(...placed.map(({ text }) => textWidth(text)));
  const isShort = width <= Math.min(MAX_LABEL_WIDTH, host.clientWidth / 3);
  const fits = host.clientWidth > MIN_LABELED_WIDTH && isShort && placed.every(isNearLine);
  if (!placed.length || !fits) return { width: 14, draw: () => {} };
  return { width, draw: frame => drawEndLabels(frame, placed) };
}

function drawEndLabels({ svg, right }, labels) {
  for (const { text, y, labelY, group, color } of labels) {
    const marks = { "data-group": group };
    const d = `M${right + 2} ${y}L${right + 8} ${labelY}`;
    // Text is harder to see than a line of the same color.
    const fill = `fill: color-mix(in oklab, var(--${color}) 60%, var(--ink))`;
    const place = { x: right + 11, y: labelY + 4, style: fill };
    svg.append(
      el("svg:path", { d, class: "line", ...marks, style: `stroke: var(--${color})` }),
      el("svg:text", { ...place, ...marks }, text),
    );
  }
}
