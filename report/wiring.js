// Who feeds whom: layers × heads, with a line from each head to those above that it feeds, as thick
// as the share of their score that is lost without it. Stands after charts.js and maps.js.

const THROUGH = { keys: "c1", queries: "c2", values: "c4" };

// wires: [{score, to, part, from, share, error}], `to`, `from` and `chosen` as [layer, head]
function drawWiring(host, [L, H], wires, title, chosen, choose, least = 0.05) {
  const shown = wires.filter(({ share, error }) => Math.abs(share) >= least && Math.abs(share) >= 2 * error);
  const width = Math.max(240, Math.min(640, host.clientWidth || 480)), high = L < 8 ? 62 : 34, top = 18;
  const x = h => 44 + (h + 0.5) * (width - 60) / H, y = l => top + (L - 1 - l) * high, radius = H > 16 ? 6 : 13;
  const svg = el("svg:svg", { viewBox: `0 0 ${width} ${top + L * high - high + 34}`, role: "group", "aria-label": title });
  const marks = [];
  const place = ([l, h]) => [x(h), y(l)];
  for (const { score, to, part, from, share, error } of shown) {
    const [x1, y1] = place(from), [x2, y2] = place(to), bend = { keys: -14, queries: 14, values: 0 }[part];
    const mark = el("svg:path", { d: `M${x1} ${y1 - radius}Q${(x1 + x2) / 2 + bend} ${(y1 + y2) / 2} ${x2} ${y2 + radius}`,
      class: "wire", tabindex: -1, role: "img", style: `stroke: var(--${THROUGH[part]}); stroke-width: ${
        (1 + 9 * Math.min(1, Math.abs(share))).toFixed(1)}; ${share < 0 ? "stroke-dasharray: 2 3" : ""}` });
    const nodes = () => [el("div", {}, `${headName(...from)} → ${headName(...to)}, through its ${part}`),
      el("div", { className: "value" }, el("b", {}, `${(100 * share).toFixed(0)} ± ${(100 * error).toFixed(0)}%`),
        part === "values" ? " of what it writes" : ` of its ${plain(score)} score`, " is lost without it")];
    mark.setAttribute("aria-label", nodes().map(node => node.textContent).join(", "));
    telling(mark, nodes);
    marks.push(svg.appendChild(mark));
  }
  const busy = new Set(shown.flatMap(({ to, from }) => [headName(...to), headName(...from)]));
  for (let l = 0; l < L; l++) {
    svg.append(el("svg:text", { x: 4, y: y(l) + 4 }, `L${l}`));
    for (let h = 0; h < H; h++) {
      const name = headName(l, h), here = l === chosen[0] && h === chosen[1];
      const node = el("svg:g", { class: `node${busy.has(name) ? " busy" : ""}${here ? " here" : ""}` },
        el("svg:circle", { cx: x(h), cy: y(l), r: radius }),
        ...radius > 8 ? [el("svg:text", { x: x(h), y: y(l) + 3.5, "text-anchor": "middle" }, `H${h}`)] : []);
      node.onclick = () => choose(l, h);
      svg.append(node);
    }
  }
  roving(svg, marks, 1, () => {}, 0);
  const keys = Object.entries(THROUGH).map(([part, colour]) =>
    el("span", { className: "key", style: `--c: var(--${colour})` }, part));
  host.replaceChildren(el("h3", {}, title, ...keys), svg, ...shown.length ? [] : [el("p", { className: "quiet" },
    "No head feeds another one yet, as far as can be told.")]);
}
