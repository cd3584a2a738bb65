/** Charts of results as dots against a value or a name, with error bars. */

import {
  AXIS_NAME_HEIGHT,
  axisRange,
  BOTTOM_MARGIN,
  createFrame,
  createScale,
  drawAxes,
  placeEndLabels,
  setChartHeight,
  shortenToWidth,
  TOP_MARGIN,
  textWidth,
  tickValues,
} from "./chart_axes.js";
import { el } from "./dom.js";
import { addArrowKeys, addTooltip } from "./tooltip.js";

/** Pixels down to the tick labels of the x axis. */
const HEIGHT = 230;
/** An outlier lies this many times as far above the best value as the median does. */
const OUTLIER_DISTANCE = 7;

/**
 * Draw a chart of dots into `host`, or hide `host` if there are none.
 *
 * @param {HTMLElement} host
 * @param {DotChart} chart
 */
export function drawDotChart(host, chart) {
  const { title, axis, lines } = chart;
  const dots = chart.dots.filter(({ x, y }) => x !== null && y !== null);
  host.hidden = !dots.length;
  if (host.hidden) return;

  // Scales and frame
  const bottom = HEIGHT - BOTTOM_MARGIN;
  const [low, high] = valueRange(dots, chart.cutsOutliers);
  const y = createScale(low, high, bottom, TOP_MARGIN);
  const clippedY = value => Math.max(TOP_MARGIN - 3, y(value));
  const labels = lines.filter(({ name }) => name).map(line => labelOf(line, clippedY));
  const endLabels = placeEndLabels(host, labels, bottom);
  const frame = createFrame(host, HEIGHT, endLabels.width);
  const { svg, plot } = frame;
  const x = createXScale(frame, axis, dots);
  drawAxes(frame, y, tickValues(low, high, 5), readableTicks(frame, axis, x), axis.name);
  setChartHeight(frame, HEIGHT + AXIS_NAME_HEIGHT);

  // Lines
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", title);
  svg.setAttribute("data-axis", axis.type);
  svg.append(plot);
  for (const line of lines) {
    const d = `M${line.dots.map(dot => `${x(dot.x)} ${clippedY(dot.y)}`).join("L")}`;
    plot.append(el("svg:path", { class: "line connecting", "data-group": groupsOf(line.dots), d }));
  }
  endLabels.draw(frame);

  // Dots: single runs below means, the best setting on top
  const drawOrder = [...dots].sort(
    (a, b) => Number(b.small ?? 0) - Number(a.small ?? 0) || b.group - a.group,
  );
  const marks = drawOrder.map(dot => {
    const isRinged = dot.group === chart.ringedGroup && !dot.small;
    const mark = dotMark(dot, x(dot.x), y, dot.y > high, isRinged);
    const nodes = () => dot.nodes.map(node => node.cloneNode(true));
    const onToggle = isNear => chart.onNear(isNear ? dot : null);
    addTooltip(mark, nodes, () => chart.onPick(dot), onToggle);
    return plot.appendChild(mark);
  });
  addArrowKeys(svg, marks, 1, () => {}, marks.length - 1);
  host.replaceChildren(el("h3", {}, title), svg);
}

/** Range of the y axis. Outliers would flatten the differences between the others. */
function valueRange(dots, cutsOutliers) {
  const values = dots.map(dot => dot.y).sort((a, b) => a - b);
  const [best, median] = [values[0], values[values.length >> 1]];
  const isCut = cutsOutliers && median > best;
  const yMax = isCut ? best + OUTLIER_DISTANCE * (median - best) : Infinity;
  const [low, high] = axisRange(
    Math.min(...dots.map(({ y, error }) => y - (error ?? 0))),
    Math.min(yMax, Math.max(...dots.map(({ y, error }) => y + (error ?? 0)))),
  );
  const margin = (high - low) * 0.06;
  return [low - margin, high + margin];
}

/** The groups of dots, as a `data-group` attribute. */
function groupsOf(dots) {
  return [...new Set(dots.map(({ group }) => group))].join(" ");
}

/** @returns {EndLabel} */
function labelOf({ name, dots }, y) {
  return { text: name, y: y(dots.at(-1).y), group: groupsOf(dots), color: "quiet" };
}

function createXScale({ left, right }, { type, ticks }, dots) {
  if (type === "names") return createScale(-0.5, ticks.length - 0.5, left, right);
  const values = [...ticks.map(([value]) => value), ...dots.map(({ x }) => x)];
  const [first, last] = [Math.min(...values), Math.max(...values)];
  if (last === first) return () => (left + right) / 2;
  return createScale(first, last, left + 14, right - 14, type === "log");
}

/** The ticks of the x axis whose texts do not touch. */
function readableTicks({ left, right }, axis, x) {
  const nameWidth = Math.max(26, (right - left) / axis.ticks.length - 6);
  const maxWidth = axis.type === "names" ? nameWidth : 90;
  /** @type {[number, string][]} */
  const ticks = [];
  let minX = -Infinity;
  for (const [value, name] of axis.ticks) {
    const text = shortenToWidth(name, maxWidth);
    const halfWidth = textWidth(text) / 2;
    if (x(value) - halfWidth <= minX) continue;
    ticks.push([x(value), text]);
    minX = x(value) + halfWidth + 5;
  }
  return ticks;
}

/** One dot with its error bar; an arrowhead if the value is above the chart. */
function dotMark(dot, cx, y, isAbove, isRinged) {
  const cy = y(dot.y);
  const mark = el("svg:g", {
    class: "dot",
    "data-group": dot.group,
    role: "button",
    "aria-label": dot.nodes.map(node => node.textContent).join(", "),
    style: `color: var(--s${dot.group})`,
  });
  if (dot.error) {
    const top = Math.max(TOP_MARGIN - 3, y(dot.y + dot.error));
    const ends = { x1: cx, x2: cx, y1: top, y2: y(dot.y - dot.error) };
    mark.append(el("svg:line", { ...ends, class: "error" }));
  }
  if (isAbove) {
    const d = `M${cx - 5} ${TOP_MARGIN + 5}l5 -8l5 8Z`;
    mark.append(el("svg:path", { d, class: "outlier" }));
  } else {
    const size = dot.small ? { r: 2.6, class: "small" } : { r: 5.5 };
    mark.append(el("svg:circle", { cx, cy, ...size }));
  }
  if (isRinged) mark.append(el("svg:circle", { cx, cy, r: 9, class: "ring" }));
  return mark;
}
