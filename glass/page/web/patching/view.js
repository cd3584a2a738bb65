/**
 * The section on activation patching: two texts, the answers whose logits are compared, and what the
 * prediction becomes when activations are copied from the run on one text into that on the other.
 */

import { $, bdi, button, el, labelToken, tokenName } from "../base/dom.js";
import {
  describeTokens,
  formatSigned,
  makeVisible,
  parseHead,
  shortenToken,
} from "../base/format.js";
import { term } from "../base/terms.js";
import { addArrowKeys } from "../base/tooltip.js";
import { emit, on } from "../state/events.js";
import { data, runnableSteps } from "../state/page_data.js";
import { chooseHead, isOwnText, ownText, selection, togglePin } from "../state/selection.js";
import { describeInterventions } from "../views/interventions.js";
import { chooseOwnText, readAsTyped } from "../views/own_text.js";
import { predictionButton } from "../views/prediction.js";
import { drawPatchingMaps, effectVerb, setUpPatchingMaps } from "./maps.js";
import {
  choices,
  countCells,
  countMeasured,
  encodeToken,
  measure,
  measured,
  shareOf,
} from "./state.js";

const TYPING_DELAY = 150; // milliseconds in which keys are gathered

/** Measure what is selected, and draw it. */
export function updatePatching() {
  if (choices.corrupted === null) $("corrupted").value = $("typed").value;
  else if ($("corrupted").value !== choices.corrupted) $("corrupted").value = choices.corrupted;
  measure();
}

/** Take a new selection. */
function changeChoices(changes) {
  Object.assign(choices, changes);
  emit("patching");
}

// ---- drawing

/** Draw the section. */
export function drawPatching() {
  if (!choices.isOpen) return;
  $("patching-elsewhere").hidden = isOwnText();
  $("patching-panel").hidden = !isOwnText();
  if (!isOwnText()) return;
  const interventions = describeInterventions(ownText.predictions ?? { off: [], hidden: [] });
  $("patching-interventions").replaceChildren(
    interventions
      ? el("b", {}, `In both runs: ${interventions}.`)
      : "Ablated heads and hidden tokens apply to both runs.",
  );
  const { problem, contrast, corruptedNext } = measured;
  const hasMaps = contrast !== null && !problem;
  $("patching-problem").textContent = problem;
  $("patching-answers").hidden = !corruptedNext.length;
  $("patching-results").hidden = !hasMaps;
  drawTokens();
  if (corruptedNext.length) drawAnswers();
  if (!hasMaps) return;
  drawDifferences();
  drawKeptPatches();
  drawCells();
}

/** Draw the maps, as far as their cells have been measured. */
function drawCells() {
  drawPatchingMaps(togglePatch);
  const count = countMeasured();
  const isComplete = count === countCells();
  $("patching-progress").textContent = isComplete
    ? ""
    : `measuring: ${count} of ${countCells()} patches`;
  Object.assign($("patching-results").dataset, {
    complete: String(isComplete),
    patched: measured.kept.join(" "),
    wrong: measured.wrong,
    direction: choices.direction,
  });
}

/** Replace the content of an element; the focus stays on the button with the same number. */
function replaceButtons(host, nodes) {
  const focused = [...host.querySelectorAll("button")].indexOf(document.activeElement);
  host.replaceChildren(...nodes);
  if (focused >= 0) host.querySelectorAll("button")[focused]?.focus({ preventScroll: true });
}

/** Draw the tokens of both texts, one below the other. */
function drawTokens() {
  const { cleanTokens, corruptedTokens, tokenCount, i } = measured;
  const isCut = tokenCount > cleanTokens.length;
  $("patching-cut").textContent = isCut
    ? `The model reads ${describeTokens(cleanTokens.length, tokenCount)}.`
    : "";
  const count = Math.max(cleanTokens.length, corruptedTokens.length);
  const columns = Array.from({ length: count }, (_, t) => {
    const tokens = [cleanTokens[t] ?? "", corruptedTokens[t] ?? ""];
    const differs = tokens[0] !== tokens[1];
    const names = [...new Set(tokens)].filter(Boolean).map(makeVisible);
    const properties = {
      className: `aligned${differs ? " differs" : ""}${t === i ? " position" : ""}`,
      "aria-label": `token ${t}: ${names.join(" and ")}${differs ? ", which differ" : ""}`,
      onclick: () => {
        if (t < ownText.T && selection.pinned !== t) togglePin(t);
      },
    };
    return button(
      properties,
      ...tokens.map(token => (token ? tokenName(token) : bdi(" ", "token"))),
    );
  });
  replaceButtons($("patching-tokens"), columns);
  addArrowKeys($("patching-tokens"), columns, { current: Math.min(i, count - 1) });
}

