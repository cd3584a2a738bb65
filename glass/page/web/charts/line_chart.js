/** Line charts over training steps or other numbers, with a readout for pointer and keyboard. */

import { el } from "../base/dom.js";
import { formatCompact, formatCount, formatWithError } from "../base/format.js";
import { addTooltip, announce, showTooltip } from "../base/tooltip.js";
import {
  AXIS_NAME_HEIGHT,
  axisRange,
  BOTTOM_MARGIN,
  chartPanel,
  createFrame,
  createScale,
  drawAxes,
  placeEndLabels,
  readableTicks,
  setChartHeight,
  TOP_MARGIN,
  tickValues,
} from "./chart_axes.js";

/** Pixels by which a faint line must be nearer to the pointer than another to be read out instead. */
const FAINT_LINE_PENALTY = 5;

/**
 * Draw line charts, each into a panel of `host` with its id. All panels are there before the first
 * chart is drawn, because they share the width.
 *
 * @param {HTMLElement} host
 * @param {(LineChart & {id: string})[]} charts
 */
export function drawLineCharts(host, charts) {
  const panels = charts.map(({ id }) => chartPanel(host, id));
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
  const { title, height = 150, currentStep = null, xName = "step", drawBelow, describe } = options;
  const series = options.series.filter(({ xs }) => xs.length);
  const steps = stepsOf(options);
  host.hidden = steps.length < 2;
  if (host.hidden) return;

  // Scales and frame
  const bottom = height - BOTTOM_MARGIN;
  const [low, high] = valueRange(series, options.includes ?? [], options.yMax ?? Infinity);
  const y = createScale(low, high, bottom, TOP_MARGIN);
  const endLabels = placeEndLabels(host, labelsOf(series, y, low), bottom);
  const frame = createFrame(host, height, endLabels.width);
  const { svg, plot, width, left, right } = frame;
  const [firstStep, lastStep] = [steps[0], steps.at(-1)];
  const margin = options.xTicks ? 14 : 0; // of marks
  const x = createScale(firstStep, lastStep, left + margin, right - margin, options.hasLogX);
  const stepTicks = tickValues(firstStep, lastStep, Math.max(1, (right - left) / 60));
  const xTicks = options.xTicks ?? stepTicks.map(step => [step, formatCompact(step)]);
  const shownTicks = readableTicks(xTicks, x, (right - left) / xTicks.length);
  drawAxes(frame, y, tickValues(low, high, height / 38), shownTicks, xName);

  // Marks
  if (currentStep !== null && currentStep >= firstStep && currentStep <= lastStep) {
    svg.append(verticalLine(x(currentStep), bottom, "now"));
  }
  svg.append(plot);
  for (const line of series) drawSeries(plot, line, x, y);
  endLabels.draw(frame);
  const cursor = svg.appendChild(verticalLine(0, bottom, "cursor"));
  const axisHeight = height + AXIS_NAME_HEIGHT;
  setChartHeight(frame, axisHeight + (drawBelow?.(svg, x, axisHeight, width) ?? 0));

  // Title, legend, readout
  const legend = series.length > 1 && !describe ? series.map(legendKey) : [];
  host.replaceChildren(el("h3", {}, heading(title, options.explanation), ...legend), svg);
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `${title}; arrow keys read values`);
  addReadout(frame, cursor, x, y, steps, { ...options, series });
}

