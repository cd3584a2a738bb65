import { createCellGrid } from "./cell_grid.js";
import { colorIndex } from "./colors.js";
import { bdi, el } from "./dom.js";
import { formatNumber, formatSigned, shortenToken } from "./format.js";
import { headGridLayout, headName } from "./labels.js";

// A part of the direct contributions: its name, and of a head its place.
function partOf(p, L, H) {
  if (p === 0) return { name: "embedding" };
  if (p === L * (H + 1) + 1) return { name: "biases" };
  const layer = Math.floor((p - 1) / (H + 1));
  const head = (p - 1) % (H + 1);
  return head === H ? { name: `L${layer} MLP` } : { name: headName(layer, head), layer, head };
}

// The next tokens that the model expects after token i; `pick(k)` takes one of them as the target.
export function expected(known, words, i, target, pick) {
  const next = known.tokens[i + 1] ?? null;
  const loss = known.loss(i);
  const percent = share => (share >= 0.001 ? share.toFixed(3) : share.toExponential(1));
  const chip = (k, text, share, real, was = share) =>
    el(
      "button",
      {
        type: "button",
        className: `chance${real ? " real" : ""}`,
        "aria-pressed": target === k,
        style: `--w: ${(100 * share).toFixed(1)}%`,
        onclick: () => pick(k),
      },
      bdi(shortenToken(text), "token"),
      el("b", {}, percent(share)),
      ...(percent(was) === percent(share) ? [] : [el("small", {}, ` was ${percent(was)}`)]),
    );
  const likeliest = known
    .predicted(i)
    .map((one, k) => ({ ...one, k: k + 1, text: words[one.id] ?? "" }))
    .filter(({ id }) => id >= 0);
  const hit = next === null ? -1 : likeliest.findIndex(one => one.text === next.slice(0, 40));
  const rows = likeliest.map(({ k, text, chance, was }) =>
    chip(k, text, chance, k === hit + 1 && hit >= 0, was),
  );
  if (next !== null && hit < 0) rows.push(chip(0, next, Math.exp(-loss), true));
  return {
    rows,
    says:
      next === null
        ? ["The text ends here."]
        : [
            "The next token, ",
            bdi(shortenToken(next), "token"),
            `, has a loss of ${formatNumber(loss)} nats.`,
          ],
  };
}

// Lines with bars to either side of zero. lines: [{name, value, more, pick}]
function bars(lines, write = formatSigned) {
  const most = Math.max(1e-9, ...lines.map(line => Math.abs(line.value) || 0));
  const kind = write === formatSigned ? "bars" : "bars plain";
  return el(
    "ol",
    { className: kind },
    ...lines.map(({ name, value, more = "", pick }) => {
      const size = (50 * Math.abs(value || 0)) / most;
      const side = value < 0 ? "under" : "over";
      const label = pick
        ? el("button", { type: "button", onclick: pick }, name)
        : el("span", {}, name);
      return el(
        "li",
        {},
        label,
        el("i", { className: side, style: `--w: ${size.toFixed(1)}%` }),
        el("b", {}, write(value)),
        el("span", { className: "quiet" }, more),
      );
    }),
  );
}

