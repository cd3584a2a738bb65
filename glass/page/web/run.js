/** Entry of a run's page and of a prompt's page: sets up all views and connects them. */

import { readAddress, writeAddress, writeAddressNow } from "./address.js";
import { $, button } from "./base/dom.js";
import { describeTokens, formatCount, formatNumber, pluralize } from "./base/format.js";
import { MIN_DEEP_LAYERS, parseHead } from "./base/labels.js";
import { explainTerms } from "./base/terms.js";
import { isModelBusy } from "./client/client.js";
import { setTitle, setUpTheme } from "./frame.js";
import { drawPatching, setUpPatching, updatePatching } from "./patching/view.js";
import { decodeAttention, decodePredictions } from "./state/cells.js";
import { headNames, measuredIndices, metricAt, scoreNames } from "./state/head_metrics.js";
import { inductionToken, mostAffectedToken } from "./state/opening_token.js";
import {
  chooseHead,
  currentProbe,
  currentStep,
  data,
  display,
  groups,
  H,
  hasServer,
  L,
  on,
  openingIndex,
  ownText,
  runnableSteps,
  selection,
  selectWanted,
  steps,
  wanted,
  wantsOwnText,
} from "./state/page_state.js";
import { drawAttention, setUpMaps } from "./views/attention_map.js";
import { setUpContinuing } from "./views/continuing.js";
import { setUpControls, showStep, updateControls } from "./views/controls.js";
import { drawFindings } from "./views/findings.js";
import { followRun, reloadPage, restoreScroll } from "./views/follow_run.js";
import { focusSelectedHead, revealSelectedHead, setUpHeadGrid } from "./views/head_grid.js";
import { drawHeads } from "./views/heads.js";
import { drawHideButton, drawInterventions, setUpInterventions } from "./views/interventions.js";
import { drawLosses } from "./views/losses.js";
import { measureSmallModel, setUpMeasuring } from "./views/measuring.js";
import { fillField, readOwnText, setUpOwnText } from "./views/own_text.js";
import { drawPinnedToken } from "./views/pinned_token.js";
import { drawPrediction } from "./views/prediction_view.js";
import { explainPinnedCell } from "./views/score_attribution_view.js";
import { drawHighlights, textLength } from "./views/text_view.js";
import { drawTraining, setUpTraining, totalSeconds } from "./views/training.js";

const MIN_INDUCTION_SCORE = 0.15; // below this the page opens on a previous-token head
const MANY_HEADS = 14; // more heads than this take the full width of the page

const hasProbes = () => data.probes.length > 0;
const isDeep = L > MIN_DEEP_LAYERS;

// ---- what is on display

let loads = 0;

/** Load the input and the step that the reader wants to see, then select and draw both. */
async function showWanted() {
  loads += 1;
  const thisLoad = loads;
  if (wantsOwnText()) {
    await readOwnText();
    return;
  }
  const loaded = hasProbes() ? await loadWanted() : {};
  if (thisLoad !== loads) return;
  selectWanted(loaded);
  if (hasProbes()) pinWanted();
  drawAll();
}

/** Show the controls and the text of the selected input, and pin a token. */
function pinWanted() {
  updateControls();
  fillField(currentProbe());
  const { pin } = wanted;
  wanted.pin = null;
  if (pin !== null && pin < textLength()) {
    Object.assign(selection, { pinned: pin, isTokenChosen: true });
  } else if (selection.pinned === null && !selection.isTokenChosen) {
    selection.pinned = openingToken();
  }
}

const decoded = new Map();

/** Return cells that were decoded before, or decode them. */
function decodeOnce(key, decode) {
  if (!decoded.has(key)) decoded.set(key, decode());
  return decoded.get(key);
}

/** Load the stored attention of the wanted step and the predictions measured last before it. */
async function loadWanted() {
  const { probe: p, step: s } = wanted;
  const probe = data.probes[p];
  const attention = await decodeOnce(`${p}/${s}`, () =>
    decodeAttention(probe.maps[s], data.shape, probe),
  );
  const k = probe.tokenEffects.findLastIndex((packed, at) => packed && at <= s);
  if (k < 0) return { attention, predictions: null };
  const predictions = await decodeOnce(`${p}/${k}/predictions`, () =>
    decodePredictions(probe.tokenEffects[k], data.shape, probe, steps[k]),
  );
  return { attention, predictions };
}

