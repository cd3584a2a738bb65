import { $ } from "./dom.js";

export const data = JSON.parse($("data").textContent);
export const scoredSteps = data.scored.steps;
export const columns = data.scored.columns; // metrics of heads, a column each
const shape = data.shape ?? sizeFromScores();
export const L = shape[0];
export const H = shape[1];
export const groups = data.groups && H % data.groups === 0 ? data.groups : H;
export const steps = data.steps.length ? data.steps : scoredSteps;
export const state = {
  step: Math.max(0, steps.length - 1),
  layer: 0,
  head: 0,
  probe: 0,
  weighted: false,
  average: false,
  token: null,
  held: null, // what is lit, what stays lit
  rest: false, // whether the first token is left out
  fresh: true,
  cell: null, // whether nobody has held a token yet; the cell that was clicked
  needs: false,
  target: 0, // whether needs are looked at; of which next token the card tells
};

function sizeFromScores() {
  const places = Object.keys(columns)
    .map(key => /L(\d+)H(\d+)$/.exec(key))
    .filter(Boolean);
  return [1, 2].map(k => Math.max(0, ...places.map(place => Number(place[k]) + 1)));
}

export const stepNow = () => steps[state.step] ?? 0;
export const seen = () => ({
  layer: state.layer,
  head: state.average ? null : state.head,
  weighted: state.weighted,
});

export const probe = () => data.probes[state.probe];

// ---- what views hear of

const listeners = {};
export function on(event, listener) {
  (listeners[event] ??= []).push(listener);
}
function emit(event) {
  for (const listener of listeners[event] ?? []) listener();
}

export function choose(layer, head) {
  Object.assign(state, { layer, head });
  emit("head");
}
