/** The large map: attention weights of a head, or token effects of the whole model. */

import { cellReader, maxError, scaleTop } from "./attention_data.js";
import { createCellGrid } from "./cell_grid.js";
import { colorIndex, drawColorBar, resolveColor } from "./colors.js";
import { $, el } from "./dom.js";
import { formatNumber, formatWithBound, pluralize, shortenToken } from "./format.js";
import { drawHeadGrid } from "./head_grid.js";
import { scoreNames } from "./head_metrics.js";
import { drawOverview } from "./heads.js";
import { labelToken, MIN_DEEP_LAYERS } from "./labels.js";
import { drawCaption } from "./map_caption.js";
import {
  currentProbe,
  currentStep,
  data,
  highlightToken,
  isOwnText,
  L,
  pinCell,
  selectedMaps,
  selection,
  togglePin,
} from "./page_state.js";
import { explainPinnedCell } from "./score_attribution_view.js";
import { shownAttention, shownSink, shownView } from "./shown_view.js";
import { revealToken } from "./text_view.js";
import { describeTokenEffect, fadeSmallEffect, outlineScoredCells } from "./token_effect.js";

const MAX_MAP_WIDTH = 900;
const MIN_MAP_WIDTH = 460;
const NARROW_WINDOW = 1000; // below this width the page has one column
const ZOOM_TOKENS = 24; // tokens along a side of the enlarged part
const MIN_LABELED_CELL = 8.5; // pixels of a cell that has room for its token's name

let drawMap = null;
let drawZoomedMap = null;
let gridStep = null; // step of the grid of heads

/** Create the canvases of the map and of its enlarged part. */
export function setUpMaps() {
  drawMap = createCellGrid($("map"), "attention map; arrow keys read its cells");
  drawZoomedMap = createCellGrid($("zoom-map"), "enlarged part of the map; arrow keys read cells");
}

/** Draw the map, its caption, the grid of heads and the explanation of the pinned cell. */
export function drawAttention() {
  const view = shownView();
  const { weightByValues, pinned } = selection;
  $("looking").classList.toggle("empty", !view);
  if (!view) return;
  drawSmallMaps();
  drawCaption(view); // first: its height decides where the map begins
  drawMap(describeMap(view));
  drawDeepModelGrid();
  explainPinnedCell();
  let unit = "attention weight";
  if (view.signed) unit = "nats";
  else if (weightByValues) unit = "weight × ‖v W_O‖";
  drawColorBar($("bar"), unit, scaleTop(view, weightByValues), view.signed);
  highlightToken(selection.token);
  drawZoom(pinned ?? 0, pinned ?? 0);
}

/** Draw the small maps of all heads; while the reader types, after everything else. */
export function drawSmallMaps() {
  const view = shownAttention();
  const isOfOtherStep = gridStep !== currentStep();
  gridStep = currentStep();
  if (!isOwnText() || isOfOtherStep) {
    drawHeadGrid(view, selectedMaps());
    return;
  }
  setTimeout(() => {
    if (view === shownAttention()) drawHeadGrid(view, selectedMaps());
  });
}

/** Describe cell (i, j) for a tooltip; column T is the sink's. */
function describeCell(view, i, j) {
  if (j === view.T) return describeSinkCell(view, i);
  if (view.signed) return describeTokenEffect(view, i, j);
  const maps = selectedMaps();
  const value = cellReader(view, maps)(i, j);
  const bound = maxError(view, maps, i, j);
  const nodes = [el("b", {}, bound > 0 ? formatWithBound(value, bound) : formatNumber(value))];
  if (maps.head === null) nodes.push(`, mean of ${pluralize(view.H, "head")}`);
  else if (maps.weightByValues) {
    const weight = view.at(maps.layer, maps.head, i, j);
    const norm = view.norms[(maps.layer * view.H + maps.head) * view.T + j];
    nodes.push(` = ${formatNumber(weight)} × ${formatNumber(norm)}`);
  }
  return [
    el(
      "div",
      { "data-query": i, "data-key": j },
      ...labelToken(view, i),
      " → ",
      ...labelToken(view, j),
    ),
    el("div", { className: "value" }, ...nodes),
  ];
}

/** Describe the weight of query i on the sink logit for a tooltip. */
function describeSinkCell(view, i) {
  const value = formatNumber(shownSink()(i));
  return [
    el("div", { "data-query": i, "data-key": "sink" }, ...labelToken(view, i), " → sink"),
    el("div", { className: "value" }, el("b", {}, value), " on the learned sink logit"),
  ];
}

