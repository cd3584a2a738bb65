// A text of the reader's own: read by the model in a worker as it is typed, with heads switched off and tokens hidden,
// and continued. It is one more probe, "your text", in the views of page.js, after which it stands.

const LETTERS = 4000; // of a text in the address
const WAIT = 30; // milliseconds in which keys are gathered

// The worker, made of the page's own text: `ask` gives what it answers, `tell` hears the parts before that.
const engine = {
  worker: null, asked: new Map(), last: 0,
  ask(name, given = {}, tell = () => {}) {
    if (!this.worker) {
      const url = URL.createObjectURL(new Blob([$("engine").textContent], { type: "text/javascript" }));
      this.worker = new Worker(url);
      this.worker.onmessage = ({ data: { id, part, answer, error } }) => {
        const { done, failed, tell: hear } = this.asked.get(id);
        if (part) return hear(part);
        this.asked.delete(id);
        if (error) failed(new Error(error)); else done(answer);
      };
      this.worker.onerror = event => {
        for (const { failed } of this.asked.values()) failed(new Error(event.message ?? "no worker can be made here"));
        this.asked.clear();
      };
    }
    const id = ++this.last;
    return new Promise((done, failed) => {
      this.asked.set(id, { done, failed, tell });
      this.worker.postMessage({ id, ask: name, ...given });
    });
  },
  stop(what) { this.worker?.postMessage({ id: this.last, ask: "stop", what }); },
};

const kept = Object.keys(data.weights?.blobs ?? {}).map(Number); // steps whose weights are in the page
const live = { name: "your text", period: null, needs: [], maps: [], tokens: [], ids: [], T: 0,
  off: [], hidden: [], view: null, explained: null, busy: false, again: false };
const isOwn = () => probe() === live;

let begun = null;
function begin() {
  return begun ??= blobText(data.weights.tokenizer).then(text =>
    engine.ask("begin", { config: data.shapes, tokenizer: JSON.parse(text) }));
}

const blobText = async number => new TextDecoder().decode(await unpacked(number));

// The step whose weights stand for the slider's: the last one up to it, else the first.
const stepOf = step => kept.findLast(one => one <= step) ?? kept[0];

const given = new Map(); // step → when the worker has its weights
async function withWeights(step) {
  await begin();
  if (!given.has(step)) {
    const packed = blobs[data.weights.blobs[step]].textContent;
    given.set(step, engine.ask("weights", { step, tensors: data.weights.tensors, packed }));
  }
  await given.get(step);
}

// A question about ids at the slider's step, with what is switched off.
async function askOf(name, ids, more = {}, tell) {
  const step = stepOf(stepNow());
  await withWeights(step);
  return engine.ask(name, { ids, step, off: live.off, hidden: live.hidden, ...more }, tell);
}

const cannotRun = e => `The model in this page cannot be run (${e.message}); what is stored is shown.`;

// ---- what is typed becomes a view

// Read the text again: at once where nothing is being read, else when that is done.
async function readAgain() {
  if (live.busy) { live.again = true; return; }
  live.busy = true;
  const began = performance.now();
  try {
    await begin();
    const whole = await engine.ask("encode", { text: $("typed").value }), ids = whole.slice(-data.shapes.block_size);
    live.hidden = live.hidden.filter(j => j < ids.length - 1);
    const step = stepOf(stepNow()), found = ids.length ? await askOf("look", ids) : null;
    const left = whole.length - ids.length;
    $("try-says").textContent = !found ? "" : `${some(ids.length, "token")}${left ? `, the last of ${whole.length}` : ""}, `
      + `${Math.round(performance.now() - began)} ms`;
    const edited = ids.length !== live.ids.length || ids.some((id, t) => id !== live.ids[t]);
    if (found) take(ids, await engine.ask("words", { ids }), found, step);
    if (found && isOwn()) showLive(edited);
    drawSwitches();
  } catch (e) {
    $("try-says").textContent = begun && e.message.startsWith("the character") ? `${e.message}.` : cannotRun(e);
  }
  live.busy = false;
  if (live.again) { live.again = false; readAgain(); }
}