// Draws the card of token i into `host`. how: {layer, head, target, tied, words, choose(layer, head)}
export function drawCard(host, known, i, how) {
  const { L, H } = known;
  const { layer, head, target, words } = how;
  const spelt = id => (/[^\ufffd]/.test(words[id] ?? "") ? shortenToken(words[id]) : `#${id}`); // a part of a character has none
  const chips = ids =>
    ids
      .filter(id => id >= 0)
      .flatMap(id => [el("bdi", { className: "token chip" }, spelt(id)), " "]);
  const lens = Array.from({ length: L + 1 }, (_, k) => ({
    name: k ? `block ${k - 1}` : "embedding",
    value: known.lens(k, i),
  }));
  const parts = Array.from({ length: known.parts }, (_, p) => {
    const part = partOf(p, L, H);
    const inside = part.head !== undefined;
    return {
      ...part,
      value: known.direct(p, i, target),
      pick: inside ? () => how.choose(part.layer, part.head) : null,
      more: inside ? formatSigned(known.head_effect(part.layer, part.head, i)) : "",
    };
  });
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  const order = [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const least = order.slice(10);
  const rest = least.reduce((sum, part) => sum + part.value, 0);
  const lines = [
    ...order.slice(0, 10),
    ...(least.length ? [{ name: `${least.length} more`, value: rest }] : []),
  ];
  const text = target
    ? (words[known.predicted(i)[target - 1].id] ?? "")
    : (known.tokens[i + 1] ?? "");
  const ids = known.writes(layer, head, i);
  const box = (title, ...rest) => el("div", {}, el("h4", {}, ...title), ...rest);
  const grid = el("div", { className: "cells" });
  host.replaceChildren(
    box(
      ["Loss after each block"],
      el(
        "p",
        { className: "quiet" },
        "The loss of the next token, in nats, if the model ended there (the “logit lens”).",
      ),
      bars(lens, formatNumber),
      ...(how.tied
        ? [
            el(
              "p",
              { className: "quiet" },
              "Input and output share one matrix, so " +
                "at the embedding the model predicts the token itself.",
            ),
          ]
        : []),
    ),
    box(
      ["Direct contributions to the logit of ", bdi(shortenToken(text), "token")],
      el(
        "p",
        { className: "quiet" },
        `They sum to the logit less the mean of all logits, ${formatSigned(whole)}. ` +
          "Direct: not through later layers. The grey number: how much the loss rises without the head, all its effects " +
          "counted.",
      ),
      bars(lines),
    ),
    box(
      [`What ${headName(layer, head)} writes here`],
      el("p", {}, "up ", ...chips(ids.slice(0, 3))),
      el("p", {}, "down ", ...chips(ids.slice(3))),
      el(
        "p",
        { className: "quiet" },
        "The tokens whose logits it raises and lowers most, directly.",
      ),
    ),
    box(
      ["Nats lost here without each head"],
      el(
        "p",
        { className: "quiet" },
        "At this one token; “importance” is the mean over the validation text.",
      ),
      grid,
    ),
  );
  const most = Math.max(
    0.1,
    ...Array.from(
      { length: L * H },
      (_, k) => Math.abs(known.head_effect(Math.floor(k / H), k % H, i)) || 0,
    ),
  );
  const lost = (l, h) => known.head_effect(l, h, i);
  createCellGrid(
    grid,
    `nats lost at token ${i} without each head`,
  )({
    ...headGridLayout(L, H, 260),
    signed: true,
    pick: how.choose,
    level: (l, h) => colorIndex(lost(l, h) / most, true),
    write: (l, h) => formatSigned(lost(l, h)),
    tell: (l, h) => [
      el("div", {}, `without ${headName(l, h)}`),
      el(
        "div",
        { className: "value" },
        el("b", {}, formatSigned(lost(l, h))),
        " nats for the token that follows",
      ),
    ],
  });
}

// Draws the ten largest terms of a cell into `host`, and the sum of the others.
export function drawWhy(host, terms, tokens, title) {
  const order = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const rest = order.slice(10);
  const sum = of => of.reduce((total, { value }) => total + value, 0);
  const line = ({ query, key, value }) => ({ name: `${query} × ${key}`, value });
  host.replaceChildren(
    el("h3", {}, ...title),
    el(
      "p",
      { className: "quiet" },
      `Its score before softmax, less the mean of its row, is ${formatSigned(sum(terms))}: the sum of what wrote the query ` +
        "× what wrote the key.",
    ),
    bars([
      ...order.slice(0, 10).map(line),
      ...(rest.length ? [{ name: `${rest.length} more`, value: sum(rest) }] : []),
    ]),
  );
}
