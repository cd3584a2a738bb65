/** Line charts over training steps or other numbers. */

import { $, el } from "../base/dom.js";
import { formatCompact } from "../base/format.js";
import { explainedTitle } from "../base/terms.js";
import {
  AXIS_NAME_HEIGHT,
  axisRange,
  BOTTOM_MARGIN,
  createFrame,
  createScale,
  drawAxes,
  placeEndLabels,
  readableTicks,
  setChartHeight,
  TOP_MARGIN,
  tickValues,
} from "./chart_axes.js";
import { Readout } from "./readout.js";

/** Losses before this share of the run are left out of the range of the y axis. */
const WARMUP_SHARE = 0.1;

/**
 * Draw line charts, each into a panel of `host` with its id, which is added if it is missing. All
 * panels are there before the first chart is drawn, because they share the width.
 *
 * @param {HTMLElement} host
 * @param {(LineChart & {id: string})[]} charts
 */
export function drawLineCharts(host, charts) {
  const panels = charts.map(({ id }) => $(id) ?? host.appendChild(el("div", { id })));
  charts.forEach((chart, k) => {
    panels[k].hidden = stepsOf(chart).length < 2;
  });
  charts.forEach((chart, k) => {
    drawLineChart(panels[k], chart);
  });
}

/** The steps at which any series has a value, and those that the x axis includes in any case. */
function stepsOf({ series, extraSteps = [] }) {
  const all = [...series.flatMap(({ xs }) => xs), ...extraSteps];
  return [...new Set(all)].sort((a, b) => a - b);
}

/**
 * Draw a line chart into `host`, or hide `host` if there are fewer than two steps.
 *
 * @param {HTMLElement} host
 * @param {LineChart} options
 */
export function drawLineChart(host, options) {
  const { title, height = 150, currentStep = null, describe } = options;
  const series = options.series.filter(({ xs }) => xs.length);
  const steps = stepsOf(options);
  host.hidden = steps.length < 2;
  if (host.hidden) return;

  // Scales and axes
  const bottom = height - BOTTOM_MARGIN;
  const [low, high] = valueRange(series, options);
  const y = createScale(low, high, bottom, TOP_MARGIN);
  const endLabels = placeEndLabels(host, labelsOf(series, y, low), bottom);
  const frame = createFrame(host, height, endLabels.width);
  const x = createStepScale(frame, steps, options);
  const xTicks = stepTicks(frame, x, steps, options);
  drawAxes(frame, y, tickValues(low, high, height / 38), xTicks, options.xName ?? "step");

  // Marks
  const { svg, plot } = frame;
  if (currentStep !== null && currentStep >= steps[0] && currentStep <= steps.at(-1)) {
    svg.append(verticalLine(x(currentStep), bottom, "now"));
  }
  svg.append(plot);
  for (const line of series) drawSeries(plot, line, x, y);
  endLabels.draw(frame);
  const cursor = svg.appendChild(verticalLine(0, bottom, "cursor"));
  const axisHeight = height + AXIS_NAME_HEIGHT;
  const heightBelow = options.drawBelow?.(svg, x, axisHeight, frame.width) ?? 0;
  setChartHeight(frame, axisHeight + heightBelow);

  // Title, legend, readout
  const legend = series.length > 1 && !describe ? series.map(legendKey) : [];
  host.replaceChildren(el("h3", {}, explainedTitle(title, options.explanation), ...legend), svg);
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `${title}; arrow keys read values`);
  new Readout(frame, cursor, { x, y }, steps, { ...options, series }).listen();
}

/** Return the lowest and the highest value of the y axis. */
function valueRange(series, { includes = [], yMax = Infinity }) {
  // Not Math.min(...values): a run has more values than a call can have arguments.
  const values = series.flatMap(({ ys }) => ys).filter(value => value !== null);
  const smallest = values.reduce((a, b) => Math.min(a, b), Infinity);
  const largest = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const low = Math.min(smallest, ...includes);
  if (!Number.isFinite(low)) return [0, 1];
  return axisRange(low, Math.max(Math.min(yMax, largest), ...includes));
}

/**
 * Return a loss curve without its steep beginning: its values from the last one on that is in the
 * first tenth of the steps. If losses are rare, the line would otherwise begin above the chart.
 */
export function valuesAfterWarmup(steps, values) {
  const first = steps.findLastIndex(step => step <= WARMUP_SHARE * steps.at(-1));
  return values.slice(Math.max(0, first));
}

