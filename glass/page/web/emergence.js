/** The timeline of when heads emerged, below the loss curves. */

import { el } from "./dom.js";
import { formatCount } from "./format.js";
import { emergences } from "./head_metrics.js";
import { drawLineChart } from "./line_chart.js";
import { chooseHead, selection, steps } from "./page_state.js";
import { scoreLabel } from "./terms.js";
import { addArrowKeys, addTooltip } from "./tooltip.js";
import { metricSeries } from "./training.js";

const EXPLANATION =
  "A dot marks the first snapshot at which a head passed the threshold of a score. A hollow dot marks a " +
  "head that was lost again: its score fell below the threshold by more than two standard errors.";

/** Pixels between the rows of names within the lane of a score. */
const ROW_HEIGHT = 15;

/**
 * Draw the loss with a lane of emerged heads for each score.
 *
 * @param {HTMLElement} host
 * @param {string[]} scores - In the order of their lanes.
 * @param {(score: string) => string} scoreColor - Name of a CSS custom property.
 */
export function drawEmergence(host, scores, scoreColor) {
  /** @type {SVGElement[]} */
  const marks = [];
  const lanes = scores.filter(score => emergences.some(emergence => emergence.score === score));

  function drawLanes(svg, x, top, width) {
    let y = top + 12;
    for (const score of lanes) {
      const color = `var(--${scoreColor(score)})`;
      svg.append(
        el(
          "svg:text",
          { x: 4, y: y + 4, class: "lane", style: `fill: ${color}` },
          scoreLabel(score),
        ),
      );
      y += 18;
      const rowEnds = [];
      for (const emergence of emergences.filter(one => one.score === score)) {
        const labelWidth = 14 + 7 * emergence.name.length;
        const markX = Math.min(x(emergence.step), width - labelWidth);
        const row = freeRow(rowEnds, markX);
        rowEnds[row] = markX + labelWidth;
        const position = { stemX: x(emergence.step), markX, y: y + row * ROW_HEIGHT };
        marks.push(svg.appendChild(emergenceMark(emergence, position, color)));
      }
      y += ROW_HEIGHT * rowEnds.length + 8;
    }
    return y - top;
  }

  const focusedIndex = [...document.querySelectorAll("[data-emerged]")].indexOf(
    document.activeElement,
  );
  drawLineChart(host, {
    title: "Emergence of heads, and the loss (nats/token)",
    explanation: EXPLANATION,
    height: 200,
    currentStep: steps[selection.step],
    drawBelow: drawLanes,
    extraSteps: emergences.map(({ step }) => step),
    series: [
      metricSeries("train/loss", "training loss", "soft"),
      metricSeries("val/loss", "validation loss", "accent", true),
    ],
  });
  addKeyboard(host.querySelector("svg"), marks, focusedIndex);
}

/**
 * The first row of a lane in which a name at `x` overlaps no other.
 *
 * @param {number[]} rowEnds - Right end of the last name in each row.
 * @param {number} x
 * @returns {number}
 */
function freeRow(rowEnds, x) {
  const row = rowEnds.findIndex(end => end < x - 6);
  return row < 0 ? rowEnds.length : row;
}

/**
 * A dot with the head's name and a stem up to the loss; hollow if the head was lost again.
 *
 * @param {import("./head_metrics.js").Emergence} emergence
 * @param {{stemX: number, markX: number, y: number}} position
 * @param {string} color
 */
function emergenceMark(
  { score, name, layer, head, interval, lostStep },
  { stemX, markX, y },
  color,
) {
  const label = scoreLabel(score).toLowerCase();
  const text =
    lostStep === null
      ? `${label}, emerged ${interval}`
      : `${label}, emerged ${interval}; lost after step ${formatCount(lostStep)}`;
  const fill =
    lostStep === null
      ? `fill: ${color}`
      : `fill: var(--paper); stroke: ${color}; stroke-width: 1.5`;
  const mark = el(
    "svg:g",
    { "data-emerged": name, role: "button", "aria-label": `${name}: ${text}`, tabindex: -1 },
    el("svg:line", {
      x1: stemX,
      x2: stemX,
      y1: 10,
      y2: y,
      class: "stem",
      style: `stroke: ${color}`,
    }),
    el("svg:circle", { cx: markX, cy: y, r: 4, style: fill }),
    el("svg:text", { x: markX + 7, y: y + 4 }, name),
  );
  const nodes = () => [el("b", {}, name), el("div", {}, text)];
  return addTooltip(mark, nodes, () => chooseHead(layer, head));
}

/**
 * Let arrow keys read values on the chart itself and walk over the heads on a mark.
 *
 * @param {SVGElement | null} svg - Null if there is no chart.
 * @param {SVGElement[]} marks
 * @param {number} focusedIndex - focusedIndex of the mark that had the focus before the chart was
 *   drawn again; -1 if none had.
 */
function addKeyboard(svg, marks, focusedIndex) {
  if (!svg) return;
  const readValues = svg.onkeydown;
  addArrowKeys(svg, marks, 1, () => {}, Math.max(0, focusedIndex));
  const walkMarks = svg.onkeydown;
  svg.onkeydown = event =>
    event.target === svg ? readValues.call(svg, event) : walkMarks.call(svg, event);
  if (focusedIndex >= 0) marks[focusedIndex].focus();
}
