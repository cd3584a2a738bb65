// Who feeds whom: layers × heads, three times, for keys, queries and values, with a line from each part of the model to
// the heads above that it feeds, as thick as the share that they lose without it. Stands after charts.js and maps.js.

import { el } from "./dom.js";
import { readableName } from "./format.js";
import { headName, MIN_DEEP_LAYERS } from "./labels.js";
import { term } from "./terms.js";
import { addArrowKeys, addTooltip } from "./tooltip.js";

const READ = { keys: "c1", queries: "c2", values: "c4" };
const WRITTEN_FROM = 0.3; // the share from which it is written on its line
const ALONG = [0.5, 0.44, 0.56, 0.38, 0.62, 0.3, 0.7, 0.22, 0.78, 0.14, 0.86]; // where, the best first

// wires: [{score, to, read, from, share, error, direct, off}]: `to` and `chosen` as [layer, head], `from` a name.
export function drawWiring(host, [L, H], wires, title, chosen, choose) {
  const told = wires.filter(({ share, error }) => share >= 0.05 && share >= 2 * error);
  const graphs = el("div", { className: "graphs" });
  host.replaceChildren(
    el("h3", {}, title),
    el(
      "p",
      { className: "quiet" },
      "A line: so much of the upper head's score (of what it writes, for values) is lost when it does not see what the " +
        "lower part wrote, and all between is computed again. Shares do not add up: two parts may carry the same, or " +
        "need each other.",
    ),
    ...(told.length
      ? [graphs]
      : [el("p", { className: "quiet" }, "Nothing feeds a head yet, as far as can be told.")]),
  );
  for (const [read, colour] of Object.entries(READ)) {
    const found = told.filter(wire => wire.read === read);
    if (!told.length) continue;
    const box = graphs.appendChild(el("div", {}, el("h4", {}, "through its ", term(read))));
    box.append(wiringGraph([L, H], found, colour, `${title}, through its ${read}`, chosen, choose));
  }
}

