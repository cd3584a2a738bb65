/**
 * Head composition as graphs: layers × heads, one graph each for keys, queries and values. A line
 * joins a component to a head above it, as thick as the share of the head's score that is lost
 * without the component.
 */

import { el } from "./dom.js";
import { formatWithError } from "./format.js";
import { headName, MIN_DEEP_LAYERS } from "./labels.js";
import { hasMlps } from "./page_state.js";
import { scoreLabel, term } from "./terms.js";
import { addArrowKeys, addTooltip } from "./tooltip.js";

/** The inputs of a head through which it composes with components below. */
const INPUTS = [
  { input: "queries", name: "Q-composition", color: "c2" },
  { input: "keys", name: "K-composition", color: "c1" },
  { input: "values", name: "V-composition", color: "c4" },
];
/** Smaller shares are not drawn. */
const MIN_SHARE = 0.05;
/** Shares of fewer standard errors are not drawn. */
const MIN_STANDARD_ERRORS = 2;
/** Smaller shares are not written beside their line. */
const MIN_LABELED_SHARE = 0.3;
/** Where a share may be written along its line, from 0 at the lower end to 1, the best first. */
const LABEL_POSITIONS = [0.5, 0.44, 0.56, 0.38, 0.62, 0.3, 0.7, 0.22, 0.78, 0.14, 0.86];
/** Least horizontal distance in pixels of a written share from anything else. */
const LABEL_WIDTH = 31;

const EXPLANATION =
  "A line shows the share of the upper head's score that is lost if its keys or queries are computed without what the " +
  "lower component wrote. For values, it is the share of what the head writes. Everything in between is computed " +
  "again (path patching). Shares do not add up: two components may carry the same information, or need each other.";

/** @typedef {import("./head_metrics.js").Composition} Composition */

/**
 * Draw the graphs into `host`.
 *
 * @param {HTMLElement} host
 * @param {object} options
 * @param {[number, number]} options.shape - Layers and heads.
 * @param {Composition[]} options.compositions
 * @param {string} options.title
 * @param {[number, number]} options.chosen - Layer and head.
 * @param {(layer: number, head: number) => void} options.choose - Called when a head is clicked.
 */
export function drawComposition(host, { shape, compositions, title, chosen, choose }) {
  const significant = compositions.filter(
    ({ share, error }) => share >= MIN_SHARE && share >= MIN_STANDARD_ERRORS * error,
  );
  const explanation = el("p", { className: "quiet" }, EXPLANATION);
  if (!significant.length) {
    const nothing = el("p", { className: "quiet" }, "No significant composition found.");
    host.replaceChildren(el("h3", {}, title), explanation, nothing);
    return;
  }
  const graphs = el("div", { className: "graphs" });
  host.replaceChildren(el("h3", {}, title), explanation, graphs);
  for (const { input, name, color } of INPUTS) {
    const graph = compositionGraph({
      shape,
      compositions: significant.filter(composition => composition.input === input),
      color,
      title: `${title}: ${name}`,
      chosen,
      choose,
    });
    graphs.append(
      el("div", { "data-input": input }, el("h4", {}, term(name), ` (through ${input})`), graph),
    );
  }
}

/**
 * Where the components are in a graph: one row for each layer with its MLP at the right end, the
 * highest layer on top, the embedding below.
 *
 * @typedef {object} Layout
 * @property {number[]} layers - That are shown.
 * @property {number} headCount
 * @property {number} width - In pixels, like all that follow.
 * @property {number} height
 * @property {number} rowHeight
 * @property {number} radius - Radius of a head.
 * @property {(column: number) => number} x - X of a head, or of the MLP in column `headCount`.
 * @property {(layer: number) => number} y - Y of a layer.
 * @property {[number, number]} embedding
 */

/**
 * @param {[number, number]} shape
 * @param {Composition[]} compositions
 * @returns {Layout}
 */
function createLayout([layerCount, headCount], compositions) {
  const isInvolved = layer =>
    compositions.some(
      ({ to, from }) => to[0] === layer || new RegExp(`^L${layer}(H|M)`).test(from),
    );
  const layers = [...Array(layerCount).keys()].filter(
    layer => layerCount <= MIN_DEEP_LAYERS || isInvolved(layer),
  );
  const width = Math.max(230, Math.min(460, 60 + 62 * (headCount + 1)));
  const rowHeight = layers.length < 8 ? 76 : 40;
  const top = 18;
  const x = column => 34 + ((column + 0.5) * (width - 44)) / (headCount + 1);
  const y = layer => top + (layers.length - 1 - layers.indexOf(layer)) * rowHeight;
  return {
    layers,
    headCount,
    width,
    height: top + layers.length * rowHeight + 22,
    rowHeight,
    radius: headCount > 9 ? 6 : 13,
    x,
    y,
    embedding: [x((headCount - 1) / 2), top + layers.length * rowHeight],
  };
}