/** Draw the likeliest next tokens of both texts, and the answers. */
function drawAnswers() {
  const { cleanNext, corruptedNext, cleanTokens, corruptedTokens, i } = measured;
  const row = (name, tokens, next) =>
    el(
      "div",
      {},
      el("h4", {}, `${name}: predicted after `, ...labelToken({ tokens }, i)),
      el("div", { className: "chances" }, ...next.map(createPrediction)),
    );
  replaceButtons($("patching-predicted"), [
    row("Clean text", cleanTokens, cleanNext),
    row("Corrupted text", corruptedTokens, corruptedNext),
  ]);
  $(choices.direction).checked = true;
  for (const name of ["answer", "wrong"]) {
    $(`slot-${name}-token`).textContent = nameWord(measured[name]);
  }
}

const nameWord = id => shortenToken(data.words[id] ?? "");

/** Create a button that chooses a predicted token as an answer. */
function createPrediction({ id, chance }) {
  const role = { [measured.wrong]: "wrong answer", [measured.answer]: "answer" }[id];
  const element = predictionButton(
    { text: data.words[id], chance },
    { isActual: id === measured.answer, isTarget: role !== undefined, pick: () => fillSlot(id) },
  );
  if (role) element.append(el("small", {}, role));
  return element;
}

/** Choose a token as the answer or the wrong answer, whichever is checked, and check the other. */
function fillSlot(id) {
  const [filled, other] = $("slot-wrong").checked ? ["wrong", "answer"] : ["answer", "wrong"];
  $(`slot-${other}`).checked = true;
  changeChoices({ [filled]: id });
}

/** Draw the logit differences of the runs. */
function drawDifferences() {
  const { contrast, answer, wrong, kept } = measured;
  const share = `${formatSigned(shareOf(contrast.patched))} of the difference ${effectVerb()}`;
  const figures = [
    ["clean text", contrast.clean],
    ["corrupted text", contrast.corrupted],
    [`with the kept patches, ${share}`, contrast.patched],
  ].map(([name, value]) =>
    el("div", {}, el("b", {}, formatSigned(Number(value))), el("span", {}, name)),
  );
  // It takes its room also while no patch is kept, so that the maps below stay where they are.
  figures[2].classList.toggle("invisible", !kept.length);
  $("patching-contrast").replaceChildren(
    term("Logit difference"),
    ": the logit of ",
    bdi(nameWord(answer), "token chip"),
    " minus that of ",
    bdi(nameWord(wrong), "token chip"),
  );
  $("patching-figures").replaceChildren(...figures);
}

/** List the patches that are kept, and what the patched run predicts. */
function drawKeptPatches() {
  const { kept, contrast } = measured;
  $("patching-kept").hidden = !kept.length;
  const chip = (...content) => el("span", { className: "chip" }, ...content);
  $("patching-chips").replaceChildren(
    ...kept.map(name => chip(createPatchName(name), createRemoveButton(name))),
  );
  $("patching-next").replaceChildren(
    ...contrast.next.map(({ id, chance }) =>
      chip(bdi(nameWord(id), "token"), ` ${chance.toFixed(3)}`),
    ),
  );
}

/** Create the name of a kept patch; that of a head shows the head. */
function createPatchName(name) {
  const head = parseHead(name);
  if (!head) return name;
  return button({ className: "to-head", onclick: () => chooseHead(...head) }, name);
}

function createRemoveButton(name) {
  const onclick = () => togglePatch(name);
  return button({ className: "remove", "aria-label": `remove ${name}`, onclick }, "×");
}

/** Keep a patch in all runs, or remove it. */
function togglePatch(name) {
  const { kept } = measured;
  changeChoices({
    kept: kept.includes(name) ? kept.filter(other => other !== name) : [...kept, name],
  });
}

// ---- set-up

/** Use the typed token as the active answer. */
async function useTypedToken() {
  const { id, problem } = await encodeToken($("typed-token").value);
  $("typed-token-problem").textContent = problem;
  if (id === null) return;
  $("typed-token").value = "";
  fillSlot(id);
}

/** Set up the section, if the model can run. */
export function setUpPatching() {
  $("patching").hidden = !runnableSteps.length;
  if (!runnableSteps.length) return;
  setUpPatchingMaps();
  on("measured", drawPatching);
  on("cellsMeasured", drawCells);
  $("patching").ontoggle = () => {
    if ($("patching").open === choices.isOpen) return;
    changeChoices({ isOpen: $("patching").open });
    if (choices.isOpen && !isOwnText()) chooseOwnText();
  };
  $("patching-show-text").onclick = chooseOwnText;
  let timer = 0;
  $("corrupted").oninput = () => {
    clearTimeout(timer);
    const text = $("corrupted").value;
    choices.corrupted = text === $("typed").value ? null : text;
    readAsTyped(); // both texts are encoded alike
    timer = setTimeout(() => changeChoices({}), TYPING_DELAY);
  };
  $("typed-token-form").onsubmit = event => {
    event.preventDefault();
    useTypedToken();
  };
  for (const direction of ["denoising", "noising"]) {
    $(direction).onchange = () => changeChoices({ direction });
  }
  $("patching-clear").onclick = () => changeChoices({ kept: [] });
}
