// What answers the page in a worker: the model at several steps, its tokenizer, what a reader asks of a text. A question
// is {id, ask, …}; an answer {id, answer}, {id, part} before it, or {id, error}.

import { weightsOf } from "./float16.js";
import { headOf, linear, logitsOf, norm, normalised, Reading, scalesHere } from "./forward.js";
import { why } from "./score_attribution.js";
import { tokenizerOf } from "./tokenize.js";

const CHANCES = 5; // next tokens that are told
export const session = { config: null, tokenizer: null };
export const stopped = {}; // of each question, the last that is not to go on
export const models = new Map(); // step → weights
export const readings = new Map(); // what is read → its Reading

export function readingOf({ step, off = [], name = "" }) {
  const key = JSON.stringify([step, [...off].sort(), name]);
  const found = readings.get(key) ?? new Reading(models.get(step), session.config, off);
  readings.delete(key);
  readings.set(key, found);
  if (readings.size > 6) readings.delete(readings.keys().next().value);
  return found;
}

export function read(asked) {
  const reading = readingOf(asked);
  reading.read(asked.ids, asked.hidden);
  return reading;
}

// ln of the sum of e^z over each row of logits (n, V).
function normalisers(logits, V) {
  return Float64Array.from({ length: logits.length / V }, (_, t) => {
    const row = logits.subarray(t * V, (t + 1) * V);
    const most = row.reduce((a, b) => Math.max(a, b), -Infinity);
    return most + Math.log(row.reduce((sum, z) => sum + Math.exp(z - most), 0));
  });
}

// The places of the n largest numbers, the largest first; of equal ones the first.
function largestOf(numbers, n) {
  const found = [];
  for (let k = 0; k < numbers.length; k++) {
    if (found.length === n && numbers[k] <= numbers[found[n - 1]]) continue;
    let at = found.length;
    while (at > 0 && numbers[found[at - 1]] < numbers[k]) at--;
    found.splice(at, 0, k);
    if (found.length > n) found.pop();
  }
  return found;
}

// What is expected after each token, [{sum, next, chances, follows, loss}]: the likeliest ids and their chances, the
// token that follows and its loss. What is known from before is not computed again, but where another token follows.
function predictions(reading) {
  const { T, ids, known } = reading;
  const V = session.config.vocab_size;
  if (known.length && known.at(-1).follows !== ids[known.length]) known.pop();
  const n = known.length;
  const logits = reading.logits(n);
  const sums = normalisers(logits, V);
  for (let t = n; t < T; t++) {
    const row = logits.subarray((t - n) * V, (t - n + 1) * V);
    const sum = sums[t - n];
    const next = largestOf(row, CHANCES);
    known.push({
      sum,
      next,
      chances: next.map(id => Math.exp(row[id] - sum)),
      follows: ids[t + 1],
      loss: t + 1 < T ? sum - row[ids[t + 1]] : NaN,
    });
  }
  return known;
}

// The loss of the token after i.
function lossAfter(reading, i) {
  const row = reading.logits(i).subarray(0, session.config.vocab_size);
  return normalisers(row, row.length)[0] - row[reading.ids[i + 1]];
}

// The chances that a reading gives to some ids after each token, [[]] of (T), in the order of `ids`.
function chancesOf(reading, ids) {
  const {
    W,
    c,
    last,
    sizes: { C },
  } = reading;
  const x = norm(W, c, "norm", reading.of(last, C));
  const { data: E } = headOf(W);
  return predictions(reading).map(({ sum }, t) =>
    ids[t].map(id => {
      let z = 0;
      for (let k = 0; k < C; k++) z += x[t * C + k] * E[id * C + k];
      return Math.exp(z - sum);
    }),
  );
}

