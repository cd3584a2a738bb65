/**
 * The page's address names the selection, as in #head=L3H2&step=1400&token=28&view=token_effect,
 * so that a view can be bookmarked and sent.
 */

import { $ } from "./base/dom.js";
import { headName, parseHead } from "./base/labels.js";
import { describeChoices, readChoices } from "./patching/state.js";
import {
  currentProbe,
  currentStep,
  data,
  H,
  isOwnText,
  L,
  openingIndex,
  ownText,
  runnableSteps,
  selection,
  snapToStop,
  steps,
  wanted,
} from "./state/page_state.js";

const MAX_TEXT_LENGTH = 20_000; // characters of the reader's text in the address
const WRITE_DELAY = 150; // milliseconds; browsers limit how often an address changes

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
  const parts = {
    head: isHeadChosen ? headName(layer, head) : null,
    step: steps.length > 1 && !(isOpening && isTraining) ? currentStep() : null,
    token: isTokenChosen ? pinned : null,
    view: selection.showTokenEffect ? "token_effect" : null,
    weights: selection.weightByValues ? "value" : null,
    heads: selection.averageHeads ? "average" : null,
    first: selection.excludeFirst ? "no" : null,
    probe: selection.probe && !isOwnText() ? currentProbe().name : null,
  };
  if (!isOwnText()) return parts;
  const text = $("typed").value;
  const interventions = {
    off: ownText.off.join(",") || null,
    hidden: ownText.hidden.join(",") || null,
  };
  if (text.length > MAX_TEXT_LENGTH) return { ...parts, ...interventions };
  return { ...parts, text, ...interventions, ...describeChoices() };
}

/** Select what the address names, as far as the page has it; its step and input are loaded first. */
export function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const readNumber = name => {
    const text = parameters.get(name) ?? "";
    return /^\d+$/.test(text) ? Number(text) : null;
  };
  const readList = name => (parameters.get(name) ?? "").split(",");
  readChoices(parameters);
  const [layer, head] = parseHead(parameters.get("head")) ?? [L, H];
  if (layer < L && head < H) Object.assign(selection, { layer, head, isHeadChosen: true });
  const hasText = parameters.has("text") && runnableSteps.length > 0;
  if (hasText) {
    $("typed").value = parameters.get("text");
    Object.assign(ownText, {
      off: readList("off").filter(parseHead),
      hidden: readList("hidden")
        .filter(token => /^\d{1,6}$/.test(token))
        .map(Number),
    });
  }
  const probe = data.probes.findIndex(candidate =>
    hasText ? candidate === ownText : candidate.name === parameters.get("probe"),
  );
  Object.assign(wanted, { probe: Math.max(0, probe), pin: readNumber("token") });
  if (wanted.pin !== null) selection.isTokenChosen = true; // also in a text that is yet to be read
  const namedStep = readNumber("step") ?? Number.NaN;
  const step = steps.findLastIndex(value => value <= namedStep);
  snapToStop(step < 0 ? openingIndex : step);
  Object.assign(selection, {
    showTokenEffect: parameters.get("view") === "token_effect",
    weightByValues: parameters.get("weights") === "value",
    averageHeads: parameters.get("heads") === "average",
    excludeFirst: parameters.get("first") === "no",
  });
}
