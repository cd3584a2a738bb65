// Attention maps: kept compressed in the page, decoded when they are looked at; read cell by cell;
// drawn as a grid of heads. Stands after draw.js. A view is one probe at one step; `seen` is what is
// looked at of it: {layer, head, weighted}, head null the layer's average.

import { colorIndex, isDark, palette } from "./colors.js";
import { el } from "./dom.js";
import { formatNumber, roundUp, shortenToken } from "./format.js";
import { headName, labelToken } from "./labels.js";
import { unpacked } from "./packed.js";
import { faded, needReading } from "./token_effect.js";
import { addArrowKeys } from "./tooltip.js";

// ---- decoding; the last few views are kept

// maps: [the maps' place, their norms', the largest product of both]; of what, see `reading`
async function decoded([maps, norms], [L, H], { T, tokens, maps: all }) {
  const n = T;
  const N = (n * (n + 1)) / 2;
  const bytes = await unpacked(maps);
  const view = {
    L,
    H,
    T,
    tokens,
    n,
    largest: Math.max(...all.map(([, , most]) => most)),
    exact: false,
  };
  view.norms = new Float32Array((await unpacked(norms)).buffer);
  const place = (l, h, i, j) => (l * H + h) * N + (i * (i + 1)) / 2 + j;
  const rows = L * H * n;
  const scale = new Float32Array(bytes.buffer, 0, rows);
  const codes = bytes.subarray(4 * rows);
  view.at = (l, h, i, j) => (codes[place(l, h, i, j)] * scale[(l * H + h) * n + i]) / 255;
  view.bound = (l, h, i) => scale[(l * H + h) * n + i] / 255;
  view.size = bytes.length;
  return view;
}

// How the weights of a probe are kept, for the reader.
export const PRECISION =
  "The weights are kept in one byte a weight: each is right within ±0.4% of the largest weight in its " +
  "row, and a row sums to 1 within 1%.";

const views = new Map();
export function load(key, how, make = decoded) {
  const view = views.get(key) ?? make(...how);
  views.delete(key);
  views.set(key, view);
  if (views.size > 24 || (views.size > 4 && view.size > 3e7))
    views.delete(views.keys().next().value);
  view.then(v => {
    view.size = v.size;
  });
  return view;
}

// ---- reading

const heads = (view, { layer, head, weighted }) =>
  (head === null ? [...Array(view.H).keys()] : [head]).map(h => ({ layer, head: h, weighted }));

// (i, j) → what is shown there
export function reader(view, seen) {
  if (seen.head === null) {
    const all = heads(view, seen).map(one => reader(view, one));
    return (i, j) => all.reduce((sum, read) => sum + read(i, j), 0) / view.H;
  }
  const { layer, head, weighted } = seen;
  const from = (layer * view.H + head) * view.n;
  if (!weighted) return (i, j) => view.at(layer, head, i, j);
  return (i, j) => view.at(layer, head, i, j) * view.norms[from + j];
}

// How far off that may be, at the most.
function bound(view, seen, i, j) {
  const norm = h => (seen.weighted ? view.norms[(seen.layer * view.H + h) * view.n + j] : 1);
  const all = heads(view, seen);
  return (
    all.reduce((sum, { head }) => sum + view.bound(seen.layer, head, i) * norm(head), 0) /
    all.length
  );
}

// A view without its first token: what is left of each row, made to sum to 1 again, by a stored view of that or by
// this one.
export function withoutFirst(view, stored) {
  const left = (l, h, i) => Math.max(1e-6, 1 - view.at(l, h, i, 0));
  const at = stored?.at ?? ((l, h, i, j) => view.at(l, h, i, j) / left(l, h, i));
  const bound = stored?.bound ?? ((l, h, i) => Math.min(1, view.bound(l, h, i) / left(l, h, i)));
  return { ...view, from: 1, bound, at: (l, h, i, j) => (i && j ? at(l, h, i, j) : 0) };
}

// The top of the colours' scale, the same at all steps of a run.
export const largest = (view, weighted) => (view.signed || weighted ? view.largest || 1 : 1);