// All maps of a reading, the lower triangles one after the other (L, H, T (T + 1) / 2), their norms (L, H, T), and the
// largest product of both.
function mapsOf(reading) {
  const {
    T,
    sizes: { L, H },
  } = reading;
  const N = (T * (T + 1)) / 2;
  const maps = new Float32Array(L * H * N);
  const norms = new Float32Array(L * H * T);
  let largest = 0;
  reading.measure();
  for (let l = 0; l < L; l++)
    for (let h = 0; h < H; h++) {
      const { data } = reading.layers[l].weights[h];
      const row = reading.layers[l].norms[h].data.subarray(0, T);
      maps.set(data.subarray(0, N), (l * H + h) * N);
      norms.set(row, (l * H + h) * T);
      for (let i = 0, at = 0; i < T; i++)
        for (let j = 0; j <= i; j++, at++) largest = Math.max(largest, data[at] * row[j]);
    }
  return { maps, norms, largest };
}

// The card of token i (attention_maps/logit_attribution.py), and the words that it names.
function cardOf(reading, i, [layer, head]) {
  const {
    W,
    c,
    ids,
    T,
    layers,
    last,
    sizes: { L, H, C },
  } = reading;
  const V = c.vocab_size;
  const row = rows => rows.data.subarray(i * C, (i + 1) * C);
  const xs = [...layers.map(l => row(l.x)), row(last)];
  const logits = xs.map(x => logitsOf(W, c, x));
  const next = largestOf(logits[L], CHANCES);
  const told = [ids[i + 1] ?? next[0], ...next];
  const lens = logits.map(z => (i + 1 < T ? normalisers(z, V)[0] - z[told[0]] : NaN));
  const { data: E } = headOf(W);
  const mean = new Float64Array(C);
  const scales = scalesHere(c, row(last));
  const gain = W["norm.weight"]?.data;
  for (let v = 0; v < V; v++) for (let k = 0; k < C; k++) mean[k] += E[v * C + k] / V;
  const push = wrote => normalised(wrote, C, scales, gain);
  const parts = reading
    .parts()
    .filter(({ name }) => !name.endsWith("bias"))
    .map(({ wrote }) => push(wrote.slice(i * C, (i + 1) * C)));
  const direct = parts.map(y =>
    told.map(id => y.reduce((sum, x, k) => sum + x * (E[id * C + k] - mean[k]), 0)),
  );
  const middle = logits[L].reduce((a, b) => a + b, 0) / V;
  direct.push(
    told.map((id, k) => logits[L][id] - middle - direct.reduce((sum, part) => sum + part[k], 0)),
  );
  const pushed = linear({ "head.weight": headOf(W) }, "head", parts[1 + layer * (H + 1) + head], 1);
  const writes = [
    ...largestOf(pushed, 3),
    ...largestOf(
      pushed.map(z => -z),
      3,
    ),
  ];
  return {
    i,
    lens,
    direct,
    writes,
    of: [layer, head],
    words: Object.fromEntries([...told, ...writes].map(id => [id, session.tokenizer.word(id)])),
  };
}

const pause = () => new Promise(go => setTimeout(go)); // in which another question may come in

