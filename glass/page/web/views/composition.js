/**
 * Head composition as graphs: layers × heads, one graph each for keys, queries and values. A line
 * joins a component to a head above it, as thick as the share of the head's score that is lost
 * without the component.
 */

import { el, note } from "../base/dom.js";
import { formatCount, formatWithError, headName, parseHead } from "../base/format.js";
import { scoreLabel, term } from "../base/terms.js";
import { addArrowKeys, addTooltip, valueLine } from "../base/tooltip.js";
import { emit } from "../state/events.js";
import { compositionAt } from "../state/head_metrics.js";
import { H, hasMlps, hasSteps, isDeep, L, scoredSteps, steps } from "../state/page_data.js";
import { chooseHead, selection } from "../state/selection.js";

/** The inputs of a head through which it composes with components below. */
const INPUTS = [
  { input: "queries", name: "Q-composition", color: "c2" },
  { input: "keys", name: "K-composition", color: "c1" },
  { input: "values", name: "V-composition", color: "c4" },
];
const MIN_SHARE = 0.2; // as in the findings; smaller shares are drawn, without a number, if asked for
const MIN_STANDARD_ERRORS = 2; // shares of fewer standard errors are not drawn
/** Where a share may be written along its line, from 0 at the lower end to 1, the best first. */
const LABEL_POSITIONS = [0.5, 0.44, 0.56, 0.38, 0.62, 0.3, 0.7, 0.22, 0.78, 0.14, 0.86];
/** Least horizontal distance in pixels of a written share from anything else. */
const LABEL_WIDTH = 36;

const EXPLANATION =
  "A line shows the share of the upper head's score that is lost if its keys or queries are computed without what the " +
  "lower component wrote. For values, it is the share of what the head writes. Everything in between is computed " +
  "again (path patching). Shares do not add up: two components may carry the same information, or need each other. " +
  "Left out are shares below 20%, as in the findings, and the embedding, on which every head depends.";

/** Draw the graphs of the slider's step into `host`. */
export function drawComposition(host) {
  const step = steps[selection.step];
  const when = hasSteps ? ` at step ${formatCount(step)}` : "";
  const title = `Head composition (Q, K, V)${when}`;
  const compositions = compositionAt(scoredSteps.findLastIndex(scored => scored <= step));
  const significant = compositions.filter(
    ({ from, share, error }) =>
      share > MIN_STANDARD_ERRORS * error &&
      (selection.showAllComposition || (share >= MIN_SHARE && from !== "embedding")),
  );
  const checkbox = el("input", { type: "checkbox", checked: selection.showAllComposition });
  checkbox.onchange = () => {
    selection.showAllComposition = checkbox.checked;
    emit("draw");
    host.querySelector("input").focus();
  };
  const label = el("label", {}, checkbox, " Show all");
  host.replaceChildren(el("h3", {}, title), note(EXPLANATION), label);
  const graphs = [];
  const withoutGraph = [];
  for (const { input, name, color } of INPUTS) {
    const ofInput = significant.filter(composition => composition.input === input);
    const heading = el("h4", {}, term(name), ` (through ${input})`);
    const graph = createGraph(ofInput, color, `${title}: ${name}`);
    if (ofInput.length) graphs.push(el("div", {}, heading, graph));
    else withoutGraph.push(name);
  }
  host.append(el("div", { className: "graphs" }, ...graphs));
  if (withoutGraph.length) {
    host.append(note(`No share to draw: ${withoutGraph.join(", ")}.`));
  }
}

/**
 * Return where the components are in a graph, in pixels: one row for each layer with its MLP at the
 * right end, the highest layer on top, the embedding below. A deep model shows its involved layers.
 */
function createLayout(compositions) {
  const isInvolved = layer =>
    compositions.some(
      ({ to, from }) => to[0] === layer || new RegExp(`^L${layer}(H|M)`).test(from),
    );
  const layers = [...Array(L).keys()].filter(layer => !isDeep || isInvolved(layer));
  const width = Math.max(230, Math.min(460, 60 + 62 * (H + 1)));
  const rowHeight = layers.length < 8 ? 76 : 40;
  const top = 18;
  const x = column => 34 + ((column + 0.5) * (width - 44)) / (H + 1);
  const y = layer => top + (layers.length - 1 - layers.indexOf(layer)) * rowHeight;
  const positions = {}; // of components by name, as [x, y]
  for (const layer of layers) {
    if (hasMlps) positions[`L${layer}MLP`] = [x(H), y(layer)];
    for (let head = 0; head < H; head++) positions[headName(layer, head)] = [x(head), y(layer)];
  }
  const hasEmbedding = selection.showAllComposition;
  const rows = hasEmbedding ? layers.length : layers.length - 1;
  if (hasEmbedding) positions.embedding = [x((H - 1) / 2), top + rows * rowHeight];
  const height = top + rows * rowHeight + 22;
  return { layers, width, height, rowHeight, radius: H > 9 ? 6 : 13, y, positions };
}

