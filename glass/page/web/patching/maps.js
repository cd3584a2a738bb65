/** The two maps of activation patching: the effect of each patch, as a share of the difference. */

import { $, el, tokenName } from "../base/dom.js";
import {
  formatInCell,
  formatNumber,
  formatSigned,
  headName,
  shortenToken,
} from "../base/format.js";
import { valueLine } from "../base/tooltip.js";
import { CellGrid } from "../charts/cell_grid.js";
import { colorIndex, drawColorBar, resolveColor } from "../charts/colors.js";
import { H, hasMlps, L } from "../state/page_data.js";
import { headsContent, maxHeadsWidth } from "../views/heads_content.js";
import { choices, measured, patchName, shareOf } from "./state.js";

const MAX_HEIGHT = 300; // pixels of all rows of a map; deep models may exceed it
const MAX_NAME_LENGTH = 10; // characters of a token at the foot of its column

/** @type {CellGrid} */
let residuals = null;
/** @type {CellGrid} */
let components = null;

/** Create the canvases of both maps. */
export function setUpPatchingMaps() {
  residuals = new CellGrid(
    $("patching-residuals"),
    "effect of patching the residual stream, by layer and token; arrow keys read its cells",
  );
  components = new CellGrid(
    $("patching-components"),
    "effect of patching heads and MLPs, by layer; arrow keys read its cells",
  );
}

/** Return the verb for what a patch does to the difference between the texts. */
export const effectVerb = () => (choices.direction === "denoising" ? "restored" : "removed");

/** Draw both maps; `toggle` is called with the name of the patch that is clicked. */
export function drawPatchingMaps(toggle) {
  const { i, first } = measured;
  const heads = headsContent(MAX_HEIGHT);
  components.draw({
    ...heads,
    ...patchContent("component", 0, hasMlps ? H + 1 : H, toggle),
    colNames: [...heads.colNames, "MLP"],
  });
  const nameColumn = (_, column) =>
    tokensAt(first + column)
      .map(token => shortenToken(token, MAX_NAME_LENGTH))
      .join("/");
  residuals.draw({
    ...heads,
    ...patchContent("residual", first, i + 1 - first, toggle),
    upright: false,
    colNames: Array.from({ length: i + 1 - first }, nameColumn),
  });
  $("patching-maps").style.setProperty("--columns", String(hasMlps ? H + 1 : H));
  drawColorBar($("patching-bar"), `share ${effectVerb()}`, 1, true);
}

/** Return the token at a position in both texts: one if it is the same, else two. */
function tokensAt(t) {
  const { cleanTokens, corruptedTokens } = measured;
  return [...new Set([cleanTokens[t], corruptedTokens[t]])];
}

/** Return the content of the map of one kind of patch; `first` is the token or head of the first column. */
function patchContent(kind, first, cols, toggle) {
  const nameAt = (row, column) => patchName(kind, row, first + column);
  const isKept = (row, column) => measured.kept.includes(nameAt(row, column));
  const valueAt = (row, column) => measured.cells[kind].get(`${row},${first + column}`);
  const shareAt = (row, column) => shareOf(valueAt(row, column)); // NaN: not measured yet
  return {
    cols,
    maxWidth: maxHeadsWidth(cols),
    signed: true,
    color: (row, column) => colorIndex(Math.max(-1, Math.min(1, shareAt(row, column))), true),
    text: (row, column) => formatShare(shareAt(row, column)),
    describe: (row, column) => [
      el("div", {}, ...describePatch(kind, row, first + column)),
      ...describeEffect(valueAt(row, column)),
      el("small", {}, `Click to ${isKept(row, column) ? "remove" : "keep"} this patch`),
    ],
    pick: (row, column) => toggle(nameAt(row, column)),
    drawOver: (context, box) => {
      const columns = [...Array(cols).keys()];
      for (let row = 0; row < L; row++) {
        for (const column of columns.filter(k => isKept(row, k))) {
          outlineCell(context, box, row, column);
        }
      }
    },
  };
}

function formatShare(share) {
  if (Number.isNaN(share)) return "";
  return Math.abs(share) < 0.005 ? "0" : formatInCell(share);
}

function outlineCell(context, { left, cellWidth, cellHeight }, row, column) {
  context.strokeStyle = resolveColor("var(--ink)");
  context.lineWidth = 2;
  const x = left + column * cellWidth + 1;
  context.strokeRect(x, row * cellHeight + 1, cellWidth - 2, cellHeight - 2);
}

function describeEffect(value) {
  if (value === undefined) return [el("div", {}, "not measured yet")];
  return [
    valueLine(formatSigned(shareOf(value)), ` of the difference ${effectVerb()}`),
    el("div", {}, `logit difference ${formatNumber(value)}`),
  ];
}

/** Say what a patch copies, as nodes. */
function describePatch(kind, layer, index) {
  if (kind === "component") {
    return [index === H ? `MLP of layer ${layer}` : `head ${headName(layer, index)}`];
  }
  return [
    `residual stream before block ${layer} at `,
    ...tokensAt(index).flatMap((token, k) => [k ? "/" : "", tokenName(token)]),
    el("small", {}, ` ${index}`),
  ];
}
