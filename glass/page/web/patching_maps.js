/** The two maps of activation patching: the effect of each patch, as a share of the difference. */

import { createCellGrid } from "./cell_grid.js";
import { colorIndex, drawColorBar, resolveColor } from "./colors.js";
import { $, bdi, el } from "./dom.js";
import { formatNumber, formatSigned, shortenToken } from "./format.js";
import { headGridLayout, headName } from "./labels.js";
import { H, hasMlps, L } from "./page_state.js";
import { parsePatch } from "./patches.js";
import { choices, measured, patchName, shareOf } from "./patching_state.js";

const MAX_HEIGHT = 300; // pixels of all rows of a map; deep models may exceed it
const MAX_CELL_WIDTH = 64; // pixels, as in headGridLayout
const MAX_NAME_LENGTH = 10; // characters of a token at the foot of its column

let drawResiduals = null;
let drawComponents = null;

/** Create the canvases of both maps. */
export function setUpPatchingMaps() {
  drawResiduals = createCellGrid(
    $("patching-residuals"),
    "effect of patching the residual stream, by layer and token; arrow keys read its cells",
  );
  drawComponents = createCellGrid(
    $("patching-components"),
    "effect of patching heads and MLPs, by layer; arrow keys read its cells",
  );
}

/** Return the verb for what a patch does to the difference between the texts. */
export const effectVerb = () => (choices.direction === "denoising" ? "restored" : "removed");

/**
 * Draw both maps.
 *
 * @param {(name: string) => void} toggle - Called with the name of the patch that is clicked.
 */
export function drawPatchingMaps(toggle) {
  const { i, first, cleanTokens, corruptedTokens } = measured;
  const layout = headGridLayout(L, H, MAX_HEIGHT);
  const columnCount = hasMlps ? H + 1 : H;
  drawComponents({
    ...layout,
    cols: columnCount,
    most: MAX_CELL_WIDTH * columnCount + 26,
    colNames: hasMlps ? [...layout.colNames, "MLP"] : layout.colNames,
    ...describeCells("component", 0, toggle),
  });
  const tokens = Array.from({ length: i + 1 - first }, (_, k) => first + k);
  drawResiduals({
    ...layout,
    cols: tokens.length,
    most: MAX_CELL_WIDTH * tokens.length + 26,
    upright: false,
    colNames: tokens.map(t => nameToken(cleanTokens[t], corruptedTokens[t])),
    ...describeCells("residual", first, toggle),
  });
  $("patching-maps").style.setProperty("--columns", String(columnCount));
  drawColorBar($("patching-bar"), `share ${effectVerb()}`, 1, true);
}

/** Name a token of both texts. */
function nameToken(clean, corrupted) {
  const names = clean === corrupted ? [clean] : [clean, corrupted];
  return names.map(name => shortenToken(name, MAX_NAME_LENGTH)).join("/");
}

/**
 * Describe the cells of one kind of patch for a grid.
 *
 * @param {"residual" | "component"} kind
 * @param {number} first - Patched token or head of the first column.
 * @param {(name: string) => void} toggle
 */
function describeCells(kind, first, toggle) {
  const valueAt = (row, column) => measured.cells[kind].get(`${row},${first + column}`);
  const nameAt = (row, column) => patchName(kind, row, first + column);
  const isKept = name => measured.kept.includes(name);
  return {
    signed: true,
    level: (row, column) => {
      const value = valueAt(row, column);
      if (value === undefined) return colorIndex(0, true); // not measured yet
      return colorIndex(Math.max(-1, Math.min(1, shareOf(value))), true);
    },
    write: (row, column) => {
      const value = valueAt(row, column);
      return value === undefined ? "" : writeShare(shareOf(value));
    },
    tell: (row, column) => {
      const name = nameAt(row, column);
      const value = valueAt(row, column);
      return [
        el("div", {}, ...describePatch(kind, row, first + column)),
        ...describeEffect(value),
        el("small", {}, isKept(name) ? "Click to remove this patch" : "Click to keep this patch"),
      ];
    },
    pick: (row, column) => toggle(nameAt(row, column)),
    over: (context, { left, cell, high }) => {
      const places = measured.kept.map(name => placeOf(kind, first, name)).filter(Boolean);
      outlineCells(context, places, left, cell, high);
    },
  };
}

/** Describe the effect of a patch, as nodes. */
function describeEffect(value) {
  if (value === undefined) return [el("div", {}, "not measured yet")];
  const share = el("b", {}, formatSigned(shareOf(value)));
  return [
    el("div", { className: "value" }, share, ` of the difference ${effectVerb()}`),
    el("div", {}, `logit difference ${formatNumber(value)}`),
  ];
}

/** Write a share with two decimals in little room: .53 or −.08. */
function writeShare(share) {
  const decimals = Math.abs(share).toFixed(2).replace(/^0/, "");
  if (decimals === ".00") return "0";
  return share < 0 ? `−${decimals}` : decimals;
}

/** Return the row and column of a kept patch on a map; null if it is on the other map. */
function placeOf(kind, first, name) {
  const patch = parsePatch(name);
  if ((patch.kind === "residual") !== (kind === "residual")) return null;
  const column = patch.kind === "mlp" ? H : patch.index;
  return [patch.layer, column - first];
}

/** Outline the cells of patches that are kept. */
function outlineCells(context, places, left, cell, high) {
  context.strokeStyle = resolveColor("var(--ink)");
  context.lineWidth = 2;
  for (const [row, column] of places) {
    context.strokeRect(left + column * cell + 1, row * high + 1, cell - 2, high - 2);
  }
}

/** Say what the patch of a cell copies, as nodes. */
function describePatch(kind, row, column) {
  if (kind === "component") {
    return [column === H ? `MLP of layer ${row}` : `head ${headName(row, column)}`];
  }
  const { cleanTokens, corruptedTokens } = measured;
  const clean = cleanTokens[column];
  const corrupted = corruptedTokens[column];
  const tokens = clean === corrupted ? [clean] : [clean, corrupted];
  return [
    `residual stream before block ${row} at `,
    ...tokens.flatMap((token, k) => [k ? "/" : "", bdi(shortenToken(token), "token")]),
    el("small", {}, ` ${column}`),
  ];
}