export const ANSWERS = {
  // The model's weights at a step, packed as report/pack.py packs them.
  async weights({ step, tensors, packed }) {
    const text = atob(packed);
    const bytes = Uint8Array.from(text, c => c.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    models.set(step, weightsOf(tensors, new Uint8Array(await new Response(plain).arrayBuffer())));
  },
  begin(given) {
    session.config = given.config;
    session.tokenizer = tokenizerOf(given.tokenizer);
  },
  encode({ text }) {
    return session.tokenizer.encode(text);
  },
  decode({ ids }) {
    return session.tokenizer.decode(ids);
  },
  words({ ids }) {
    return ids.map(session.tokenizer.word);
  },
  logits(asked) {
    return read(asked).logits();
  },
  maps(asked) {
    const reading = read(asked);
    const {
      T,
      sizes: { L, H },
    } = reading;
    const whole = new Float32Array(L * H * T * T);
    for (let k = 0; k < L * H; k++)
      for (let i = 0; i < T; i++) {
        const { data } = reading.layers[Math.floor(k / H)].weights[k % H];
        whole.set(data.subarray((i * (i + 1)) / 2, ((i + 1) * (i + 2)) / 2), (k * T + i) * T);
      }
    return whole;
  },
  // All that follows a text: maps, norms, predictions, words; what was, where heads are off or tokens hidden.
  look(asked) {
    const reading = read(asked);
    const known = predictions(reading);
    const next = known.map(one => one.next);
    const found = {
      ...mapsOf(reading),
      next,
      chances: known.map(one => one.chances),
      losses: known.map(one => one.loss),
    };
    const plain =
      asked.off.length || asked.hidden.length ? read({ ...asked, off: [], hidden: [] }) : null;
    const was = plain && {
      chances: chancesOf(plain, next),
      losses: plain.known.map(one => one.loss),
    };
    return {
      ...found,
      was,
      words: Object.fromEntries(next.flat().map(id => [id, session.tokenizer.word(id)])),
    };
  },
  card(asked) {
    return cardOf(read(asked), asked.i, asked.of);
  },
  // Nats that the token after i costs more without each head, (L, H), as parts.
  async head_effect({ i, ...asked }, tell, id) {
    const ids = asked.ids.slice(0, i + 2);
    const before = lossAfter(read({ ...asked, ids, name: "k" }), i);
    for (let k = 0; k < session.config.n_layer * session.config.n_head; k++) {
      const name = `L${Math.floor(k / session.config.n_head)}H${k % session.config.n_head}`;
      const off = [...asked.off, name];
      const reading = new Reading(models.get(asked.step), session.config, off);
      reading.read(ids, asked.hidden);
      tell({ k, nats: lossAfter(reading, i) - before });
      await pause();
      if (id <= stopped.head_effect) return;
    }
  },
  // What each prediction needed (attention_maps/ablation.py), a hidden token at a time, the last first.
  async token_effect(asked, tell, id) {
    const V = session.config.vocab_size;
    const reading = readingOf({ ...asked, name: "token_effect" });
    const { ids } = asked;
    const T = ids.length;
    reading.read(ids, asked.hidden);
    const before = reading.logits();
    const sums = normalisers(before, V);
    for (let j = T - 2; j >= 0; j--) {
      if (asked.hidden.includes(j)) continue;
      reading.read(ids, [...asked.hidden, j]);
      const after = reading.logits(j + 1);
      const now = normalisers(after, V);
      const need = [];
      const kl = [];
      for (let i = j + 1; i < T; i++) {
        const a = i * V;
        const b = (i - j - 1) * V;
        const p = id => before[a + id] - sums[i];
        const q = id => after[b + id] - now[i - j - 1];
        let apart = 0;
        for (let v = 0; v < V; v++) apart += Math.exp(p(v)) * (p(v) - q(v));
        need.push(i + 1 < T ? p(ids[i + 1]) - q(ids[i + 1]) : NaN);
        kl.push(apart);
      }
      tell({ j, effects: need, kl });
      await pause();
      if (id <= stopped.token_effect) return;
    }
  },
  // The terms of a score before softmax, by the text as it is without a change.
  why({ layer, head, i, j, ...asked }) {
    return why(read(asked), layer, head, i, j);
  },
  // Continue a text token by token, as decoding.py does: where it is longer than the block, in a window that moves.
  async goOn({ temperature, most, ...asked }, tell, id) {
    const ids = [...asked.ids];
    const T = session.config.block_size;
    const stride = Math.max(1, Math.floor(T / 4));
    for (let made = 0; made < most && !(id <= stopped.goOn); made++) {
      const start = Math.max(0, Math.ceil((ids.length - T) / stride)) * stride;
      const hidden = asked.hidden.map(j => j - start).filter(j => j >= 0);
      const reading = read({ ...asked, ids: ids.slice(start), hidden, name: "on" });
      const z = reading.logits(reading.T - 1);
      ids.push(temperature > 0 ? drawn(z, temperature) : largestOf(z, 1)[0]);
      tell({ ids, text: session.tokenizer.decode(ids) });
      await pause();
    }
  },
};

// An id drawn by the chances of logits at a temperature.
function drawn(logits, temperature) {
  const z = logits.map(x => x / temperature);
  const [sum] = normalisers(z, z.length);
  let left = Math.random();
  for (let id = 0; id < z.length; id++) if ((left -= Math.exp(z[id] - sum)) < 0) return id;
  return largestOf(logits, 1)[0];
}
