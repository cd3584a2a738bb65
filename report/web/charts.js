import { el } from "./dom.js";
import { formatCount, formatWithError } from "./format.js";
import { addArrowKeys, addTooltip, announce, showTooltip } from "./tooltip.js";

// ---- scales, frames, names

export function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].find(s => s * unit >= rough) * unit;
  const found = [];
  for (let k = Math.ceil(low / stride - 1e-9); k * stride <= high + stride * 1e-9; k++) {
    found.push(Number((k * stride).toPrecision(12)));
  }
  return found;
}

export function compact(x) {
  const size = Math.abs(x);
  if (size > 0 && size < 1)
    return size < 1e-3 ? x.toExponential() : String(Number(x.toPrecision(3)));
  if (size >= 1e4) return size >= 1e9 ? `${x / 1e9}G` : size >= 1e6 ? `${x / 1e6}M` : `${x / 1e3}k`;
  return x.toLocaleString("en", { maximumFractionDigits: 6 });
}

// From a value to its place between two pixels, by its logarithm where `log`.
function scale(low, high, from, to, log = false) {
  const f = log ? Math.log10 : Number;
  const start = f(low);
  const span = f(high) - start || 1;
  return value => from + ((f(value) - start) / span) * (to - from);
}

// Where a chart lies in its picture; `plot` clips what is drawn into it.
const TOP = 10;
const UNDER = 24; // pixels above and below the frame
let frames = 0;
function frame(host, height, room) {
  const width = Math.max(120, host.clientWidth || 320);
  const left = 48;
  const right = width - room;
  const bottom = height - UNDER;
  const id = `frame-${++frames}`;
  const svg = el(
    "svg:svg",
    {},
    el(
      "svg:clipPath",
      { id },
      el("svg:rect", {
        x: left - 10,
        y: TOP - 8,
        width: right - left + 20,
        height: bottom - TOP + 16,
      }),
    ),
  );
  return {
    svg,
    width,
    height,
    left,
    right,
    bottom,
    plot: el("svg:g", { "clip-path": `url(#${id})` }),
  };
}

function size({ svg, width }, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
}