/**
 * @param {ChartFrame} frame
 * @param {number[]} steps
 * @param {LineChart} options
 */
function createStepScale({ left, right }, steps, { xTicks, hasLogX }) {
  const margin = xTicks ? 14 : 0; // of marks
  const offset = hasLogX && !steps[0] ? steps[1] : 0; // a logarithmic axis may begin with 0
  const axis = createScale(
    steps[0] + offset,
    steps.at(-1) + offset,
    left + margin,
    right - margin,
    hasLogX,
  );
  return step => axis(step + offset);
}

/**
 * Return the ticks of the x axis that have room, as [pixels, text].
 *
 * @param {ChartFrame} frame
 * @param {(step: number) => number} x
 * @param {number[]} steps
 * @param {LineChart} options
 */
function stepTicks({ left, right }, x, steps, { xTicks }) {
  const width = right - left;
  const roundSteps = tickValues(steps[0], steps.at(-1), Math.max(1, width / 60));
  /** @type {[number, string][]} */
  const ticks = xTicks ?? roundSteps.map(step => [step, formatCompact(step)]);
  return readableTicks(ticks, x, width / ticks.length);
}

/** @returns {EndLabel[]} At `low` if a line has no values. */
function labelsOf(series, y, low) {
  return series
    .filter(({ label }) => label)
    .map(({ label, ys, group, color }) => {
      const lastValue = ys.findLast(value => value !== null) ?? low;
      return { text: label, y: Math.max(TOP_MARGIN, y(lastValue)), group, color };
    });
}

const legendKey = ({ name, color }) =>
  el("span", { className: "key", style: `--c: var(--${color})` }, name);

function verticalLine(x, bottom, className) {
  return el("svg:line", { x1: x, x2: x, y1: TOP_MARGIN, y2: bottom, class: className });
}

/** The attribute by which a page highlights the marks of a group. */
const marksOf = group => (group === undefined ? {} : { "data-group": group });

function drawSeries(plot, series, x, y) {
  const { xs, color, group, isJoined = true } = series;
  const dots = series.dots ?? [];
  if (!dots.length && series.errors?.some(Boolean)) plot.append(errorBand(series, x, y));
  if (isJoined) plot.append(linePath(series, x, y));
  if (xs.length === 1 && !dots.length) {
    plot.append(...dotMarks(series, { k: 0, color, group }, 3, x, y));
  }
  for (const dot of dots) plot.append(...dotMarks(series, dot, 4.5, x, y));
}

/** A line through the values of a series, with gaps where it has none. */
function linePath({ xs, ys, color, group, bold, faint, dash = "none" }, x, y) {
  const segments = xs.map((step, k) => {
    if (ys[k] === null) return "";
    const continues = k > 0 && ys[k - 1] !== null;
    return `${continues ? "L" : "M"}${x(step).toFixed(1)} ${y(ys[k]).toFixed(1)}`;
  });
  const style = `stroke: var(--${color}); stroke-dasharray: ${dash}`;
  let weight = "";
  if (bold) weight = "bold";
  else if (faint) weight = "faint";
  const attributes = { d: segments.join(""), class: `line ${weight}`, ...marksOf(group), style };
  return el("svg:path", attributes);
}

/** A marked value with its standard error. */
function dotMarks({ xs, ys, errors }, { k, color, group }, r, x, y) {
  const marks = marksOf(group);
  const cx = x(xs[k]);
  const value = ys[k];
  const error = errors?.[k] ?? 0;
  const ends = { x1: cx, x2: cx, y1: y(value - error), y2: y(value + error) };
  const circle = { cx, cy: y(value), r, ...marks, style: `fill: var(--${color})` };
  const line = { ...ends, class: "error", ...marks, style: `stroke: var(--${color})` };
  return [el("svg:line", line), el("svg:circle", circle)];
}

/** A band of one standard error on either side of a line. */
function errorBand({ xs, ys, errors, color, group }, x, y) {
  const measured = [...xs.keys()].filter(k => ys[k] !== null);
  const upper = measured.map(k => `${x(xs[k])} ${y(ys[k] + (errors[k] ?? 0))}`);
  const lower = measured.map(k => `${x(xs[k])} ${y(ys[k] - (errors[k] ?? 0))}`);
  const outline = `M${[...upper, ...lower.toReversed()].join("L")}Z`;
  const style = `fill: var(--${color})`;
  return el("svg:path", { d: outline, class: "band", ...marksOf(group), style });
}
