/** Charts of results as dots against a value or a name, with error bars. */

import {
  AXIS_NAME_HEIGHT,
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

/**
 * A value is an outlier if it lies this many times as far above the best value as the median does.
 */
const OUTLIER_DISTANCE = 7;

/**
 * @typedef {object} Dot
 * @property {number | null} x - Value on the x axis; the dot is left out if unknown.
 * @property {number | null} y - Value on the y axis; the dot is left out if unknown.
 * @property {number | null} [error] - Standard error of `y`.
 * @property {number} group - Group of marks that the page can highlight.
 * @property {boolean} [small] - Whether the dot is one run rather than a mean.
 * @property {Node[]} nodes - What the tooltip says.
 */

/**
 * @typedef {object} DotAxis
 * @property {"log" | "linear" | "names"} type
 * @property {[number, string][]} ticks - Values and their texts.
 * @property {string} name - With its unit.
 * @property {boolean} [showsAllTicks] - Whether the axis extends over all ticks rather than over
 *   the dots.
 */

/**
 * @typedef {object} DotChartOptions
 * @property {string} title - With the unit of the y axis.
 * @property {Dot[]} dots
 * @property {{name: string, dots: Dot[]}[]} lines - Dots that a line joins; a name is written at
 *   its end.
 * @property {DotAxis} axis
 * @property {number | null} ringedGroup - Group that is marked by a ring.
 * @property {boolean} [showsOutliers] - Whether outliers are drawn to scale rather than at the
 *   upper edge.
 * @property {number} [height] - Pixels down to the tick labels of the x axis.
 * @property {(dot: Dot | null) => void} onNear - Called with the dot that is read out.
 * @property {(dot: Dot) => void} onPick - Called with the dot that is clicked.
 */

/**
 * Draw a chart of dots into `host`, or hide `host` if there are none.
 *
 * @param {HTMLElement} host
 * @param {DotChartOptions} options
 */
export function drawDotChart(host, options) {
  const { title, axis, lines, height = 230 } = options;
  const dots = options.dots.filter(({ x, y }) => isNumber(x) && isNumber(y));
  host.hidden = !dots.length;
  if (host.hidden) return;

  // Scales and frame
  const bottom = height - BOTTOM_MARGIN;
  const [low, high] = valueRange(dots, options.showsOutliers ?? false);
  const y = createScale(low, high, bottom, TOP_MARGIN);
  const clippedY = value => Math.max(TOP_MARGIN - 3, y(value));
  const endLabels = placeEndLabels(host, labelsOf(lines, clippedY), bottom);
  const frame = createFrame(host, height, endLabels.width);
  const { svg, plot } = frame;
  const x = createXScale(frame, axis, dots);
  const xTicks = readableTicks(frame, axis, x);
  drawAxes(frame, { y, yTicks: tickValues(low, high, 5), xTicks, xName: axis.name });
  setChartHeight(frame, height + AXIS_NAME_HEIGHT);

  // Lines
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", title);
  svg.setAttribute("data-axis", axis.type);
  svg.append(plot);
  for (const line of lines) {
    const points = line.dots.map(dot => `${x(dot.x)} ${clippedY(dot.y)}`);
    plot.append(
      el("svg:path", {
        class: "line connecting",
        "data-group": groupsOf(line.dots),
        d: `M${points.join("L")}`,
      }),
    );
  }
  endLabels.draw(frame);

  // Dots: single runs below means, the best setting on top
  const drawOrder = [...dots].sort(
    (a, b) => Number(b.small ?? 0) - Number(a.small ?? 0) || b.group - a.group,
  );
  const marks = drawOrder.map(dot => {
    const mark = dotMark(dot, {
      x,
      y,
      clippedY,
      high,
      isRinged: dot.group === options.ringedGroup && !dot.small,
    });
    const nodes = () => dot.nodes.map(node => node.cloneNode(true));
    const onPick = () => options.onPick(dot);
    addTooltip(mark, nodes, onPick, isNear => options.onNear(isNear ? dot : null));
    return plot.appendChild(mark);
  });
  addArrowKeys(svg, marks, 1, () => {}, marks.length - 1);
  host.replaceChildren(el("h3", {}, title), svg);
}

/** @param {number | null | undefined} value */
function isNumber(value) {
  return value !== null && value !== undefined;
}

/**
 * Range of the y axis. Outliers would flatten the differences between the others, so they are left
 * out unless they are asked for.
 *
 * @param {Dot[]} dots
 * @param {boolean} showsOutliers
 * @returns {[number, number]}
 */
function valueRange(dots, showsOutliers) {
  const values = dots.map(({ y }) => y).sort((a, b) => a - b);
  const best = values[0];
  const median = values[values.length >> 1];
  const cutsOutliers = median > best && !showsOutliers;
  const yMax = cutsOutliers ? best + OUTLIER_DISTANCE * (median - best) : Infinity;
  const smallest = Math.min(...dots.map(({ y, error }) => y - (error ?? 0)));
  const largest = Math.min(yMax, Math.max(...dots.map(({ y, error }) => y + (error ?? 0))));
  const margin = largest > smallest ? (largest - smallest) * 0.06 : Math.abs(smallest || 1) / 10;
  return [smallest - margin, largest + margin];
}

/**
 * @param {Dot[]} dots
 * @returns {string} A `data-group` attribute.
 */
function groupsOf(dots) {
  return [...new Set(dots.map(({ group }) => group))].join(" ");
}

/**
 * @param {DotChartOptions["lines"]} lines
 * @param {(value: number) => number} y
 * @returns {import("./chart_axes.js").EndLabel[]}
 */
function labelsOf(lines, y) {
  return lines
    .filter(({ name }) => name)
    .map(({ name, dots }) => ({
      text: name,
      y: y(dots.at(-1).y),
      group: groupsOf(dots),
      color: "quiet",
    }));
}

/**
 * @param {import("./chart_axes.js").Frame} frame
 * @param {DotAxis} axis
 * @param {Dot[]} dots
 * @returns {(value: number) => number}
 */
function createXScale({ left, right }, axis, dots) {
  if (axis.type === "names") return createScale(-0.5, axis.ticks.length - 0.5, left, right);
  const values = axis.showsAllTicks ? axis.ticks.map(([value]) => value) : dots.map(({ x }) => x);
  const [first, last] = [Math.min(...values), Math.max(...values)];
  if (last === first) return () => (left + right) / 2;
  return createScale(first, last, left + 14, right - 14, axis.type === "log");
}

/**
 * The ticks of the x axis whose texts do not touch.
 *
 * @param {import("./chart_axes.js").Frame} frame
 * @param {DotAxis} axis
 * @param {(value: number) => number} x
 * @returns {[number, string][]}
 */
function readableTicks({ left, right }, axis, x) {
  const maxWidth =
    axis.type === "names" ? Math.max(26, (right - left) / axis.ticks.length - 6) : 90;
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

/**
 * One dot with its error bar; an arrowhead if the value is above the chart.
 *
 * @param {Dot} dot
 * @param {object} chart
 * @param {(value: number) => number} chart.x
 * @param {(value: number) => number} chart.y
 * @param {(value: number) => number} chart.clippedY
 * @param {number} chart.high - Upper end of the y axis.
 * @param {boolean} chart.isRinged
 */
function dotMark(dot, { x, y, clippedY, high, isRinged }) {
  const [cx, cy] = [x(dot.x), y(dot.y)];
  const mark = el("svg:g", {
    class: "dot",
    "data-group": dot.group,
    role: "button",
    "aria-label": dot.nodes.map(node => node.textContent).join(", "),
    style: `color: var(--s${dot.group})`,
  });
  if (dot.error) {
    const [top, bottom] = [clippedY(dot.y + dot.error), y(dot.y - dot.error)];
    mark.append(el("svg:line", { x1: cx, x2: cx, y1: top, y2: bottom, class: "error" }));
  }
  if (dot.y > high) {
    const arrowhead = `M${cx - 5} ${TOP_MARGIN + 5}L${cx} ${TOP_MARGIN - 3}L${cx + 5} ${TOP_MARGIN + 5}Z`;
    mark.append(el("svg:path", { d: arrowhead, class: "outlier" }));
  } else {
    mark.append(
      el("svg:circle", { cx, cy, r: dot.small ? 2.6 : 5.5, class: dot.small ? "small" : "" }),
    );
  }
  if (isRinged) mark.append(el("svg:circle", { cx, cy, r: 9, class: "ring" }));
  return mark;
}
