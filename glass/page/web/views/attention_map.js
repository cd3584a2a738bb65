/** The large map: attention weights of a head, or token effects of the whole model. */

import { $, el, isNarrow, labelToken } from "../base/dom.js";
import { formatNumber, formatWithError, pluralize, shortenToken } from "../base/format.js";
import { valueLine } from "../base/tooltip.js";
import { CellGrid } from "../charts/cell_grid.js";
import { colorIndex, drawColorBar, resolveColor } from "../charts/colors.js";
import { scoreNames } from "../state/head_metrics.js";
import { data, isDeep } from "../state/page_data.js";
import {
  currentProbe,
  currentStep,
  highlightToken,
  isOwnText,
  pinCell,
  selectedMaps,
  selection,
  togglePin,
} from "../state/selection.js";
import {
  cellReader,
  maxError,
  scaleTop,
  shownAttention,
  shownCells,
  shownSink,
} from "../state/shown_cells.js";
import { drawHeadGrid } from "./head_grid.js";
import { drawOverview } from "./heads.js";
import { drawCaption } from "./map_caption.js";
import { explainPinnedCell } from "./score_attribution.js";
import { revealToken } from "./text.js";
import { describeTokenEffect, fadeSmallEffect, outlineScoredCells } from "./token_effect.js";

const MAX_MAP_WIDTH = 900;
const MIN_MAP_WIDTH = 460;
const MAX_ZOOM_WIDTH = 620;
const ZOOM_TOKENS = 24; // tokens along a side of the enlarged part
/** What a bound is multiplied by, so that it holds after it and its value were rounded. */
const ROUNDED_BOUND = 1.13;
const MIN_LABELED_CELL = 8.5; // pixels of a cell that has room for its token's name

/** @type {CellGrid} */
let map = null;
/** @type {CellGrid} */
let zoomedMap = null;
let gridStep = null; // step of the grid of heads

/** Create the canvases of the map and of its enlarged part. */
export function setUpMaps() {
  map = new CellGrid($("map"), "attention map; arrow keys read its cells");
  zoomedMap = new CellGrid($("zoom-map"), "enlarged part of the map; arrow keys read cells");
}

/** Draw the map, its caption, the grid of heads and the explanation of the pinned cell. */
export function drawAttention() {
  const cells = shownCells();
  const { weightByValues, pinned } = selection;
  $("looking").classList.toggle("empty", !cells);
  if (!cells) return;
  drawSmallMaps();
  drawCaption(cells); // first: its height decides where the map begins
  map.draw(largeMapContent(cells));
  drawDeepModelGrid();
  explainPinnedCell();
  let unit = "attention weight";
  if (cells.signed) unit = "nats";
  else if (weightByValues) unit = "weight × ‖v W_O‖";
  drawColorBar($("bar"), unit, scaleTop(cells, weightByValues), cells.signed);
  highlightToken(selection.token);
  drawZoom(pinned ?? 0, pinned ?? 0);
}

/** Draw the small maps of all heads; while the reader types, after everything else. */
export function drawSmallMaps() {
  const cells = shownAttention();
  const draw = () => {
    if (cells === shownAttention()) drawHeadGrid(cells, selectedMaps());
  };
  const isOfOtherStep = gridStep !== currentStep();
  gridStep = currentStep();
  if (isOwnText() && !isOfOtherStep) setTimeout(draw);
  else draw();
}

/** Describe cell (i, j) for a tooltip; column T is the sink's. */
function describeCell(cells, i, j) {
  if (cells.signed) return describeTokenEffect(cells, i, j);
  const isSink = j === cells.T;
  const key = isSink ? ["sink"] : labelToken(cells, j);
  const attributes = { "data-query": i, "data-key": isSink ? "sink" : j };
  const tokens = el("div", attributes, ...labelToken(cells, i), " → ", ...key);
  if (isSink) {
    return [tokens, valueLine(formatNumber(shownSink()(i)), " on the learned sink logit")];
  }
  const maps = selectedMaps();
  const value = cellReader(cells, maps)(i, j);
  const bound = ROUNDED_BOUND * maxError(cells, maps, i, j);
  const text = formatWithError(value, bound, 2);
  return [tokens, valueLine(text, describeFactors(cells, maps, i, j))];
}

/** Say what a weight is the mean or the product of; "" for one weight. */
function describeFactors(cells, { layer, head, weightByValues }, i, j) {
  if (head === null) return `, mean of ${pluralize(cells.H, "head")}`;
  if (!weightByValues) return "";
  const norm = cells.norms[(layer * cells.H + head) * cells.T + j];
  return ` = ${formatNumber(cells.at(layer, head, i, j))} × ${formatNumber(norm)}`;
}