/**
 * @param {Layout} layout
 * @param {string} name - Name of a component.
 * @returns {[number, number]} Its position.
 */
function positionOf(layout, name) {
  const [, layer, head] = /^L(\d+)(?:H(\d+)|MLP)$/.exec(name) ?? [];
  if (layer === undefined) return layout.embedding;
  const column = head === undefined ? layout.headCount : Number(head);
  return [layout.x(column), layout.y(Number(layer))];
}

/**
 * Draw one of the three graphs.
 *
 * @param {object} options
 * @param {[number, number]} options.shape - Layers and heads.
 * @param {Composition[]} options.compositions
 * @param {string} options.color - Name of a CSS custom property.
 * @param {string} options.title
 * @param {[number, number]} options.chosen - Layer and head.
 * @param {(layer: number, head: number) => void} options.choose
 * @returns {SVGElement}
 */
function compositionGraph({ shape, compositions, color, title, chosen, choose }) {
  const layout = createLayout(shape, compositions);
  const viewBox = `0 0 ${layout.width} ${layout.height}`;
  const svg = el("svg:svg", { viewBox, role: "group", "aria-label": title });

  // Lines, the thickest on top
  const obstacles = nodeObstacles(layout);
  const marks = [];
  const labels = [];
  for (const composition of [...compositions].sort((a, b) => a.share - b.share)) {
    const line = lineGeometry(layout, composition);
    marks.push(svg.appendChild(compositionMark(composition, line, color)));
    if (composition.share < MIN_LABELED_SHARE) continue;
    const [x, y] = labelPosition(line, obstacles);
    obstacles.push({ x, y, clearance: 14 });
    const text = `${(100 * composition.share).toFixed(0)}%`;
    labels.push(el("svg:text", { x, y: y + 4, class: "share", "text-anchor": "middle" }, text));
  }

  // Components on top of the lines, and what is written on top of all
  const connected = new Set(compositions.flatMap(({ to, from }) => [headName(...to), from]));
  svg.append(...componentNodes(layout, connected, chosen, choose), ...labels);
  addArrowKeys(svg, marks, 1, () => {}, 0);
  return svg;
}

/**
 * What a written share must not touch: its center, and the vertical distance to keep.
 *
 * @typedef {{x: number, y: number, clearance: number}} Obstacle
 */

/**
 * @param {Layout} layout
 * @returns {Obstacle[]}
 */
function nodeObstacles({ layers, headCount, radius, x, y, embedding }) {
  const heads = layers.flatMap(layer =>
    Array.from({ length: headCount }, (_, head) => ({
      x: x(head),
      y: y(layer),
      clearance: radius + 8,
    })),
  );
  const mlps = layers.map(layer => ({ x: x(headCount), y: y(layer), clearance: 18 }));
  return [...heads, ...mlps, { x: embedding[0], y: embedding[1], clearance: 18 }];
}

/**
 * A line from a component up to a head. Lines that pass over the layers in between are bent.
 *
 * @typedef {object} Line
 * @property {string} path
 * @property {(t: number) => [number, number]} pointAt - Position along the line, from 0 to 1.
 */

/**
 * @param {Layout} layout
 * @param {Composition} composition
 * @returns {Line}
 */
function lineGeometry(layout, { from, to }) {
  const [x1, yFrom] = positionOf(layout, from);
  const [x2, yTo] = positionOf(layout, headName(...to));
  const [y1, y2] = [yFrom - layout.radius, yTo + layout.radius];
  const passesLayers = x1 === x2 && yFrom - yTo > 1.5 * layout.rowHeight;
  const bend = passesLayers ? 26 : 0;
  const path = `M${x1} ${y1}Q${(x1 + x2) / 2 + bend} ${(yFrom + yTo) / 2} ${x2} ${y2}`;
  /** @type {Line["pointAt"]} */
  const pointAt = t => [x1 + t * (x2 - x1) + 2 * t * (1 - t) * bend, y1 + t * (y2 - y1)];
  return { path, pointAt };
}

/**
 * @param {Line} line
 * @param {Obstacle[]} obstacles
 * @returns {[number, number]} The first position that touches nothing, or the one that is farthest
 *   from everything.
 */
