/** The grid of all heads: a small attention map of each, a row per layer. */

import { cellReader, scaleTop, sinkReader } from "./attention_data.js";
import { colorIndex, isDark, palette } from "./colors.js";
import { el } from "./dom.js";
import { headName } from "./labels.js";
import { chooseHead, groups, H, hasSink, L, selection } from "./page_state.js";
import { addArrowKeys } from "./tooltip.js";

const MIN_SMOOTHED_TOKENS = 96; // larger maps are scaled down smoothly

/** @type {HTMLElement[]} */
let buttons = [];

/** What the small maps are to show; another object as soon as that changes. */
let shown = { view: null, weightByValues: false, dark: false, colors: null };

/** What each head's small map shows, so that it is painted only when that changes. */
const painted = new Map();

/** Indices of the heads whose buttons are in view. The maps of the others are not painted. */
const inView = new Set();

const observer = new IntersectionObserver(noteInView, { rootMargin: "100px" });

/** Create the button of a head. */
function createHeadButton(layer, head) {
  const button = el(
    "button",
    {
      type: "button",
      role: "radio",
      className: "head",
      "aria-label": `layer ${layer}, head ${head}`,
    },
    el("canvas", { width: 1, height: 1 }),
    el("span", {}, headName(layer, head)),
  );
  button.onclick = () => chooseHead(layer, head);
  return button;
}

/** Frame the heads of a layer that share keys and values. */
function createGroup(layer, group, members) {
  const name = `key/value head ${group}`;
  return el(
    "div",
    {
      className: "group",
      role: "group",
      "aria-label": `layer ${layer}, ${name}`,
      style: `--each: ${members.length}`,
    },
    el("span", { className: "group-name" }, name),
    el("div", {}, ...members),
  );
}

/**
 * Create the grid in `host`.
 *
 * @param {HTMLElement} host
 */
export function setUpHeadGrid(host) {
  const groupSize = H / groups;
  buttons = [];
  host.style.setProperty("--heads", H);
  host.replaceChildren();
  observer.disconnect();
  inView.clear();
  for (let layer = 0; layer < L; layer++) {
    const name = el("span", { className: "name" }, `L${layer}`);
    const row = host.appendChild(el("div", { className: "layer" }, name));
    for (let group = 0; group < groups; group++) {
      const members = Array.from({ length: groupSize }, (_, k) =>
        createHeadButton(layer, group * groupSize + k),
      );
      buttons.push(...members);
      row.append(...(groupSize === 1 ? members : [createGroup(layer, group, members)]));
    }
  }
  for (const button of buttons) observer.observe(button);
  const choose = k => chooseHead(Math.floor(k / H), k % H);
  addArrowKeys(host, buttons, H, choose, selection.layer * H + selection.head);
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

/**
 * Show the attention maps of all heads, and mark the selected heads.
 *
 * @param {import("./page_state.js").CellView} view
 * @param {{layer: number, head: number | null, weightByValues: boolean}} maps
 */
export function drawHeadGrid(view, maps) {
  const { weightByValues } = maps;
  const wanted = { view, weightByValues, dark: isDark() };
  const isOutdated = Object.keys(wanted).some(key => wanted[key] !== shown[key]);
  if (isOutdated) shown = { ...wanted, colors: palette() };
  buttons.forEach((button, k) => {
    button.classList.toggle("fine", view.T > MIN_SMOOTHED_TOKENS);
    const isSelected =
      Math.floor(k / H) === maps.layer && (maps.head === null || k % H === maps.head);
    button.setAttribute("aria-checked", isSelected);
  });
  paintMaps();
}

/** Paint the maps in view that do not show what they are to show, as far as it has arrived. */
function paintMaps() {
  const { view, weightByValues, colors } = shown;
  for (const k of inView) {
    const layer = Math.floor(k / H);
    const head = k % H;
    if (painted.get(k) === shown || !view?.hasPattern(layer, head)) continue;
    painted.set(k, shown);
    const read = cellReader(view, { layer, head, weightByValues });
    const hasColumn = hasSink && !weightByValues && !view.from;
    const readSink = hasColumn ? sinkReader(view, { layer, head, weightByValues }) : null;
    paintMap(buttons[k].firstChild, view, read, scaleTop(view, weightByValues), colors, readSink);
  }
}

/** Paint a map with one pixel per cell; the last column is the sink's, if there is one. */
function paintMap(canvas, { T, from = 0 }, read, top, colors, readSink) {
  const width = readSink ? T + 1 : T;
  canvas.width = width;
  canvas.height = T;
  const image = new ImageData(width, T);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = from; i < T; i++) {
    for (let j = from; j <= i; j++) pixels[i * width + j] = colors[colorIndex(read(i, j) / top)];
    if (readSink) pixels[i * width + T] = colors[colorIndex(readSink(i))];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Move the keyboard's place in the grid to the selected head. */
export function focusSelectedHead() {
  const selected = selection.layer * H + selection.head;
  buttons.forEach((button, k) => {
    button.tabIndex = k === selected ? 0 : -1;
  });
}

/** Scroll the grid, and nothing else, until the selected head is visible. */
export function revealSelectedHead() {
  const button = buttons[selection.layer * H + selection.head];
  if (!button) return;
  const host = button.closest(".heads-grid");
  const frame = host.getBoundingClientRect();
  const box = button.getBoundingClientRect();
  if (box.top < frame.top || box.bottom > frame.bottom) {
    host.scrollTop += box.top - frame.top - (frame.height - box.height) / 2;
  }
}

/**
 * Mark the heads that are ablated.
 *
 * @param {string[]} names
 */
export function markAblatedHeads(names) {
  buttons.forEach((button, k) => {
    button.classList.toggle("off", names.includes(headName(Math.floor(k / H), k % H)));
  });
}

/**
 * Return [layer, head] of the button that an event happened in, or null.
 *
 * @param {Event} event
 */
export function headOfEvent(event) {
  const k = buttons.indexOf(event.target.closest("[role=radio]"));
  return k < 0 ? null : [Math.floor(k / H), k % H];
}