// Rules and figures of both axes, and what stands along x. xTicks: [[place, text]]
function axes({ svg, width, height, left, right }, y, yTicks, xTicks, xName) {
  for (const t of yTicks)
    svg.append(
      el("svg:line", { x1: left, x2: right, y1: y(t), y2: y(t), class: "rule" }),
      el("svg:text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, compact(t)),
    );
  for (const [at, text] of xTicks) {
    svg.append(
      el(
        "svg:text",
        { x: at, y: height - 7, "text-anchor": at > width - 24 ? "end" : "middle" },
        text,
      ),
    );
  }
  if (xName) svg.append(el("svg:text", { x: right, y: height + 9, "text-anchor": "end" }, xName));
}

const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text) {
  ruler.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

export function shorten(text, width) {
  for (let most = [...text].length; most > 1 && textWidth(text) > width; most--) {
    text = `${[...text].slice(0, most - 2).join("")}…`;
  }
  return text;
}

// Names at the right ends of lines, moved apart, or none where that leads them astray: then a legend has to name them.
// names: [{text, y, group, colour}]; returns the room they take, and what draws them.
function endNames(host, names, bottom, gap = 13) {
  const order = [...names].sort((a, b) => a.y - b.y);
  order.forEach((name, k) => {
    name.at = Math.max(name.y, k ? order[k - 1].at + gap : TOP);
  });
  order.reduceRight((below, name) => (name.at = Math.min(name.at, below - gap)), bottom + gap + 4);
  const fits =
    host.clientWidth > 300 &&
    names.every(name => name.at >= TOP - 1 && Math.abs(name.at - name.y) < 48);
  if (!names.length || !fits) return [14, () => {}];
  const room = Math.min(
    170,
    host.clientWidth / 3,
    18 + Math.max(...names.map(name => textWidth(name.text))),
  );
  return [
    room,
    (svg, right) => {
      for (const { text, y, at, group, colour } of names)
        svg.append(
          el("svg:path", {
            d: `M${right + 2} ${y}L${right + 8} ${at}`,
            class: "line",
            "data-group": group,
            style: `stroke: var(--${colour})`,
          }),
          el(
            "svg:text",
            { x: right + 11, y: at + 4, "data-group": group, style: `fill: var(--${colour})` },
            shorten(text, room - 13),
          ),
        );
    },
  ];
}

// ---- lines over the steps

// series: [{name, xs, ys, colour, bold, dash, faint, group, label, dots}]: a label stands at the line's
// end, dots are places along it.
// `at` marks a step; `under(svg, x, top)` adds below the axis and returns its height; what is above `cap` is cut off.
// Where there is `tip(series, k)`, it tells of the line nearest to the pointer, and `near(series)` hears of it.
export function chart(
  host,
  {
    title,
    series,
    height = 150,
    at = null,
    zero = false,
    under = null,
    domain = [],
    cap = Infinity,
    xName = "",
    tip = null,
    near,
  },
) {
  series = series.filter(s => s.xs.length);
  const xs = [...new Set([...series.flatMap(s => s.xs), ...domain])].sort((a, b) => a - b);
  host.hidden = xs.length < 2; // a point is no curve
  if (host.hidden) return;
  const values = series.flatMap(s => s.ys).filter(y => y !== null);
  const bottom = height - UNDER;
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = Math.min(
    cap,
    values.reduce((a, b) => Math.max(a, b), -Infinity),
  );
  if (zero) [low, high] = [Math.min(0, low), Math.max(zero, high)];
  if (!(high > low)) {
    [low, high] = Number.isFinite(low)
      ? [low - Math.abs(low || 1) / 10, low + Math.abs(low || 1) / 10]
      : [0, 1];
  }
  const y = scale(low, high, bottom, TOP);
  const end = s => Math.max(TOP, y(s.ys.findLast(v => v !== null) ?? low));
  const [room, drawNames] = endNames(
    host,
    series.filter(s => s.label).map(s => ({ ...s, text: s.label, y: end(s) })),
    bottom,
  );
  const f = frame(host, height, room);
  const { svg, width, left, right, plot } = f;
  const [first, last] = [xs[0], Math.max(xs.at(-1), xs[0] + 1)];
  const x = scale(first, last, left, right);
  svg.setAttribute("tabindex", 0);
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `${title}; arrow keys read values`);
  const xTicks = ticks(first, last, Math.max(1, (right - left) / 60)).map(t => [x(t), compact(t)]);
  axes(f, y, ticks(low, high, height / 38), xTicks, xName);
  if (at !== null && at >= first && at <= last) {
    svg.append(el("svg:line", { x1: x(at), x2: x(at), y1: TOP, y2: bottom, class: "now" }));
  }
  svg.append(plot);
  for (const s of series) {
    const joined = k => k > 0 && s.ys[k - 1] !== null; // a gap where nothing was measured
    const group = s.group === undefined ? {} : { "data-group": s.group };
    const line = s.xs.map((step, k) =>
      s.ys[k] === null
        ? ""
        : `${joined(k) ? "L" : "M"}${x(step).toFixed(1)} ${y(s.ys[k]).toFixed(1)}`,
    );
    const dot = (k, r) =>
      el("svg:circle", {
        cx: x(s.xs[k]),
        cy: y(s.ys[k]),
        r,
        ...group,
        style: `fill: var(--${s.colour})`,
      });
    if (s.errors?.some(Boolean)) plot.append(band(s, x, y));
    plot.append(
      el("svg:path", {
        d: line.join(""),
        class: `line${s.bold ? " bold" : ""}${s.faint ? " faint" : ""}`,
        ...group,
        style: `stroke: var(--${s.colour}); stroke-dasharray: ${s.dash ?? "none"}`,
      }),
    );
    if (s.xs.length === 1) plot.append(dot(0, 3));
    plot.append(...(s.dots ?? []).map(k => dot(k, 4.5)));
  }
  drawNames(svg, right);
  const cursor = svg.appendChild(el("svg:line", { y1: TOP, y2: bottom, class: "cursor" }));
  size(f, height + (xName ? 14 : 0) + (under ? under(svg, x, height, width) : 0));
  const legend =
    series.length > 1 && !tip
      ? series.map(s => el("span", { className: "key", style: `--c: var(--${s.colour})` }, s.name))
      : [];
  host.replaceChildren(el("h3", {}, title, ...legend), svg);

  let k = xs.length - 1;
  let one = series.at(-1); // the step and, where there is `tip`, the line that are told of
  const away = step => Math.abs(step - xs[k]);
  const nearest = s =>
    s.xs.reduce((best, step, i) => (away(step) < away(s.xs[best]) ? i : best), 0);
  const value = s => s.ys[nearest(s)] ?? -Infinity;
  function point(spoken, level = height / 2) {
    const p = svg.getBoundingClientRect();
    const here = x(xs[k]);
    cursor.setAttribute("x1", here);
    cursor.setAttribute("x2", here);
    cursor.setAttribute("class", "cursor on");
    // Another step where it is measured less often.
    const when = (s, i) => (s.xs[i] === xs[k] ? "" : `, at step ${formatCount(s.xs[i])}`);
    const says = (s, i) => `${s.name} ${formatWithError(s.ys[i], s.errors?.[i])}${when(s, i)}`;
    const nodes = tip
      ? tip(one, nearest(one))
      : [
          el("b", {}, `step ${formatCount(xs[k])}`),
          ...series.map(s => el("div", {}, says(s, nearest(s)))),
        ];
    near?.(one);
    showTooltip(nodes, p.left + (here * p.width) / width, p.top + level);
    if (spoken) announce(nodes);
  }
  const leave = () => {
    cursor.setAttribute("class", "cursor");
    showTooltip(null);
    near?.(null);
  };
  svg.onpointermove = svg.onpointerdown = event => {
    const p = svg.getBoundingClientRect();
    const level = ((event.clientY - p.top) * width) / p.width;
    const along = (((event.clientX - p.left) * width) / p.width - left) / (right - left);
    const step = first + along * (last - first);
    if (level > height || event.target.closest("[data-birth]")) return;
    k = xs.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(xs[best] - step) ? i : best), 0);
    if (!tip) return point();
    const off = s =>
      Math.abs(y(value(s)) - level) + Math.abs(x(s.xs[nearest(s)]) - x(xs[k])) + (s.faint ? 5 : 0);
    one = series.reduce((best, s) => (off(s) < off(best) ? s : best));
    point(false, level);
  };
  svg.onpointerleave = svg.onblur = leave;
  svg.onkeydown = event => {
    const to = { ArrowLeft: k - 1, ArrowRight: k + 1, Home: 0, End: xs.length - 1 }[event.key];
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (event.target !== svg || (to === undefined && !(tip && way))) return;
    event.preventDefault();
    if (to === undefined) {
      // the next line above or below
      const order = series.filter(s => !s.faint || s === one).sort((a, b) => value(a) - value(b));
      one = order[order.indexOf(one) + way] ?? one;
    } else k = Math.max(0, Math.min(xs.length - 1, to));
    point(true);
  };
}

