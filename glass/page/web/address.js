/**
 * The page's address names the selection, as in #head=L3H2&step=1400&token=28&view=token_effect,
 * so that a view can be bookmarked and sent.
 */

import { $ } from "./dom.js";
import { headName } from "./labels.js";
import {
  currentProbe,
  currentStep,
  data,
  H,
  isOwnText,
  L,
  ownText,
  runnableSteps,
  selection,
  snapToStop,
  steps,
  wanted,
} from "./page_state.js";
import { describeChoices, readChoices } from "./patching_state.js";

const MAX_TEXT_LENGTH = 20_000; // characters of the reader's text in the address
const WRITE_DELAY = 150; // milliseconds; browsers limit how often an address changes

/** Read the address; parts that are absent or malformed are null. */
function parseAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const readNumber = name => {
    const text = parameters.get(name) ?? "";
    return /^\d{1,12}$/.test(text) ? Number(text) : null;
  };
  const head = /^L(\d{1,4})H(\d{1,4})$/.exec(parameters.get("head") ?? "");
  const hidden = (parameters.get("hidden") ?? "").split(",");
  return {
    head: head && [Number(head[1]), Number(head[2])],
    step: readNumber("step"),
    token: readNumber("token"),
    view: parameters.get("view"),
    weights: parameters.get("weights"),
    heads: parameters.get("heads"),
    first: parameters.get("first"),
    probe: parameters.get("probe"),
    text: parameters.get("text"),
    off: (parameters.get("off") ?? "").split(",").filter(name => /^L\d+H\d+$/.test(name)),
    hidden: hidden.filter(token => /^\d{1,6}$/.test(token)).map(Number),
  };
}

let timer = 0;

/** Write the selection into the address, after a moment, unless the reader changes it meanwhile. */
export function writeAddress() {
  const { hash } = location;
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (location.hash === hash) writeAddressNow();
  }, WRITE_DELAY);
}

/** Write the selection into the address. */
export function writeAddressNow() {
  const parts = Object.entries(describeSelection()).filter(([, value]) => value !== null);
  try {
    history.replaceState(history.state, "", `#${new URLSearchParams(parts)}`);
  } catch {
    // A page inside another page has no address of its own.
  }
}

/** Return the parts of the address; those at their defaults are null. */
function describeSelection() {
  const { layer, head, pinned } = selection;
  const isNewest = selection.step === steps.length - 1;
  const isTraining = data.maxSteps > data.step; // then the newest step is followed
  const parts = {
    head: L ? headName(layer, head) : null,
    step: steps.length > 1 && !(isNewest && isTraining) ? currentStep() : null,
    token: pinned,
    view: selection.showTokenEffect ? "token_effect" : null,
    weights: selection.weightByValues ? "value" : null,
    heads: selection.averageHeads ? "average" : null,
    first: selection.excludeFirst ? "no" : null,
    probe: selection.probe && !isOwnText() ? currentProbe().name : null,
    text: null,
    off: null,
    hidden: null,
  };
  if (!isOwnText()) return parts;
  const text = $("typed").value;
  if (text.length <= MAX_TEXT_LENGTH) parts.text = text;
  if (ownText.off.length) parts.off = ownText.off.join(",");
  if (ownText.hidden.length) parts.hidden = ownText.hidden.join(",");
  if (text.length <= MAX_TEXT_LENGTH) Object.assign(parts, describeChoices());
  return parts;
}

/** Select what the address names, as far as the page has it; its step and input are loaded first. */
export function readAddress() {
  const address = parseAddress();
  readChoices(new URLSearchParams(location.hash.slice(1)));
  const [layer, head] = address.head ?? [L, H];
  if (layer < L && head < H) Object.assign(selection, { layer, head });
  const hasText = address.text !== null && runnableSteps.length > 0;
  if (hasText) {
    $("typed").value = address.text;
    Object.assign(ownText, { off: address.off, hidden: address.hidden });
  }
  const probe = data.probes.findIndex(candidate =>
    hasText ? candidate === ownText : candidate.name === address.probe,
  );
  Object.assign(wanted, { probe: Math.max(0, probe), pin: address.token });
  const step = steps.findLastIndex(value => value <= (address.step ?? Number.NaN));
  snapToStop(step < 0 ? Math.max(0, steps.length - 1) : step);
  Object.assign(selection, {
    showTokenEffect: address.view === "token_effect",
    weightByValues: address.weights === "value",
    averageHeads: address.heads === "average",
    excludeFirst: address.first === "no",
  });
}