function labelPosition({ pointAt }, obstacles) {
  // At 1 or more, the label touches nothing.
  const clearance = t => {
    const [x, y] = pointAt(t);
    const distances = obstacles.map(obstacle =>
      Math.max(
        Math.abs(obstacle.x - x) / LABEL_WIDTH,
        Math.abs(obstacle.y - y) / obstacle.clearance,
      ),
    );
    return Math.min(...distances);
  };
  const free = LABEL_POSITIONS.find(t => clearance(t) >= 1);
  if (free !== undefined) return pointAt(free);
  return pointAt(LABEL_POSITIONS.reduce((best, t) => (clearance(t) > clearance(best) ? t : best)));
}

/**
 * @param {Composition} composition
 * @param {Line} line
 * @param {string} color - Name of a CSS custom property.
 */
function compositionMark(composition, { path }, color) {
  const thickness = (1 + 7 * Math.min(1, composition.share)).toFixed(1);
  const description = describeComposition(composition).map(node => node.textContent);
  const mark = el("svg:path", {
    d: path,
    class: "composition-line",
    tabindex: -1,
    role: "img",
    style: `stroke: var(--${color}); stroke-width: ${thickness}`,
    "aria-label": description.join(", "),
  });
  return addTooltip(mark, () => describeComposition(composition));
}

/**
 * What the tooltip says about a line.
 *
 * @param {Composition} composition
 * @returns {Node[]}
 */
function describeComposition({ score, to, input, from, share, error, directShare, directError }) {
  const percent = (value, standardError) => `${formatWithError(100 * value, 100 * standardError)}%`;
  const lost =
    input === "values" ? "what it writes" : `its ${scoreLabel(score).toLowerCase()} score`;
  const lines = [
    el("div", {}, `${from} → ${headName(...to)}, through its ${input}`),
    el(
      "div",
      { className: "value" },
      el("b", {}, percent(share, error)),
      ` of ${lost} is lost without it`,
    ),
  ];
  if (directShare !== null) {
    lines.push(
      el(
        "div",
        {},
        `${percent(directShare, directError)} directly, with nothing in between computed again`,
      ),
    );
  }
  return lines;
}

/**
 * The heads, MLPs and the embedding, with the names of the layers.
 *
 * @param {Layout} layout
 * @param {Set<string>} connected - Names of the components at the ends of lines.
 * @param {[number, number]} chosen - Layer and head.
 * @param {(layer: number, head: number) => void} choose
 * @returns {SVGElement[]}
 */
function componentNodes({ layers, headCount, radius, x, y, embedding }, connected, chosen, choose) {
  const nodes = layers.flatMap(layer => {
    const heads = Array.from({ length: headCount }, (_, head) => {
      const node = headNode(
        `H${head}`,
        x(head),
        y(layer),
        radius,
        connected.has(headName(layer, head)),
      );
      if (layer === chosen[0] && head === chosen[1]) node.classList.add("here");
      node.onclick = () => choose(layer, head);
      return node;
    });
    const label = el("svg:text", { x: 4, y: y(layer) + 4 }, `L${layer}`);
    const mlp = hasMlps
      ? [boxNode("MLP", x(headCount), y(layer), connected.has(`L${layer}MLP`))]
      : [];
    return [label, ...mlp, ...heads];
  });
  return [...nodes, boxNode("embedding", ...embedding, connected.has("embedding"))];
}

/**
 * @param {string} name
 * @param {number} x
 * @param {number} y
 * @param {number} radius
 * @param {boolean} isConnected
 */
function headNode(name, x, y, radius, isConnected) {
  const className = `node head-node${isConnected ? " connected" : ""}`;
  const node = el("svg:g", { class: className }, el("svg:circle", { cx: x, cy: y, r: radius }));
  if (radius > 8) node.append(el("svg:text", { x, y: y + 3.5, "text-anchor": "middle" }, name));
  return node;
}

/**
 * @param {string} name
 * @param {number} x
 * @param {number} y
 * @param {boolean} isConnected
 */
function boxNode(name, x, y, isConnected) {
  const width = 7.8 * name.length + 10;
  return el(
    "svg:g",
    { class: `node${isConnected ? " connected" : ""}` },
    el("svg:rect", { x: x - width / 2, y: y - 9, width, height: 18, rx: 3 }),
    el("svg:text", { x, y: y + 3.5, "text-anchor": "middle" }, name),
  );
}
