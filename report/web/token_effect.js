// What predictions needed: unpacked when it is looked at; the stripes that scores read. Stands after maps.js; knows
// nothing of the run.

import { el } from "./dom.js";
import { halfTable } from "./float16.js";
import { formatSigned } from "./format.js";
import { labelToken } from "./labels.js";
import { unpacked } from "./packed.js";

// What is known of the predictions of one probe at one step.
export async function explainedOf([floats, ids], [L, H], { T, tokens, needs }) {
  const bytes = await unpacked(floats);
  const named = new Int32Array((await unpacked(ids)).buffer);
  const half = halfTable();
  const size = bytes.length / 2;
  let start = 0;
  const part = length => {
    const from = start;
    start += length;
    return k => half[(bytes[size + from + k] << 8) | bytes[from + k]];
  };
  const need = part((T * (T + 1)) / 2);
  const kl = part((T * (T + 1)) / 2);
  const head_effect = part(L * H * T);
  const lens = part((L + 1) * T);
  const parts = L * (H + 1) + 2;
  const direct = part(parts * T * 6);
  const chance = part(T * 5);
  return {
    L,
    H,
    T,
    tokens,
    parts,
    largest: Math.max(...needs.map(one => one?.[2] ?? 0)),
    signed: true,
    n: T,
    norms: null,
    at: (l, h, i, j) => need((i * (i + 1)) / 2 + j),
    bound: () => 0,
    kl: (i, j) => kl((i * (i + 1)) / 2 + j),
    head_effect: (l, h, i) => head_effect((l * H + h) * T + i),
    lens: (k, i) => lens(k * T + i),
    loss: i => lens(L * T + i),
    direct: (p, i, target) => direct((p * T + i) * 6 + target),
    predicted: i =>
      Array.from({ length: 5 }, (_, k) => ({ id: named[i * 5 + k], chance: chance(i * 5 + k) })),
    writes: (l, h, i) =>
      Array.from({ length: 6 }, (_, k) => named[T * 5 + ((l * H + h) * T + i) * 6 + k]),
  };
}

// What is said of a cell of needs.
export function needReading(view, i, j) {
  const value = view.at(0, 0, i, j);
  return [
    el("div", {}, "after ", ...labelToken(view, i), ", with ", ...labelToken(view, j), " hidden"),
    el(
      "div",
      { className: "value" },
      el("b", {}, formatSigned(value)),
      Number.isNaN(value)
        ? " the text ends here: what follows is not known"
        : " nats for the token that follows",
    ),
    ...(j < i
      ? [el("div", {}, `the whole prediction changes by ${view.kl(i, j).toFixed(2)} nats (KL)`)]
      : []),
  ];
}

// A need as it is coloured: what is under a tenth of a nat fades.
export const FAINT = 0.1;
export const faded = need => (Math.abs(need) < FAINT ? need / 9 : need);

// The stripes that the scores of repeats read: [score, colour, tokens back]
export const stripes = period => [
  ["duplicate token", "c2", period],
  ["induction", "c3", period - 1],
];

export function drawStripes(period) {
  return (context, { left, cell, high }) => {
    context.lineWidth = Math.max(1, Math.min(2, cell / 8));
    for (const [, colour, back] of stripes(period)) {
      context.strokeStyle = resolved(`var(--${colour})`);
      context.beginPath();
      for (let i = period; i < 2 * period; i++)
        context.rect(left + (i - back) * cell, i * high, cell, high);
      context.stroke();
    }
  };
}

// A colour of the style sheet as a canvas takes it.
export function resolved(colour) {
  const probe = document.body.appendChild(el("i", { style: `color: ${colour}` }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