/** Return the map of the cells on display. @returns {GridContent} */
function mapContent(cells) {
  const { T, signed, firstToken } = cells;
  const read = cellReader(cells, selectedMaps());
  const top = scaleTop(cells, selection.weightByValues);
  const names = cells.tokens.map(token => shortenToken(token));
  const shade = signed ? fadeSmallEffect : Number;
  const readSink = shownSink();
  const color = (i, j) => {
    if (j === T && i >= firstToken) return colorIndex(readSink(i));
    return j > i || Math.min(i, j) < firstToken ? -1 : colorIndex(shade(read(i, j)) / top, signed);
  };
  return {
    rows: T,
    cols: T + (readSink ? 1 : 0),
    rowNames: names,
    colNames: readSink ? [...names, "sink"] : names,
    signed,
    color,
    describe: (i, j) => describeCell(cells, i, j),
    leave: () => highlightToken(null),
  };
}

function pointAtToken(i) {
  highlightToken(i);
  revealToken(i);
}

/** Return what the large map draws, with its outlines and what its cells do. */
function largeMapContent(cells) {
  const { period } = currentProbe();
  return {
    ...mapContent(cells),
    maxWidth: maxMapWidth(),
    drawOver: (context, box) => {
      if (period) outlineScoredCells(context, box, period);
      else drawPromptBorder(context, box, cells.T);
    },
    enter: (i, j) => {
      pointAtToken(i);
      drawZoom(i, j);
    },
    pick: pinCell,
  };
}

/** Enlarge the part of a map around a cell if the map is too small for the names of its tokens. */
function drawZoom(i, j) {
  const cells = shownCells();
  const width = Math.min($("map").clientWidth, maxMapWidth());
  const isLabeled = (width - 50) / cells.T >= MIN_LABELED_CELL;
  $("zoom").hidden = cells.T <= ZOOM_TOKENS || isLabeled;
  if ($("zoom").hidden) return;
  const firstOf = token => Math.min(cells.T - ZOOM_TOKENS, Math.max(0, token - ZOOM_TOKENS / 2));
  const top = firstOf(i);
  const left = firstOf(j);
  const content = mapContent(cells);
  const sinkNames = content.colNames.slice(cells.T);
  const keyOf = column => (column < ZOOM_TOKENS ? left + column : cells.T);
  $("zoom-title").textContent =
    `Queries ${top} to ${top + ZOOM_TOKENS - 1}, keys ${left} to ${left + ZOOM_TOKENS - 1}`;
  zoomedMap.draw({
    ...content,
    rows: ZOOM_TOKENS,
    cols: ZOOM_TOKENS + sinkNames.length,
    maxWidth: MAX_ZOOM_WIDTH,
    minNamedWidth: 0,
    rowNames: content.rowNames.slice(top, top + ZOOM_TOKENS),
    colNames: [...content.rowNames.slice(left, left + ZOOM_TOKENS), ...sinkNames],
    start: [i - top, j - left],
    color: (row, column) => content.color(top + row, keyOf(column)),
    describe: (row, column) => content.describe(top + row, keyOf(column)),
    enter: row => pointAtToken(top + row),
    pick: row => togglePin(top + row),
  });
}

/** Draw a line between the prompt and the tokens that the model generated. */
function drawPromptBorder(context, { left, cellWidth, cellHeight }, T) {
  const { promptTokens } = data;
  if (!(promptTokens > 0 && promptTokens < T)) return;
  const x = left + promptTokens * cellWidth;
  const y = promptTokens * cellHeight;
  context.strokeStyle = resolveColor("var(--accent)");
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(x, y);
  context.lineTo(x, T * cellHeight);
  context.stroke();
}

/** Return the map's largest width: all of it fits the first screen if its labels stay legible. */
function maxMapWidth() {
  if (isNarrow()) return MAX_MAP_WIDTH;
  const top = $("map").getBoundingClientRect().top + scrollY;
  return Math.min(MAX_MAP_WIDTH, Math.max(MIN_MAP_WIDTH, innerHeight - top - 4));
}

/** In a deep model: end the controls with the window, below the grid and one score of every head. */
function drawDeepModelGrid() {
  $("overview").hidden = !isDeep || !scoreNames.length;
  if (!isDeep) return;
  if (!$("overview").hidden) drawOverview($("overview-score").value);
  const grid = $("heads-grid");
  const top = grid.getBoundingClientRect().top + scrollY;
  const below = $("controls").offsetHeight + 24;
  const height = isNarrow() ? 420 : Math.max(260, innerHeight - top - below);
  grid.style.maxHeight = `${height}px`;
}