// What was found becomes the probe's view, and what is known of its predictions.
function take(ids, tokens, { maps, norms, largest, next, chances, losses, was, words: named }, step) {
  const T = ids.length, N = T * (T + 1) / 2;
  const view = { L, H, T, tokens, n: T, exact: true, norms, largest, size: maps.length, bound: () => 0,
    at: (l, h, i, j) => maps[(l * H + h) * N + i * (i + 1) / 2 + j] };
  Object.assign(data.words, named);
  Object.assign(live, { ids, tokens, T, view, explained: liveExplained(T, tokens, { next, chances, losses, was }, step) });
  ["token_effect", "head_effect"].forEach(what => engine.stop(what));
}

// What is known of the predictions of the text, as needs.js has it of a stored one: the card and what was needed come
// when they are asked for.
function liveExplained(T, tokens, { next, chances, losses, was }, step) {
  const known = { L, H, T, tokens, parts: L * (H + 1) + 2, largest: 1e-3, signed: true, n: T, norms: null, step, losses,
    need: [], lost: [], card: null, was };
  const none = () => NaN, card = read => known.card ? read(known.card) : NaN;
  return Object.assign(known, {
    at: (l, h, i, j) => j < i ? known.need[j]?.need[i - j - 1] ?? NaN : 0, bound: none,
    kl: (i, j) => known.need[j]?.kl[i - j - 1] ?? NaN, loss: i => losses[i],
    head_effect: (l, h, i) => known.card?.i === i ? known.lost[l * H + h] ?? NaN : NaN,
    lens: k => card(({ lens }) => lens[k]), direct: (p, i, target) => card(({ direct }) => direct[p][target]),
    predicted: i => next[i].map((id, k) => ({ id, chance: chances[i][k], was: was?.chances[i][k] })),
    writes: (l, h) => known.card?.of[0] === l && known.card.of[1] === h ? known.card.writes : [],
  });
}

// Show the text, and what was held in it where it is the same text.
function showLive(edited) {
  const { held, target } = state;
  [current, explained] = [live.view, live.explained];
  setUpText();
  const stays = live.wanted ?? (edited ? null : held);
  Object.assign(state, { held: Math.min(stays ?? live.T - 1, live.T - 1), fresh: false, target });
  live.wanted = null;
  drawAttention();
  if (state.needs) askNeeds();
  keepAddress();
}

// The card of the token that is held, when it is there.
async function askCard(i, draw) {
  const known = live.explained, of = [state.layer, state.head], key = JSON.stringify([i, of]);
  if (known.asked === key) return;
  const same = known.card?.i === i;
  known.asked = key;
  const card = await askOf("card", live.ids, { i, of });
  if (known !== live.explained || known.asked !== key) return;
  Object.assign(data.words, card.words);
  Object.assign(known, { card }, same ? {} : { lost: [] });
  draw();
  if (same || i + 1 >= live.T) return;
  await askOf("head_effect", live.ids, { i }, ({ k, nats }) => { known.lost[k] = nats; });
  if (known === live.explained && known.asked === key) draw();
}

// What predictions needed, a column at a time.
async function askNeeds() {
  const known = live.explained;
  if (known.asksNeeds) return;
  known.asksNeeds = true;
  let drawn = 0;
  await askOf("token_effect", live.ids, {}, ({ j, need, kl }) => {
    known.need[j] = { need, kl };
    known.largest = need.reduce((most, x) => Math.max(most, Math.abs(x) || 0), known.largest);
    if (known !== live.explained || !state.needs || performance.now() - drawn < 200) return;
    drawn = performance.now();
    drawAttention();
  });
  if (known === live.explained && state.needs && isOwn()) drawAttention();
}

// ---- switches

function toggle(list, one) {
  const at = list.indexOf(one);
  if (at < 0) list.push(one); else list.splice(at, 1);
  readAgain();
}

// A head off, or on again; a token hidden from all later ones, or seen again.
const toggleHead = (layer, head) => toggle(live.off, headName(layer, head));
const toggleToken = i => toggle(live.hidden, i);

