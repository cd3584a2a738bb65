// What predictions needed: unpacked when it is looked at, on a signed scale; the stripes that scores
// read. Stands after maps.js; knows nothing of the run.

// ---- what is known of the predictions of one probe at one step

async function explainedOf([floats, ids], [L, H], { T, tokens, needed }) {
  const bytes = await unpacked(floats), named = new Int32Array((await unpacked(ids)).buffer);
  const half = halfTable(), size = bytes.length / 2;
  let start = 0;
  const part = length => {
    const from = start;
    start += length;
    return k => half[bytes[size + from + k] << 8 | bytes[from + k]];
  };
  const need = part(T * (T + 1) / 2), knockout = part(L * H * T), lens = part((L + 1) * T);
  const parts = L * (H + 1) + 2, direct = part(parts * T * 6), chance = part(T * 5);
  return {
    L, H, T, tokens, parts, largest: needed, signed: true, n: T, block: 1, norms: null,
    at: (l, h, i, j) => need(i * (i + 1) / 2 + j), bound: () => 0,
    knockout: (l, h, i) => knockout((l * H + h) * T + i),
    lens: (k, i) => lens(k * T + i), loss: i => lens(L * T + i),
    direct: (p, i, target) => direct((p * T + i) * 6 + target),
    predicted: i => Array.from({ length: 5 }, (_, k) => ({ id: named[i * 5 + k], chance: chance(i * 5 + k) })),
    writes: (l, h, i) => Array.from({ length: 6 }, (_, k) => named[T * 5 + ((l * H + h) * T + i) * 6 + k]),
  };
}

// ---- a signed scale: red needed, blue in the way, the square root of the size as for weights

const signedLevel = share => // 128 is nothing, and what is not known
  128 + (Math.sign(share) || 0) * Math.min(127, Math.round(127 * Math.sqrt(Math.abs(share) || 0)));

function signedRgb(index) {
  const ends = isDark() ? [[70, 160, 255], [32, 32, 39], [255, 92, 120]]
    : [[20, 100, 190], [250, 249, 247], [179, 18, 63]];
  const t = (index - 128) / 127, [from, to] = t < 0 ? [ends[1], ends[0]] : [ends[1], ends[2]];
  return from.map((c, k) => Math.round(c + Math.min(1, Math.abs(t)) * (to[k] - c)));
}

function signedPalette() {
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const [r, g, b] = signedRgb(i);
    return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  });
}

const signed = x => Number.isFinite(x) ? `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x).toFixed(2)}` : "–";

function signedBar(host, name, most) {
  const ramp = el("canvas", { className: "ramp", width: 255, height: 1, "aria-hidden": "true" });
  const context = ramp.getContext("2d");
  for (let i = 1; i < 256; i++) { context.fillStyle = `rgb(${signedRgb(i)})`; context.fillRect(i - 1, 0, 1, 1); }
  const left = m => 50 + 50 * Math.sign(m) * Math.sqrt(Math.abs(m)), back = m => -50 - 50 * Math.trunc(m);
  const tick = m => el("span", { style: `left: ${left(m)}%; translate: ${back(m)}%` }, m ? signed(m * most) : "0");
  host.replaceChildren(el("span", {}, name), ramp,
    el("div", { className: "ticks" }, ...[-1, -0.25, 0, 0.25, 1].map(tick)));
}

// What is said of a cell of needs.
function needReading(view, i, j) {
  const value = view.at(0, 0, i, j);
  return [el("div", {}, "after ", ...place(view, i), ", with ", ...place(view, j), " hidden"),
    el("div", { className: "value" }, el("b", {}, signed(value)), Number.isNaN(value)
      ? " the text ends here: what follows is not known" : " nats for the token that follows")];
}

// ---- the stripes that the scores of repeats read: [score, colour, tokens back]

const stripes = period => [["duplicate token", "c2", period], ["induction", "c3", period - 1]];

function drawStripes(period) {
  return (context, { left, cell, high }) => {
    context.lineWidth = Math.max(1, Math.min(2, cell / 8));
    for (const [, colour, back] of stripes(period)) {
      context.strokeStyle = resolved(`var(--${colour})`);
      context.beginPath();
      for (let i = period; i < 2 * period; i++) context.rect(left + (i - back) * cell, i * high, cell, high);
      context.stroke();
    }
  };
}

// A colour of the style sheet as a canvas takes it.
function resolved(colour) {
  const probe = document.body.appendChild(el("i", { style: `color: ${colour}` }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