function drawAll() {
  showStep();
  if (hasProbes()) drawAttention();
  drawPinnedToken();
  drawHeads();
  drawInterventions();
  updatePatching();
  writeAddress();
}

/**
 * Return the token to begin with: the last one of a prompt; in another text, the one where the
 * selected head does most for the prediction, or one in the middle if that is not known.
 */
function openingToken() {
  const { attention, predictions } = display;
  const { layer, head } = selection;
  if (data.promptTokens) return Math.min(data.promptTokens, currentProbe().T) - 1;
  if (!predictions) return Math.floor((currentProbe().T - 1) * 0.6);
  const event = inductionToken(currentProbe(), attention, predictions, selection);
  return event ?? mostAffectedToken(predictions, layer, head);
}

/** Want the first input in which the selected head has an induction event, if there is one. */
async function wantInductionToken() {
  for (const [k, probe] of data.probes.entries()) {
    if (probe === ownText) break;
    wanted.probe = k;
    const { attention, predictions } = await loadWanted();
    if (inductionToken(probe, attention, predictions, selection) !== null) return;
  }
  wanted.probe = 0;
}

// ---- set-up

/**
 * Return the [layer, head] to open the page on: the first one that the headline names; else the
 * strongest induction head, or the strongest previous-token head if there is none.
 */
function firstHead() {
  const named = parseHead(data.findings[0]?.heads[0]);
  if (named) return named;
  const score = (name, head) =>
    metricAt(`heads/${name}/${head}`, measuredIndices[name]?.at(-1)) ?? 0;
  const strongest = name =>
    headNames.reduce((best, head) => (score(name, head) > score(name, best) ? head : best), "L0H0");
  const inductionHead = strongest("induction");
  const isInducing = score("induction", inductionHead) >= MIN_INDUCTION_SCORE;
  const chosen =
    isInducing || !measuredIndices.previous_token ? inductionHead : strongest("previous_token");
  return parseHead(chosen);
}

function describeRun() {
  const isRun = data.kind === "run";
  const facts = [];
  if (hasServer && data.maxSteps) {
    facts.push(`step ${formatCount(currentStep())} of ${formatCount(data.maxSteps)}`);
  }
  if (data.best) {
    const { step, loss } = data.best;
    facts.push(`best validation loss ${formatNumber(loss)} at step ${formatCount(step)}`);
  }
  if (L) {
    const shared = groups < H ? ` over ${pluralize(groups, "key/value head")}` : "";
    facts.push(pluralize(L, "layer"), pluralize(H, "head") + shared);
  }
  if (data.probes[0]?.T) {
    const tokens = describeTokens(data.probes[0].T, data.tokenCount ?? 0);
    facts.push(isRun ? `${tokens} of text shown` : tokens);
  }
  if (data.steps.length > 1) facts.push(pluralize(data.steps.length, "snapshot"));
  return facts.join(" · ");
}

/** Say that the model overfits, and which weights are shown where; "" if the losses are as hoped. */
function describeLossWarning() {
  if (!data.lossWarning) return "";
  const sentences = [data.lossWarning];
  if (data.openingStep !== null && steps.length) {
    const [best, opened] = [data.openingStep, steps[openingIndex]].map(formatCount);
    const here = opened === best ? "on it" : `on step ${opened}, the nearest snapshot`;
    sentences.push(`sample.py and explore.py load step ${best}; this page opens ${here}`);
    sentences.push(`The findings are those of step ${formatCount(steps.at(-1))}`);
  }
  return sentences.map(sentence => `${sentence}.`).join(" ");
}

function describeMissingAttention() {
  if (data.snapshotCount) return "The attention maps of so many tokens do not fit a page.";
  if (data.unreadableSnapshots) return "The snapshots of this run cannot be read.";
  return "No attention has been captured yet.";
}

