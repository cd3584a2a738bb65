// Where each head mattered: the tokens of validation text at which it saved most, and cost most. Stands after terms.js.

const MOST_SAVED = 10, MOST_COST = 3, BEFORE = 12, AFTER = 4; // snippets; tokens around the one that is told of

// What each head was worth at each token, unpacked: `at(layer, head, w, i)` nats that it saved at token i + 1 of window
// w.
async function worthOf({ shape: [W, T], words, blobs: [gains, ids] }) {
  const bytes = await unpacked(gains), half = halfTable(), size = bytes.length / 2;
  const places = new Int32Array((await unpacked(ids)).buffer); // (W, T + 1)
  return { W, T, token: (w, i) => words[places[w * (T + 1) + i]], at: (l, h, w, i) => {
    const k = ((l * H + h) * W + w) * T + i;
    return half[bytes[size + k] << 8 | bytes[k]];
  } };
}

function drawWorth(host, worth, layer, head) {
  const { W, T } = worth, all = [];
  for (let w = 0; w < W; w++) for (let i = 0; i < T; i++) {
    const value = worth.at(layer, head, w, i);
    if (!Number.isNaN(value)) all.push({ w, i, value });
  }
  all.sort((a, b) => b.value - a.value);
  const few = Math.max(1, Math.round(all.length / 100));
  const sum = some => some.reduce((total, { value }) => total + value, 0);
  const whole = sum(all), share = Math.round(100 * sum(all.slice(0, few)) / whole);
  const saved = apart(all.filter(({ value }) => value > 0), MOST_SAVED);
  const cost = apart(all.filter(({ value }) => value < 0).reverse(), MOST_COST);
  const most = Math.max(0.1, saved[0]?.value ?? 0);
  const list = (title, found) => el("div", {}, el("h4", {}, title), el("ol", { className: "snippets" },
    ...found.map(one => el("li", {}, el("b", {}, signedText(one.value)), snippet(worth, layer, head, one, most)))));
  host.replaceChildren(el("h3", {}, `Where ${headName(layer, head)} mattered`), el("p", { className: "quiet" },
    `Of ${count(all.length)} tokens of validation text, the loss of the boxed one rises most, or falls most, when the `
    + "head is silent; red: it saved so many nats, blue: it cost them. " + (whole > 0 && share <= 100
      ? `The ${count(few)} tokens at which it saved most (1%) hold ${share}% of its worth.` : "")),
  list("Saved most, nats", saved), list("Cost most, nats", cost));
}

// The first of these tokens, none of them in another's snippet.
function apart(order, most) {
  const found = [];
  for (const one of order) {
    if (found.every(({ w, i }) => w !== one.w || Math.abs(i - one.i) > BEFORE + AFTER)) found.push(one);
    if (found.length === most) break;
  }
  return found;
}

function snippet(worth, layer, head, { w, i }, most) {
  const from = Math.max(0, i + 1 - BEFORE), to = Math.min(worth.T, i + 1 + AFTER);
  return el("span", { className: "snippet" }, ...Array.from({ length: to - from + 1 }, (_, k) => {
    const at = from + k, value = at ? worth.at(layer, head, w, at - 1) : NaN;
    const share = Math.round(60 * Math.min(1, Math.sqrt(Math.abs(value) / most || 0)));
    const colour = value < 0 ? "hindered" : "needed";
    return el("bdi", { className: `token${at === i + 1 ? " told" : ""}`, title: signedText(value),
      style: `background: color-mix(in oklab, var(--${colour}) ${share}%, transparent)` },
    short(worth.token(w, at), 40));
  }));
}
