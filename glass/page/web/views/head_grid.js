/** The grid of all heads: a small attention map of each, a row per layer. */

import { $, button, el, scrollWithin } from "../base/dom.js";
import { addArrowKeys } from "../base/tooltip.js";
import { colorIndex, isDark, palette } from "../charts/colors.js";
import { headNames } from "../state/head_metrics.js";
import { groups, H, hasSink, L } from "../state/page_data.js";
import { chooseHead, selection } from "../state/selection.js";
import { cellReader, scaleTop, sinkReader } from "../state/shown_cells.js";

const MIN_SMOOTHED_TOKENS = 96; // larger maps are scaled down smoothly

/** @type {HTMLElement[]} */
let buttons = [];

/** What the small maps are to show; another object as soon as that changes. */
let shown = { cells: null, weightByValues: false, dark: false, colors: null };

/** What each head's small map shows, so that it is painted only when that changes. */
const painted = new Map();

/** Indices of the heads whose buttons are in view. The maps of the others are not painted. */
const inView = new Set();

const observer = new IntersectionObserver(noteInView, { rootMargin: "100px" });

const layerOf = k => Math.floor(k / H);
const selectedIndex = () => selection.layer * H + selection.head;

function createHeadButton(k) {
  const layer = layerOf(k);
  const head = k % H;
  const properties = {
    role: "radio",
    className: "head",
    "aria-label": `layer ${layer}, head ${head}`,
    onclick: () => chooseHead(layer, head),
  };
  const canvas = el("canvas", { width: 1, height: 1 });
  return button(properties, canvas, el("span", {}, headNames[k]));
}

/** Frame the heads of a layer that share keys and values. */
function createGroup(layer, group, members) {
  const name = `key/value head ${group}`;
  const properties = {
    className: "group",
    role: "group",
    "aria-label": `layer ${layer}, ${name}`,
    style: `--each: ${members.length}`,
  };
  const title = el("span", { className: "group-name" }, name);
  return el("div", properties, title, el("div", {}, ...members));
}

/** Create the grid in `host`. */
export function setUpHeadGrid(host) {
  const groupSize = H / groups;
  buttons = headNames.map((_, k) => createHeadButton(k));
  host.style.setProperty("--heads", H);
  const rows = Array.from({ length: L }, (_, layer) => {
    const heads = buttons.slice(layer * H, (layer + 1) * H);
    const createGroupOf = group =>
      createGroup(layer, group, heads.slice(group * groupSize, (group + 1) * groupSize));
    const parts =
      groupSize === 1 ? heads : Array.from({ length: groups }, (_, g) => createGroupOf(g));
    return el(
      "div",
      { className: "layer" },
      el("span", { className: "name" }, `L${layer}`),
      ...parts,
    );
  });
  host.replaceChildren(...rows);
  for (const head of buttons) observer.observe(head);
  addArrowKeys(host, buttons, {
    columns: H,
    current: selectedIndex(),
    enter: k => chooseHead(layerOf(k), k % H),
  });
}

/** Note which buttons have come into view and which have left it. */
function noteInView(entries) {
  for (const { target, isIntersecting } of entries) {
    const k = buttons.indexOf(target);
    if (isIntersecting) inView.add(k);
    else inView.delete(k);
  }
  paintMaps();
}

/** Return the indices of the heads whose buttons are in view, layer · H + head, in order. */
export const headsInView = () => [...inView].sort((a, b) => a - b);

/** Show the attention maps of all heads, and mark the selected heads. */
export function drawHeadGrid(cells, { layer, head, weightByValues }) {
  const wanted = { cells, weightByValues, dark: isDark() };
  const isOutdated = Object.keys(wanted).some(key => wanted[key] !== shown[key]);
  if (isOutdated) shown = { ...wanted, colors: palette() };
  buttons.forEach((element, k) => {
    element.classList.toggle("fine", cells.T > MIN_SMOOTHED_TOKENS);
    const isSelected = layerOf(k) === layer && (head === null || k % H === head);
    element.setAttribute("aria-checked", String(isSelected));
  });
  paintMaps();
}

/** Paint the maps in view that do not show what they are to show, as far as it has arrived. */
function paintMaps() {
  const { cells, weightByValues, colors } = shown;
  for (const k of inView) {
    const maps = { layer: layerOf(k), head: k % H, weightByValues };
    if (painted.get(k) === shown || !cells?.hasPattern(maps.layer, maps.head)) continue;
    painted.set(k, shown);
    const hasColumn = hasSink && !weightByValues && !cells.firstToken;
    paintMap(
      buttons[k].firstChild,
      cells,
      maps,
      colors,
      hasColumn ? sinkReader(cells, maps) : null,
    );
  }
}

/** Paint a map with one pixel per cell; the last column is the sink's, if there is one. */
function paintMap(canvas, cells, maps, colors, readSink) {
  const { T, firstToken } = cells;
  const read = cellReader(cells, maps);
  const top = scaleTop(cells, maps.weightByValues);
  const width = readSink ? T + 1 : T;
  canvas.width = width;
  canvas.height = T;
  const image = new ImageData(width, T);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = firstToken; i < T; i++) {
    for (let j = firstToken; j <= i; j++)
      pixels[i * width + j] = colors[colorIndex(read(i, j) / top)];
    if (readSink) pixels[i * width + T] = colors[colorIndex(readSink(i))];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Move the keyboard's place in the grid to the selected head. */
export function focusSelectedHead() {
  buttons.forEach((element, k) => {
    element.tabIndex = k === selectedIndex() ? 0 : -1;
  });
}

/** Scroll the grid until the selected head is visible. */
export function revealSelectedHead() {
  const selected = buttons[selectedIndex()];
  if (selected) scrollWithin($("heads-grid"), selected);
}

/** Mark the heads that are ablated. */
export function markAblatedHeads(names) {
  buttons.forEach((element, k) => {
    element.classList.toggle("off", names.includes(headNames[k]));
  });
}

/** Return [layer, head] of the button that an event happened in, or null. */
export function headOfEvent(event) {
  const k = buttons.indexOf(event.target.closest("[role=radio]"));
  return k < 0 ? null : [layerOf(k), k % H];
}