function showHead(layer, head) {
  if (!hasProbes()) return;
  Object.assign(selection, { showTokenEffect: false, averageHeads: false });
  updateControls();
  chooseHead(layer, head);
  $("large").scrollIntoView({ block: "nearest" });
}

function showChosenHead() {
  focusSelectedHead();
  drawAll();
  if (isDeep) revealSelectedHead();
}

function connectViews() {
  on("head", showChosenHead);
  on("draw", drawAll);
  on("token", drawHighlights);
  on("token", drawPrediction);
  on("token", drawHideButton);
  on("pin", drawInterventions);
  on("pin", drawPinnedToken);
  on("pin", writeAddress);
  on("pin", updatePatching);
  on("cell", drawPinnedToken);
  on("cell", explainPinnedCell);
  on("cell", writeAddress);
  on("cell", updatePatching);
  on("patching", writeAddress);
  on("patching", updatePatching);
  on("wanted", showWanted);
  on("selected", updateControls);
  on("selected", drawAll);
  on("stepChanged", () => {
    writeAddressNow();
    reloadPage();
  });
}

function setUpAttention() {
  $("nothing").hidden = hasProbes();
  $("nothing").textContent = describeMissingAttention();
  $("looking").hidden = !hasProbes();
  if (!hasProbes()) return;
  setUpMaps();
  $("looking")
    .querySelector(".stage")
    .classList.toggle("many", H > MANY_HEADS && !isDeep);
  document.body.classList.toggle("deep", isDeep);
  if (isDeep) $("reading").append($("breakdown-part")); // on the first screen
}

/** Create the buttons that lead to the sections, on narrow screens. */
function setUpContents() {
  const sections = {
    losses: data.losses,
    attention: true,
    heads: scoreNames.length,
    training: data.kind === "run",
  };
  const ids = Object.keys(sections).filter(id => sections[id]);
  const createButton = id => button({ onclick: () => $(id).scrollIntoView() }, id);
  $("contents").append(...ids.map(createButton));
}

function follow() {
  if (data.kind !== "run") return;
  const isPlaying = () => $("play").getAttribute("aria-label") === "pause";
  const run = { ...data, seconds: totalSeconds() };
  followRun($("alive"), run, () => isPlaying() || isModelBusy());
}

async function setUpPage() {
  const isRun = data.kind === "run";
  const text = data.probes.find(probe => probe.name === "text");
  connectViews();
  setTitle(data.title, "GlassGPT");
  $("summary").textContent = describeRun();
  $("loss-warning").textContent = describeLossWarning();
  $("loss-warning").hidden = !describeLossWarning();
  $("findings").hidden = !isRun && !data.findings.length;
  drawFindings(data.findings, showHead);
  if (runnableSteps.length) data.probes.push(ownText);
  [selection.layer, selection.head] = firstHead();
  setUpTheme(() => {
    if (isRun) drawTraining();
    drawAll();
    drawPatching();
  });
  setUpControls();
  setUpPatching();
  explainTerms();
  if (isRun) {
    setUpTraining();
    drawTraining();
  }
  if (data.losses) drawLosses(data.losses);
  setUpAttention();
  setUpMeasuring();
  setUpContents();
  setUpOwnText(text, data.losses ? 1 : 0); // a scored text follows a token that is not part of it
  if (runnableSteps.length) {
    setUpContinuing();
    setUpInterventions();
  }
  readAddress();
  selection.step = wanted.step; // nothing is shown yet
  showStep();
  if (hasProbes()) setUpHeadGrid($("heads-grid"));
  window.onhashchange = () => {
    readAddress();
    focusSelectedHead();
    showWanted();
  };
  follow();
  if (hasServer) $("loading").textContent = "The model is reading its first text …";
  const isChosen = ["probe", "text", "token"].some(name => location.hash.includes(`${name}=`));
  if (data.probes[0]?.maps.length && !data.promptTokens && !isChosen) await wantInductionToken();
  await showWanted();
  $("loading").remove();
  if (isDeep) revealSelectedHead();
  restoreScroll();
  measureSmallModel();
}

setUpPage();
