/** The timeline of when heads emerged, below the loss curves. */

import { el } from "../base/dom.js";
import { formatCount } from "../base/format.js";
import { explanationOf, scoreLabel } from "../base/terms.js";
import { addArrowKeys, addTooltip } from "../base/tooltip.js";
import { drawLineChart } from "../charts/line_chart.js";
import { emergences } from "../state/head_metrics.js";
import { isRun, steps } from "../state/page_data.js";
import { chooseHead, selection } from "../state/selection.js";
import { copyingGainSeries, LOSS_AXIS, lossLines, STEP_AXIS } from "./training.js";

const EXPLANATION =
  "A dot marks the first snapshot at which a head passed the threshold of a score. A hollow dot marks a " +
  "head that was lost again: its score fell below the threshold by more than two standard errors.";

// In pixels: the name of a score, and the rows of heads below it.
const NAME_HEIGHT = 18;
const ROW_HEIGHT = 15;

/** Draw the loss with a lane of emerged heads for each score; `scoreColor` names its color in CSS. */
export function drawEmergence(host, scores, scoreColor) {
  const lanes = scores.filter(score => emergences.some(emergence => emergence.score === score));
  const marks = [];
  const curves = isRun
    ? {
        title: "Emergence of heads, and the loss (nats/token)",
        explanation: `${EXPLANATION} ${LOSS_AXIS}`,
        ...lossLines(),
      }
    : {
        title: "Emergence of heads, and the copying gain (nats)",
        explanation: `${EXPLANATION} ${explanationOf("copying gain")}`,
        includes: [0, 0.1],
        series: [copyingGainSeries()],
      };
  drawLineChart(host, {
    ...STEP_AXIS,
    ...curves,
    height: 200,
    currentStep: steps[selection.step],
    drawBelow: (svg, x, top, width) => {
      let y = top + 12;
      for (const score of lanes) {
        const lane = createLane(score, `var(--${scoreColor(score)})`, x, y, width);
        svg.append(lane.name);
        marks.push(...lane.marks);
        y += lane.height;
      }
      svg.append(...marks);
      return y - top;
    },
    extraSteps: emergences.map(({ step }) => step),
  });
  const svg = host.querySelector("svg");
  if (svg) addKeyboard(svg, marks);
}

/** Create the name of a score, and marks of its heads below: each in the first row with room. */
function createLane(score, color, x, y, width) {
  const attributes = { x: 4, y: y + 4, class: "lane", style: `fill: ${color}` };
  const name = el("svg:text", attributes, scoreLabel(score));
  const rowEnds = []; // right end of the last name in each row
  const ofScore = emergences.filter(emergence => emergence.score === score);
  const marks = ofScore.map(emergence => {
    const stemX = x(emergence.step);
    const labelWidth = 14 + 7 * emergence.name.length;
    const markX = Math.min(stemX, width - labelWidth);
    const freeRow = rowEnds.findIndex(end => end < markX - 6);
    const row = freeRow < 0 ? rowEnds.length : freeRow;
    rowEnds[row] = markX + labelWidth;
    return createMark(emergence, stemX, markX, y + NAME_HEIGHT + row * ROW_HEIGHT, color);
  });
  return { name, marks, height: NAME_HEIGHT + ROW_HEIGHT * rowEnds.length + 8 };
}

/** Say when a head emerged, and whether it was lost again. */
export function describeEmergence({ score, interval, lostStep }) {
  const lost = lostStep ? `; lost after step ${formatCount(lostStep)}` : "";
  return `${scoreLabel(score).toLowerCase()}, emerged ${interval}${lost}`;
}

/** Create a dot with the head's name and a stem up to the loss; hollow if the head was lost again. */
function createMark(emergence, stemX, markX, y, color) {
  const { name, layer, head, lostStep } = emergence;
  const text = describeEmergence(emergence);
  const style = lostStep
    ? `fill: var(--paper); stroke: ${color}; stroke-width: 1.5`
    : `fill: ${color}`;
  const stem = { x1: stemX, x2: stemX, y1: 10, y2: y, class: "stem", style: `stroke: ${color}` };
  const mark = el(
    "svg:g",
    { "data-emerged": name, role: "button", "aria-label": `${name}: ${text}`, tabindex: -1 },
    el("svg:line", stem),
    el("svg:circle", { cx: markX, cy: y, r: 4, style }),
    el("svg:text", { x: markX + 7, y: y + 4 }, name),
  );
  const nodes = () => [el("b", {}, name), el("div", {}, text)];
  return addTooltip(mark, nodes, () => chooseHead(layer, head));
}

/** Let arrow keys read values on the chart itself and walk over the heads on a mark. */
function addKeyboard(svg, marks) {
  const readValues = svg.onkeydown;
  addArrowKeys(svg, marks);
  const walkMarks = svg.onkeydown;
  svg.onkeydown = event =>
    event.target === svg ? readValues.call(svg, event) : walkMarks.call(svg, event);
}