// A band of one standard error to either side of a line.
function band(s, x, y) {
  const at = s.xs.map((_, k) => k).filter(k => s.ys[k] !== null);
  const edge = sign => k => `${x(s.xs[k])} ${y(s.ys[k] + sign * (s.errors[k] ?? 0))}`;
  const d = `M${[...at.map(edge(1)), ...at.toReversed().map(edge(-1))].join("L")}Z`;
  return el("svg:path", { d, class: "band", style: `fill: var(--${s.colour})` });
}

// ---- dots against a value

// points: [{at, y, group, error, small, nodes}], nodes what the tip tells; joined: lines of such points, with a name.
// along: {axis: "log", "linear" or "names", ticks: [[at, text]], name}; `ringed` is the group that is marked;
// whole: whether all values of the axis are shown, and what is far above the others in its place.
// `near(point)` hears what is pointed at, `pick(point)` what is chosen.
export function dots(
  host,
  { title, points, joined, along, ringed, near, pick, whole = false, height = 230 },
) {
  points = points.filter(p => p.y !== null && p.at !== null && p.at !== undefined);
  host.hidden = !points.length;
  if (!points.length) return;
  // What lies far above most would flatten the rest: it is marked at the upper edge.
  const ys = points.map(p => p.y).sort((a, b) => a - b);
  const middle = ys[ys.length >> 1];
  const cap = middle > ys[0] && !whole ? middle + 6 * (middle - ys[0]) : Infinity;
  const least = Math.min(...points.map(p => p.y - (p.error ?? 0)));
  const most = Math.min(cap, Math.max(...points.map(p => p.y + (p.error ?? 0))));
  const margin = most > least ? (most - least) * 0.06 : Math.abs(least || 1) / 10;
  const [low, high] = [least - margin, most + margin];
  const bottom = height - UNDER;
  const y = scale(low, high, bottom, TOP);
  const inside = v => Math.max(TOP - 3, y(v));
  const groupsOf = line => [...new Set(line.map(p => p.group))].join(" ");
  const named = joined
    .filter(line => line.name)
    .map(line => ({
      text: line.name,
      y: inside(line.at(-1).y),
      group: groupsOf(line),
      colour: "quiet",
    }));
  const [room, drawNames] = endNames(host, named, bottom);
  const f = frame(host, height, room);
  const { svg, left, right, plot } = f;

  const names = along.axis === "names";
  const pad = names ? 0 : 14;
  const places = along.whole ? along.ticks.map(([at]) => at) : points.map(p => p.at);
  const [first, last] = names
    ? [-0.5, along.ticks.length - 0.5]
    : [Math.min(...places), Math.max(...places)];
  const x =
    last > first
      ? scale(first, last, left + pad, right - pad, along.axis === "log")
      : () => (left + right) / 2;
  const slot = names ? Math.max(26, (right - left) / along.ticks.length - 6) : 90;
  const shown = [];
  for (const [at, text] of along.ticks) {
    // those that do not touch
    const name = shorten(text, slot);
    const half = textWidth(name) / 2;
    if (!shown.length || x(at) - half > shown.at(-1)[2] + 5)
      shown.push([x(at), name, x(at) + half]);
  }
  axes(f, y, ticks(low, high, 5), shown, along.name);
  size(f, height + 14);
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", title);
  svg.append(plot);
  for (const line of joined)
    plot.append(
      el("svg:path", {
        class: "line joined",
        "data-group": groupsOf(line),
        d: line.map((p, k) => `${k ? "L" : "M"}${x(p.at)} ${inside(p.y)}`).join(""),
      }),
    );
  drawNames(svg, right);
  const onTop = [...points].sort((a, b) => (b.small ?? 0) - (a.small ?? 0) || b.group - a.group);
  const marks = onTop.map(p => {
    const mark = el("svg:g", {
      class: "dot",
      "data-group": p.group,
      role: "button",
      "aria-label": p.nodes.map(n => n.textContent).join(", "),
      style: `color: var(--s${p.group})`,
    });
    const [cx, cy] = [x(p.at), y(p.y)];
    if (p.error) {
      const [y1, y2] = [inside(p.y + p.error), y(p.y - p.error)];
      mark.append(el("svg:line", { x1: cx, x2: cx, y1, y2, class: "error" }));
    }
    mark.append(
      p.y > high
        ? el("svg:path", {
            d: `M${cx - 5} ${TOP + 5}L${cx} ${TOP - 3}L${cx + 5} ${TOP + 5}Z`,
            class: "beyond",
          })
        : el("svg:circle", { cx, cy, r: p.small ? 2.6 : 5.5, class: p.small ? "small" : "" }),
    );
    if (p.group === ringed && !p.small)
      mark.append(el("svg:circle", { cx, cy, r: 9, class: "ring" }));
    addTooltip(
      mark,
      () => p.nodes.map(node => node.cloneNode(true)),
      () => pick(p),
      on => near(on ? p : null),
    );
    return plot.appendChild(mark);
  });
  addArrowKeys(svg, marks, 1, () => {}, marks.length - 1);
  host.replaceChildren(el("h3", {}, title), svg);
}