function drawSwitches() {
  const mine = isOwn(), { layer, head, held } = state, name = headName(layer, head);
  $("switches").hidden = !mine;
  $("head-off").textContent = `switch ${name} ${live.off.includes(name) ? "on" : "off"} (x)`;
  $("hide").hidden = held === null || held >= live.T - 1;
  $("hide").textContent = `${live.hidden.includes(held) ? "show" : "hide"} token ${held} (h)`;
  $("reset").disabled = !live.off.length && !live.hidden.length;
  const off = [...live.off, ...live.hidden.map(j => `token ${j}`)], mean = of => {
    const found = of.filter(Number.isFinite);
    return found.length ? found.reduce((a, b) => a + b) / found.length : NaN;
  };
  const { losses, was } = live.explained ?? { losses: [] };
  $("changed").replaceChildren(...losses.length > 1 ? [`Its tokens cost ${figure(mean(losses))} nats in the mean`,
    ...was ? [`; with nothing off it was ${figure(mean(was.losses))}. Off: ${off.join(", ")}.`] : ["."]] : []);
  $("heads-grid").classList.toggle("own", mine);
  $("heads-grid").querySelectorAll("[role=radio]").forEach((button, k) =>
    button.classList.toggle("off", mine && live.off.includes(headName(Math.floor(k / H), k % H))));
}

async function goOn() {
  if (live.going) return stopGoing();
  live.going = true;
  $("go-on").textContent = "stop";
  chooseProbe(data.probes.indexOf(live));
  try {
    await begin();
    const ids = await engine.ask("encode", { text: $("typed").value });
    const asked = { temperature: Number($("temperature").value) || 0, most: 1000 };
    await askOf("goOn", ids.length ? ids : live.ids.slice(0, 1), asked, ({ text }) => {
      if (!live.going) return;
      $("typed").value = text;
      $("typed").scrollTop = 1e6;
      readSoon();
    });
  } catch { /* readAgain says why */ }
  stopGoing();
}

function stopGoing() {
  if (live.going) engine.stop("goOn");
  live.going = false;
  $("go-on").textContent = "continue";
  readSoon();
}

let soon = 0;
function readSoon() {
  if (soon && live.going) return; // while a text goes on, its views follow five times a second
  clearTimeout(soon);
  soon = setTimeout(() => { soon = 0; readAgain(); }, live.going ? 200 : WAIT);
}

// The section, and what people with a console have.
function setUpTrying(first) {
  $("try").hidden = !kept.length;
  const bytes = data.weights?.bytes;
  $("too-large").hidden = !bytes;
  if (bytes) $("too-large").textContent = `The model's weights take ${Math.ceil(bytes / 1e6)} MB, too many for a page. For a `
    + 'text of your own: python sample.py run_dir=… prompt="…" attention=page.html';
  if (!kept.length) return;
  $("typed").value = first;
  $("typed").oninput = () => { chooseProbe(data.probes.indexOf(live)); readSoon(); };
  $("go-on").onclick = goOn;
  $("head-off").onclick = () => toggleHead(state.layer, state.head);
  $("hide").onclick = () => toggleToken(state.held);
  $("heads-grid").addEventListener("click", event => { // on the switch of a head
    const button = event.target.closest("[role=radio]"), box = button?.getBoundingClientRect();
    if (!box || !isOwn() || event.clientX < box.right - 17 || event.clientY > box.top + 32 || !event.detail) return;
    event.stopPropagation();
    const k = [...$("heads-grid").querySelectorAll("[role=radio]")].indexOf(button);
    toggleHead(Math.floor(k / H), k % H);
  }, true);
  $("reset").onclick = () => { Object.assign(live, { off: [], hidden: [] }); readAgain(); };
  for (const [id, key, press] of [["heads-grid", "x", () => toggleHead(state.layer, state.head)],
    ["text", "h", () => { if (state.held !== null) toggleToken(state.held); }]]) {
    $(id).addEventListener("keydown", event => { if (event.key === key && isOwn()) press(); });
  }
  const ask = (name, ids, { off = [], hidden = [] } = {}) =>
    withWeights(kept.at(-1)).then(() => engine.ask(name, { ids: [...ids], off, hidden, step: kept.at(-1) }));
  window.glass = {
    encode: text => begin().then(() => engine.ask("encode", { text })),
    decode: ids => begin().then(() => engine.ask("decode", { ids: [...ids] })),
    logits: (ids, changes) => ask("logits", ids, changes), maps: (ids, changes) => ask("maps", ids, changes),
  };
}

// The text that an address asks for, with what is switched off.
function takeText({ text, off, hidden, token }) {
  if (!kept.length || text === null) return;
  $("typed").value = text;
  Object.assign(live, { off: off.filter(name => /^L\d+H\d+$/.test(name)), hidden, wanted: token });
}