// What is said of a cell: from where to where, the value, and how sure it is.
function reading(view, seen, i, j) {
  if (view.signed) return needReading(view, i, j);
  const by = seen.weighted;
  const average = seen.head === null;
  const value = reader(view, seen)(i, j);
  const nodes = [el("b", {}, formatNumber(value))];
  if (!view.exact) nodes.push(` ± ${roundUp(bound(view, seen, i, j))}`);
  if (average) nodes.push(`, the mean of ${view.H} heads`);
  else if (by) {
    const norm = view.norms[(seen.layer * view.H + seen.head) * view.n + j];
    nodes.push(` = ${formatNumber(view.at(seen.layer, seen.head, i, j))} × ${formatNumber(norm)}`);
  }
  return [
    el("div", {}, ...labelToken(view, i), " → ", ...labelToken(view, j)),
    el("div", { className: "value" }, ...nodes),
  ];
}

// ---- drawing

// Every head small, a row for each layer; heads that share keys and values are framed.
// Returns what paints a view and marks the heads that are looked at.
export function headGrid(host, [L, H], groups, choose, [layer, head]) {
  const each = H / groups;
  const grid = [];
  const button = (l, h) =>
    el(
      "button",
      { type: "button", role: "radio", className: "head", "aria-label": `layer ${l}, head ${h}` },
      el("canvas", { width: 1, height: 1 }),
      el("span", {}, headName(l, h)),
    );
  host.style.setProperty("--heads", H);
  host.replaceChildren();
  for (let l = 0; l < L; l++) {
    const line = host.appendChild(
      el("div", { className: "layer" }, el("span", { className: "name" }, `L${l}`)),
    );
    for (let g = 0; g < groups; g++) {
      const of = Array.from({ length: each }, (_, k) => button(l, g * each + k));
      const name = `key/value head ${g}`;
      grid.push(...of);
      const frame = {
        className: "group",
        role: "group",
        "aria-label": `layer ${l}, ${name}`,
        style: `--each: ${each}`,
      };
      line.append(
        ...(each === 1
          ? of
          : [
              el("div", frame, el("span", { className: "group-name" }, name), el("div", {}, ...of)),
            ]),
      );
    }
  }
  grid.forEach((button, k) => {
    button.onclick = () => choose(Math.floor(k / H), k % H);
  });
  addArrowKeys(host, grid, H, k => choose(Math.floor(k / H), k % H), layer * H + head);
  let painted = {}; // another head that is looked at changes no small map
  return (view, seen) => {
    const most = largest(view, seen.weighted);
    const now = { view, weighted: seen.weighted, dark: isDark() };
    const colours = Object.keys(now).some(key => now[key] !== painted[key]) && palette();
    painted = now;
    grid.forEach((button, k) => {
      const l = Math.floor(k / H);
      const h = k % H;
      const read = reader(view, { layer: l, head: h, weighted: seen.weighted });
      if (colours) paint(button.firstChild, view, read, most, colours);
      button.classList.toggle("fine", view.n > 96);
      button.setAttribute(
        "aria-checked",
        l === seen.layer && (seen.head === null || h === seen.head),
      );
    });
  };
}

function paint(canvas, { n, from = 0 }, read, most, colours) {
  canvas.width = canvas.height = n;
  const image = new ImageData(n, n);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = from; i < n; i++)
    for (let j = from; j <= i; j++) pixels[i * n + j] = colours[colorIndex(read(i, j) / most)];
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// What cells() draws of a view, and what `more` asks for.
export function mapOf(view, seen, more = {}) {
  const read = reader(view, seen);
  const most = largest(view, seen.weighted);
  const names = view.tokens.map(t => shortenToken(t));
  const shown = view.signed ? faded : Number;
  return {
    rows: view.n,
    cols: view.n,
    most: 900,
    rowNames: names,
    colNames: names,
    signed: view.signed,
    level: (i, j) =>
      j > i || Math.min(i, j) < (view.from ?? 0)
        ? -1
        : colorIndex(shown(read(i, j)) / most, view.signed),
    tell: (i, j) => reading(view, seen, i, j),
    ...more,
  };
}