// One of the three: a row for each layer, the highest on top, its MLP at the right end; below all the embedding.
function wiringGraph([L, H], wires, colour, title, chosen, choose) {
  const width = Math.max(230, Math.min(460, 60 + 62 * (H + 1)));
  const radius = H > 9 ? 6 : 13;
  // Of a deep model the layers that are told of.
  const layers = Array.from({ length: L }, (_, l) => l).filter(
    l =>
      L <= MIN_DEEP_LAYERS ||
      wires.some(({ to, from }) => to[0] === l || new RegExp(`^L${l}(H|M)`).test(from)),
  );
  const high = layers.length < 8 ? 76 : 40;
  const top = 18;
  const x = h => 34 + ((h + 0.5) * (width - 44)) / (H + 1);
  const y = l => top + (layers.length - 1 - (l < 0 ? -1 : layers.indexOf(l))) * high;
  const place = name => {
    const head = /^L(\d+)H(\d+)$/.exec(name);
    const mlp = /^L(\d+)MLP$/.exec(name);
    return head
      ? [x(Number(head[2])), y(Number(head[1]))]
      : mlp
        ? [x(H), y(Number(mlp[1]))]
        : [x((H - 1) / 2), y(-1)];
  };
  const tall = top + layers.length * high + 22;
  const svg = el("svg:svg", {
    viewBox: `0 0 ${width} ${tall}`,
    role: "group",
    "aria-label": title,
  });
  // What no share is written on: [x, y, how far from it], nodes and other shares.
  const taken = layers.flatMap(l => Array.from({ length: H }, (_, h) => [x(h), y(l), radius + 8]));
  taken.push(...layers.map(l => [x(H), y(l), 18]), [x((H - 1) / 2), y(-1), 18]);
  const busy = new Set(wires.flatMap(({ to, from }) => [headName(...to), from]));
  const marks = [];
  const labels = [];
  for (const wire of [...wires].sort((a, b) => a.share - b.share)) {
    const { to, from, share } = wire;
    const [x1, y1] = place(from);
    const [x2, y2] = place(headName(...to));
    const bend = x1 === x2 && y1 - y2 > 1.5 * high ? 26 : 0;
    const thick = (1 + 7 * Math.min(1, share)).toFixed(1);
    const mark = el("svg:path", {
      d: `M${x1} ${y1 - radius}Q${(x1 + x2) / 2 + bend} ${(y1 + y2) / 2} ${x2} ${y2 + radius}`,
      class: "wire",
      tabindex: -1,
      role: "img",
      style: `stroke: var(--${colour}); stroke-width: ${thick}`,
    });
    mark.setAttribute(
      "aria-label",
      aboutWire(wire)
        .map(node => node.textContent)
        .join(", "),
    );
    addTooltip(mark, () => aboutWire(wire));
    marks.push(svg.appendChild(mark));
    if (share < WRITTEN_FROM) continue;
    const at = t => [
      x1 + t * (x2 - x1) + 2 * t * (1 - t) * bend,
      y1 - radius + t * (y2 - y1 + 2 * radius),
    ];
    const clear = t =>
      Math.min(
        ...taken.map(
          (
            [a, b, tall], // from 1 on it touches none
          ) => Math.max(Math.abs(a - at(t)[0]) / 31, Math.abs(b - at(t)[1]) / tall),
        ),
      );
    const found =
      ALONG.find(t => clear(t) >= 1) ??
      ALONG.reduce((best, t) => (clear(t) > clear(best) ? t : best));
    const [left, down] = at(found);
    taken.push([left, down, 14]);
    labels.push(
      el(
        "svg:text",
        { x: left, y: down + 4, class: "share", "text-anchor": "middle" },
        `${(100 * share).toFixed(0)}%`,
      ),
    );
  }
  for (const l of layers) {
    svg.append(
      el("svg:text", { x: 4, y: y(l) + 4 }, `L${l}`),
      wiringNode("MLP", x(H), y(l), radius, busy.has(`L${l}MLP`), true),
    );
    for (let h = 0; h < H; h++) {
      const node = wiringNode(`H${h}`, x(h), y(l), radius, busy.has(headName(l, h)));
      if (l === chosen[0] && h === chosen[1]) node.classList.add("here");
      node.onclick = () => choose(l, h);
      node.classList.add("head-node");
      svg.append(node);
    }
  }
  svg.append(
    wiringNode("embedding", x((H - 1) / 2), y(-1), radius, busy.has("embedding"), true),
    ...labels,
  );
  addArrowKeys(svg, marks, 1, () => {}, 0);
  return svg;
}

function wiringNode(name, x, y, radius, busy, square = false) {
  const wide = square ? Math.max(2 * radius, 7.8 * name.length + 10) : 2 * radius;
  return el(
    "svg:g",
    { class: `node${busy ? " busy" : ""}` },
    square
      ? el("svg:rect", { x: x - wide / 2, y: y - 9, width: wide, height: 18, rx: 3 })
      : el("svg:circle", { cx: x, cy: y, r: radius }),
    ...(radius > 8 || square
      ? [el("svg:text", { x, y: y + 3.5, "text-anchor": "middle" }, name)]
      : []),
  );
}

function aboutWire({ score, to, read, from, share, error, direct, off }) {
  const percent = (value, error) => `${(100 * value).toFixed(0)} ± ${(100 * error).toFixed(0)}%`;
  return [
    el("div", {}, `${from} → ${headName(...to)}, through its ${read}`),
    el(
      "div",
      { className: "value" },
      el("b", {}, percent(share, error)),
      read === "values" ? " of what it writes" : ` of its ${readableName(score)} score`,
      " is lost without it",
    ),
    ...(direct === null
      ? []
      : [el("div", {}, `directly, with nothing between computed again: ${percent(direct, off)}`)]),
  ];
}