function valueRange(series, includes, yMax) {
  // Not Math.min(...values): a run has more values than a call can have arguments.
  const values = series.flatMap(({ ys }) => ys).filter(value => value !== null);
  const smallest = values.reduce((a, b) => Math.min(a, b), Infinity);
  const largest = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const low = Math.min(smallest, ...includes);
  if (!Number.isFinite(low)) return [0, 1];
  return axisRange(low, Math.max(Math.min(yMax, largest), ...includes));
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

function heading(title, explanation) {
  if (!explanation) return title;
  // Not in the tab order: the chart itself is.
  const element = el("span", { className: "term", tabIndex: -1 }, title);
  return addTooltip(element, () => [el("div", {}, explanation)]);
}

const legendKey = ({ name, color }) =>
  el("span", { className: "key", style: `--c: var(--${color})` }, name);

function verticalLine(x, bottom, className) {
  return el("svg:line", { x1: x, x2: x, y1: TOP_MARGIN, y2: bottom, class: className });
}

/** The attribute by which a page highlights the marks of a group. */
const marksOf = group => (group === undefined ? {} : { "data-group": group });

function drawSeries(plot, series, x, y) {
  const { xs, ys, color, group } = series;
  const marks = marksOf(group);
  const segments = xs.map((step, k) => {
    if (ys[k] === null) return "";
    const continues = k > 0 && ys[k - 1] !== null;
    return `${continues ? "L" : "M"}${x(step).toFixed(1)} ${y(ys[k]).toFixed(1)}`;
  });
  const dots = series.dots ?? [];
  if (!dots.length && series.errors?.some(Boolean)) plot.append(errorBand(series, x, y));
  const weight = series.bold ? "bold" : series.faint ? "faint" : "";
  const style = `stroke: var(--${color}); stroke-dasharray: ${series.dash ?? "none"}`;
  if (series.isJoined ?? true) {
    plot.append(el("svg:path", { d: segments.join(""), class: `line ${weight}`, ...marks, style }));
  }
  if (xs.length === 1 && !dots.length)
    plot.append(...dotMarks(series, { k: 0, color, group }, 3, x, y));
  for (const dot of dots) plot.append(...dotMarks(series, dot, 4.5, x, y));
}

/** A marked value with its standard error. */
function dotMarks({ xs, ys, errors }, { k, color, group }, r, x, y) {
  const marks = marksOf(group);
  const [cx, value, error] = [x(xs[k]), ys[k], errors?.[k] ?? 0];
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

/**
 * Let pointer and arrow keys read values. Left and right move over the steps; if each line is
 * described on its own, up and down move over the lines.
 *
 * @param {ChartFrame} frame
 * @param {SVGElement} cursor
 * @param {(step: number) => number} x
 * @param {(value: number) => number} y
 * @param {number[]} steps
 * @param {LineChart} chart
 */
function addReadout({ svg, width, height }, cursor, x, y, steps, { series, describe, onNear }) {
  let stepIndex = steps.length - 1;
  let selected = series.at(-1);

  const nearestIndex = line => indexOfNearest(line.xs, steps[stepIndex]);
  const valueAtStep = line => line.ys[nearestIndex(line)] ?? -Infinity;

  function showReadout(isSpoken, chartY = height / 2) {
    const box = svg.getBoundingClientRect();
    const cursorX = x(steps[stepIndex]);
    cursor.setAttribute("x1", String(cursorX));
    cursor.setAttribute("x2", String(cursorX));
    cursor.setAttribute("class", "cursor on");
    const nodes = describe
      ? describe(selected, nearestIndex(selected))
      : describeStep(steps[stepIndex], series, nearestIndex);
    onNear?.(selected, nearestIndex(selected));
    showTooltip(nodes, box.left + (cursorX * box.width) / width, box.top + chartY);
    if (isSpoken) announce(nodes);
  }

  function hideReadout() {
    cursor.setAttribute("class", "cursor");
    showTooltip(null);
    onNear?.(null);
  }

  function pointAt(event) {
    const box = svg.getBoundingClientRect();
    const chartX = ((event.clientX - box.left) * width) / box.width;
    const chartY = ((event.clientY - box.top) * width) / box.width;
    if (chartY > height || event.target.closest("[data-emerged]")) return;
    stepIndex = indexOfNearest(steps.map(x), chartX);
    if (!describe) {
      showReadout(false);
      return;
    }
    const distance = line => {
      const dx = Math.abs(x(line.xs[nearestIndex(line)]) - x(steps[stepIndex]));
      const dy = Math.abs(y(valueAtStep(line)) - chartY);
      return dx + dy + (line.faint ? FAINT_LINE_PENALTY : 0);
    };
    selected = series.reduce((best, line) => (distance(line) < distance(best) ? line : best));
    showReadout(false, chartY);
  }

  function selectLine(offset) {
    const lines = series.filter(line => !line.faint || line === selected);
    lines.sort((a, b) => valueAtStep(a) - valueAtStep(b));
    selected = lines[lines.indexOf(selected) + offset] ?? selected;
  }

  function onKeyDown(event) {
    if (event.key === "Escape") hideReadout();
    if (event.target !== svg) return;
    const targets = {
      ArrowLeft: stepIndex - 1,
      ArrowRight: stepIndex + 1,
      Home: 0,
      End: steps.length - 1,
    };
    const target = targets[event.key];
    const lineOffset = describe ? { ArrowUp: 1, ArrowDown: -1 }[event.key] : undefined;
    if (target === undefined && lineOffset === undefined) return;
    event.preventDefault();
    if (lineOffset !== undefined) selectLine(lineOffset);
    else stepIndex = Math.max(0, Math.min(steps.length - 1, target));
    showReadout(true);
  }

  svg.onpointermove = pointAt;
  svg.onpointerdown = pointAt;
  svg.onpointerleave = hideReadout;
  svg.onblur = hideReadout;
  svg.onkeydown = onKeyDown;
}

function indexOfNearest(values, target) {
  const distance = k => Math.abs(values[k] - target);
  return [...values.keys()].reduce((best, k) => (distance(k) < distance(best) ? k : best), 0);
}

/** The values of all series at a step; one that was not measured there is read at its nearest. */
function describeStep(step, series, nearestIndex) {
  const rows = series.map(line => {
    const k = nearestIndex(line);
    const otherStep = line.xs[k] === step ? "" : `, at step ${formatCount(line.xs[k])}`;
    return el(
      "div",
      {},
      `${line.name} ${formatWithError(line.ys[k], line.errors?.[k])}${otherStep}`,
    );
  });
  return [el("b", {}, `step ${formatCount(step)}`), ...rows];
}