/** Return what `createCellGrid` draws of a view. */
function describeCells(view) {
  const read = cellReader(view, selectedMaps());
  const top = scaleTop(view, selection.weightByValues);
  const names = view.tokens.map(token => shortenToken(token));
  const first = view.from ?? 0;
  const shade = view.signed ? fadeSmallEffect : Number;
  const readSink = shownSink();
  const level = (i, j) => {
    if (j === view.T && i >= first) return colorIndex(readSink(i));
    return j > i || Math.min(i, j) < first ? -1 : colorIndex(shade(read(i, j)) / top, view.signed);
  };
  return {
    rows: view.T,
    cols: view.T + (readSink ? 1 : 0),
    most: MAX_MAP_WIDTH,
    rowNames: names,
    colNames: readSink ? [...names, "sink"] : names,
    signed: view.signed,
    level,
    tell: (i, j) => describeCell(view, i, j),
  };
}

/** Return what the large map draws, with its outlines and what its cells do. */
function describeMap(view) {
  const { period } = currentProbe();
  return {
    ...describeCells(view),
    most: mapWidth(),
    over: (context, box) => {
      if (period) outlineScoredCells(context, box, period);
      else drawPromptBorder(context, box, view.T);
    },
    enter: (i, j) => {
      highlightToken(i);
      revealToken(i);
      drawZoom(i, j);
    },
    leave: () => highlightToken(null),
    pick: pinCell,
  };
}

/** Enlarge the part of a map around a cell if the map is too small for the names of its tokens. */
function drawZoom(i, j) {
  const view = shownView();
  const width = Math.min($("map").clientWidth, mapWidth());
  const isLabeled = (width - 50) / view.T >= MIN_LABELED_CELL;
  $("zoom").hidden = view.T <= ZOOM_TOKENS || isLabeled;
  if ($("zoom").hidden) return;
  const firstOf = token => Math.min(view.T - ZOOM_TOKENS, Math.max(0, token - ZOOM_TOKENS / 2));
  const top = firstOf(i);
  const left = firstOf(j);
  const cells = describeCells(view);
  const namesFrom = first => cells.rowNames.slice(first, first + ZOOM_TOKENS);
  const sinkNames = cells.colNames.slice(view.T);
  const keyOf = column => (column < ZOOM_TOKENS ? left + column : view.T);
  $("zoom-title").textContent =
    `Queries ${top} to ${top + ZOOM_TOKENS - 1}, keys ${left} to ${left + ZOOM_TOKENS - 1}`;
  drawZoomedMap({
    ...cells,
    rows: ZOOM_TOKENS,
    cols: ZOOM_TOKENS + sinkNames.length,
    most: 620,
    least: 0,
    rowNames: namesFrom(top),
    colNames: [...namesFrom(left), ...sinkNames],
    start: [i - top, j - left],
    level: (row, column) => cells.level(top + row, keyOf(column)),
    tell: (row, column) => cells.tell(top + row, keyOf(column)),
    enter: row => {
      highlightToken(top + row);
      revealToken(top + row);
    },
    leave: () => highlightToken(null),
    pick: row => togglePin(top + row),
  });
}

/** Draw a line between the prompt and the tokens that the model generated. */
function drawPromptBorder(context, { left, cell, high }, T) {
  const { promptTokens } = data;
  if (!(promptTokens > 0 && promptTokens < T)) return;
  context.strokeStyle = resolveColor("var(--accent)");
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(left, promptTokens * high);
  context.lineTo(left + promptTokens * cell, promptTokens * high);
  context.lineTo(left + promptTokens * cell, T * high);
  context.stroke();
}

/** Return the map's largest width: all of it fits the first screen if its labels stay legible. */
function mapWidth() {
  if (innerWidth < NARROW_WINDOW) return MAX_MAP_WIDTH;
  const top = $("map").getBoundingClientRect().top + scrollY;
  return Math.min(MAX_MAP_WIDTH, Math.max(MIN_MAP_WIDTH, innerHeight - top - 4));
}

/** In a deep model: end the grid of heads with the window, below one score of every head. */
function drawDeepModelGrid() {
  $("overview").hidden = L <= MIN_DEEP_LAYERS || !scoreNames.length;
  if (L <= MIN_DEEP_LAYERS) return;
  if (!$("overview").hidden) drawOverview($("overview-map"), $("overview-score").value);
  const grid = $("heads-grid");
  const top = grid.getBoundingClientRect().top + scrollY;
  const height = innerWidth < NARROW_WINDOW ? 420 : Math.max(260, innerHeight - top - 10);
  grid.style.maxHeight = `${height}px`;
}