function createGraph(compositions, color, title) {
  const layout = createLayout(compositions);
  const viewBox = `0 0 ${layout.width} ${layout.height}`;
  const svg = el("svg:svg", { viewBox, role: "group", "aria-label": title });

  // Lines, the thickest on top
  const obstacles = Object.entries(layout.positions).map(([name, [x, y]]) => ({
    x,
    y,
    clearance: parseHead(name) ? layout.radius + 8 : 18,
  }));
  const lines = [];
  const labels = [];
  for (const composition of [...compositions].sort((a, b) => a.share - b.share)) {
    const { path, pointAt } = lineGeometry(layout, composition);
    lines.push(createLine(composition, path, color));
    if (composition.share < MIN_SHARE) continue;
    const [x, y] = labelPosition(pointAt, obstacles);
    obstacles.push({ x, y, clearance: 14 });
    const text = `${(100 * composition.share).toFixed(0)}%`;
    labels.push(el("svg:text", { x, y: y + 4, class: "share", "text-anchor": "middle" }, text));
  }

  // Components on top of the lines, and what is written on top of all
  const connected = new Set(compositions.flatMap(({ to, from }) => [headName(...to), from]));
  const layerNames = layout.layers.map(layer =>
    el("svg:text", { x: 4, y: layout.y(layer) + 4 }, `L${layer}`),
  );
  const nodes = Object.keys(layout.positions).map(name =>
    createNode(name, layout, connected.has(name)),
  );
  svg.append(...lines, ...layerNames, ...nodes, ...labels);
  addArrowKeys(svg, lines);
  return svg;
}

/**
 * Return the path of a line and its point at a position from 0 to 1. A line that passes over the
 * layers in between is bent.
 */
function lineGeometry({ positions, radius, rowHeight }, { from, to }) {
  const [x1, yFrom] = positions[from];
  const [x2, yTo] = positions[headName(...to)];
  const [y1, y2] = [yFrom - radius, yTo + radius];
  const bend = x1 === x2 && yFrom - yTo > 1.5 * rowHeight ? 26 : 0;
  const path = `M${x1} ${y1}Q${(x1 + x2) / 2 + bend} ${(yFrom + yTo) / 2} ${x2} ${y2}`;
  const pointAt = t => [x1 + t * (x2 - x1) + 2 * t * (1 - t) * bend, y1 + t * (y2 - y1)];
  return { path, pointAt };
}

/** Return the first position that touches nothing, or the one that is farthest from everything. */
function labelPosition(pointAt, obstacles) {
  const clearanceAt = t => {
    const [x, y] = pointAt(t);
    const distances = obstacles.map(obstacle =>
      Math.max(
        Math.abs(obstacle.x - x) / LABEL_WIDTH,
        Math.abs(obstacle.y - y) / obstacle.clearance,
      ),
    );
    return Math.min(1, ...distances); // at 1, the label touches nothing
  };
  return pointAt(
    LABEL_POSITIONS.reduce((best, t) => (clearanceAt(t) > clearanceAt(best) ? t : best)),
  );
}

function createLine(composition, path, color) {
  const thickness = (1 + 7 * Math.min(1, composition.share)).toFixed(1);
  const description = describeComposition(composition).map(node => node.textContent);
  const line = el("svg:path", {
    d: path,
    class: "composition-line",
    tabindex: -1,
    role: "img",
    style: `stroke: var(--${color}); stroke-width: ${thickness}`,
    "aria-label": description.join(", "),
  });
  return addTooltip(line, () => describeComposition(composition));
}

function describeComposition({ score, to, input, from, share, error, directShare, directError }) {
  const percent = (value, standardError) => `${formatWithError(100 * value, 100 * standardError)}%`;
  const lost =
    input === "values" ? "what it writes" : `its ${scoreLabel(score).toLowerCase()} score`;
  const lines = [
    el("div", {}, `${from} → ${headName(...to)}, through its ${input}`),
    valueLine(percent(share, error), ` of ${lost} is lost without it`),
  ];
  if (directShare !== null) {
    const direct = percent(directShare, directError);
    lines.push(el("div", {}, `${direct} directly, with nothing in between computed again`));
  }
  return lines;
}

/** Create the circle of a head, which chooses it, or the box of another component. */
function createNode(name, { positions, radius }, isConnected) {
  const [x, y] = positions[name];
  const className = `node${isConnected ? " connected" : ""}`;
  const writeName = text => el("svg:text", { x, y: y + 3.5, "text-anchor": "middle" }, text);
  if (!parseHead(name)) {
    const text = name.replace(/^L\d+/, "");
    const width = 7.8 * text.length + 10;
    const box = { x: x - width / 2, y: y - 9, width, height: 18, rx: 3 };
    return el("svg:g", { class: className }, el("svg:rect", box), writeName(text));
  }
  const node = el("svg:g", { class: `${className} head-node` });
  node.append(el("svg:circle", { cx: x, cy: y, r: radius }));
  const [layer, head] = parseHead(name);
  if (radius > 8) node.append(writeName(`H${head}`));
  if (layer === selection.layer && head === selection.head) node.classList.add("here");
  node.onclick = () => chooseHead(layer, head);
  return node;
}
