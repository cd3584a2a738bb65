/** The readout of a line chart: a cursor, for pointer and keyboard, and the values at it. */

import { el } from "../base/dom.js";
import { formatCount, formatWithError } from "../base/format.js";
import { announce, showTooltip } from "../base/tooltip.js";

/** Pixels by which a faint line must be nearer to the pointer than another to be read out instead. */
const FAINT_LINE_PENALTY = 5;

export class Readout {
  /**
   * @param {ChartFrame} frame
   * @param {SVGElement} cursor - Its vertical line.
   * @param {{x: (step: number) => number, y: (value: number) => number}} scales
   * @param {number[]} steps
   * @param {LineChart} chart - All its series have values.
   */
  constructor(frame, cursor, { x, y }, steps, chart) {
    this.frame = frame;
    this.cursor = cursor;
    this.x = x;
    this.y = y;
    this.steps = steps;
    this.chart = chart;
    this.stepIndex = steps.length - 1;
    this.selected = chart.series.at(-1); // line that is read out, if each value is described by itself
  }

  /** Let pointer and arrow keys read values: left and right by steps, up and down by lines. */
  listen() {
    const { svg } = this.frame;
    svg.onpointermove = event => this.#pointAt(event);
    svg.onpointerdown = svg.onpointermove;
    svg.onpointerleave = () => this.#hide();
    svg.onblur = () => this.#hide();
    svg.onkeydown = event => this.#onKey(event);
  }

  /** Return the index of a line's value that is nearest to the step at the cursor. */
  #indexIn = line => indexOfNearest(line.xs, this.steps[this.stepIndex]);

  #valueOf = line => line.ys[this.#indexIn(line)] ?? -Infinity;

  #show(isSpoken, chartY = this.frame.height / 2) {
    const { cursor, selected } = this;
    const { svg, width } = this.frame;
    const { series, describe, onNear } = this.chart;
    const step = this.steps[this.stepIndex];
    const box = svg.getBoundingClientRect();
    const cursorX = this.x(step);
    cursor.setAttribute("x1", String(cursorX));
    cursor.setAttribute("x2", String(cursorX));
    cursor.setAttribute("class", "cursor on");
    const nodes = describe
      ? describe(selected, this.#indexIn(selected))
      : describeStep(step, series, this.#indexIn);
    onNear?.(selected, this.#indexIn(selected));
    showTooltip(nodes, box.left + (cursorX * box.width) / width, box.top + chartY);
    if (isSpoken) announce(nodes);
  }

  #hide() {
    this.cursor.setAttribute("class", "cursor");
    showTooltip(null);
    this.chart.onNear?.(null);
  }

  /** Read out the step at the pointer, and the line nearest to it. */
  #pointAt(event) {
    const { svg, width, height } = this.frame;
    const box = svg.getBoundingClientRect();
    const chartX = ((event.clientX - box.left) * width) / box.width;
    const chartY = ((event.clientY - box.top) * width) / box.width;
    if (chartY > height || event.target.closest("[data-emerged]")) return;
    this.stepIndex = indexOfNearest(this.steps.map(this.x), chartX);
    if (!this.chart.describe) {
      this.#show(false);
      return;
    }
    const distance = line => this.#distance(line, chartY);
    this.selected = this.chart.series.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    this.#show(false, chartY);
  }

  #distance(line, chartY) {
    const dx = Math.abs(this.x(line.xs[this.#indexIn(line)]) - this.x(this.steps[this.stepIndex]));
    const dy = Math.abs(this.y(this.#valueOf(line)) - chartY);
    return dx + dy + (line.faint ? FAINT_LINE_PENALTY : 0);
  }

  #onKey(event) {
    if (event.key === "Escape") this.#hide();
    if (event.target !== this.frame.svg) return;
    const last = this.steps.length - 1;
    const target = {
      ArrowLeft: Math.max(0, this.stepIndex - 1),
      ArrowRight: Math.min(last, this.stepIndex + 1),
      Home: 0,
      End: last,
    }[event.key];
    const lineOffset = this.chart.describe ? { ArrowUp: 1, ArrowDown: -1 }[event.key] : undefined;
    if (target !== undefined) this.stepIndex = target;
    else if (lineOffset !== undefined) this.#selectLine(lineOffset);
    else return;
    event.preventDefault();
    this.#show(true);
  }

  /** Select the line above (1) or below (-1) at the cursor. */
  #selectLine(offset) {
    const lines = this.chart.series.filter(line => !line.faint || line === this.selected);
    lines.sort((a, b) => this.#valueOf(a) - this.#valueOf(b));
    this.selected = lines[lines.indexOf(this.selected) + offset] ?? this.selected;
  }
}

function indexOfNearest(values, target) {
  const distance = k => Math.abs(values[k] - target);
  return [...values.keys()].reduce((best, k) => (distance(k) < distance(best) ? k : best), 0);
}

/** The values of all series at a step; one that was not measured there is read at its nearest. */
function describeStep(step, series, indexIn) {
  const rows = series.map(line => {
    const k = indexIn(line);
    const otherStep = line.xs[k] === step ? "" : `, at step ${formatCount(line.xs[k])}`;
    const value = formatWithError(line.ys[k], line.errors?.[k]);
    return el("div", {}, `${line.name} ${value}${otherStep}`);
  });
  return [el("b", {}, `step ${formatCount(step)}`), ...rows];
}
