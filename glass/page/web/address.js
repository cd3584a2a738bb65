/**
 * The page's address names the selection, as in #head=L3H2&step=1400&token=28&view=token_effect,
 * so that a view can be bookmarked and sent.
 */

import { $ } from "./base/dom.js";
import { headName, parseHead } from "./base/format.js";
import { describeChoices, readChoices } from "./patching/state.js";
import { scoreNames } from "./state/head_metrics.js";
import { data, H, L, openingIndex, runnableSteps, steps } from "./state/page_data.js";
import {
  currentProbe,
  currentStep,
  isOwnText,
  ownText,
  selection,
  snapToStop,
  wanted,
} from "./state/selection.js";
import { keptIds, showIds } from "./views/own_text.js";

const MAX_TEXT_LENGTH = 20_000; // characters of the reader's text in the address
const WRITE_DELAY = 150; // milliseconds; browsers limit how often an address changes

/** What the address says if something is selected: a part of the address, and its only value. */
const FLAGS = {
  showTokenEffect: ["view", "token_effect"],
  weightByValues: ["weights", "value"],
  averageHeads: ["heads", "average"],
  excludeFirst: ["first", "no"],
  showAllScores: ["scores", "all"],
  showAllComposition: ["composition", "all"],
};

let timer = 0;

/** Write the selection into the address, after a moment, unless the reader changes it meanwhile. */
export function writeAddress() {
  const { hash } = location;
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (location.hash === hash) writeAddressNow();
  }, WRITE_DELAY);
}

export function writeAddressNow() {
  const parts = Object.entries(describeSelection()).filter(([, value]) => value !== null);
  try {
    history.replaceState(history.state, "", `#${new URLSearchParams(parts)}`);
  } catch {
    // A page inside another page has no address of its own.
  }
}

/** Return the parts of the address; those at their defaults or chosen by the page are null. */
function describeSelection() {
  const { layer, head, pinned, isHeadChosen, isTokenChosen } = selection;
  const isOpening = selection.step === openingIndex;
  const isTraining = data.maxSteps > data.step; // then the newest step is followed
  const flags = Object.entries(FLAGS).map(([name, [part, value]]) => {
    return [part, selection[name] ? value : null];
  });
  return {
    head: isHeadChosen ? headName(layer, head) : null,
    step: steps.length > 1 && !(isOpening && isTraining) ? currentStep() : null,
    token: isTokenChosen ? pinned : null,
    ...Object.fromEntries(flags),
    score: $("overview-score").selectedIndex > 0 ? $("overview-score").value : null,
    ...(isOwnText() ? describeOwnText() : { probe: selection.probe ? currentProbe().name : null }),
  };
}

function describeOwnText() {
  const text = $("typed").value;
  const interventions = {
    off: ownText.off.join(",") || null,
    hidden: ownText.hidden.join(",") || null,
  };
  if (text.length > MAX_TEXT_LENGTH) return interventions;
  return { text, ids: keptIds()?.join(",") ?? null, ...interventions, ...describeChoices() };
}

/**
 * Select what the address names, as far as the page has it; its step and input are loaded first. In
 * a notebook, the page has no address of its own: the name of its frame stands for it.
 *
 * @returns {URLSearchParams}
 */
export function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1) || window.name);
  readChoices(parameters);
  const [layer, head] = parseHead(parameters.get("head")) ?? [L, H];
  if (layer < L && head < H) Object.assign(selection, { layer, head, isHeadChosen: true });
  for (const [name, [part, value]] of Object.entries(FLAGS)) {
    selection[name] = parameters.get(part) === value;
  }
  $("overview-score").selectedIndex = Math.max(0, scoreNames.indexOf(parameters.get("score")));

  const hasText = parameters.has("text") && runnableSteps.length > 0;
  if (hasText) readText(parameters);
  const probe = data.probes.findIndex(candidate =>
    hasText ? candidate === ownText : candidate.name === parameters.get("probe"),
  );
  Object.assign(wanted, { probe: Math.max(0, probe), pin: readNumber(parameters, "token") });
  if (wanted.pin !== null) selection.isTokenChosen = true; // also in a text that is yet to be read

  const namedStep = readNumber(parameters, "step") ?? Number.NaN;
  const step = steps.findLastIndex(value => value <= namedStep);
  snapToStop(step < 0 ? openingIndex : step);
  return parameters;
}

/** Return the number of a part of the address; null if it is none. */
function readNumber(parameters, name) {
  const text = parameters.get(name) ?? "";
  return /^\d+$/.test(text) ? Number(text) : null;
}

/** Read the reader's text, whose ids prevail, and its interventions. */
function readText(parameters) {
  const readList = name => (parameters.get(name) ?? "").split(",");
  const isId = id => /^\d{1,9}$/.test(id) && Number(id) < data.modelConfig.vocab_size;
  const hidden = readList("hidden").filter(token => /^\d{1,6}$/.test(token));
  $("typed").value = parameters.get("text");
  const ids = readList("ids");
  if (ids.every(isId)) showIds(ids.map(Number));
  Object.assign(ownText, { off: readList("off").filter(parseHead), hidden: hidden.map(Number) });
}
