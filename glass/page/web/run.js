/** Entry of a run's page and of a prompt's page: sets up all views and connects them. */

import { readAddress, writeAddress, writeAddressNow } from "./address.js";
import { $, button } from "./base/dom.js";
import { explainTerms } from "./base/terms.js";
import { isModelBusy } from "./client/client.js";
import { setTitle, setUpTheme } from "./frame.js";
import { drawPatching, setUpPatching, updatePatching } from "./patching/view.js";
import { on } from "./state/events.js";
import { scoreNames } from "./state/head_metrics.js";
import { openingHead, openingProbe, openingToken } from "./state/opening.js";
import { data, H, hasServer, isDeep, isRun, runnableSteps } from "./state/page_data.js";
import {
  chooseHead,
  currentProbe,
  ownText,
  selection,
  selectWanted,
  wanted,
  wantsOwnText,
} from "./state/selection.js";
import { loadStored } from "./state/stored.js";
import { drawAttention, setUpMaps } from "./views/attention_map.js";
import { setUpConsole } from "./views/console.js";
import { setUpContinuing } from "./views/continuing.js";
import { setUpControls, showStep, updateControls } from "./views/controls.js";
import { drawFindings } from "./views/findings.js";
import { followRun, reloadPage, restoreScroll } from "./views/follow_run.js";
import { focusSelectedHead, revealSelectedHead, setUpHeadGrid } from "./views/head_grid.js";
import { drawHeader } from "./views/header.js";
import { drawHeads, setUpHeads } from "./views/heads.js";
import { drawHideButton, drawInterventions, setUpInterventions } from "./views/interventions.js";
import { drawLosses } from "./views/losses.js";
import { measureSmallModel, setUpMeasuring } from "./views/measuring.js";
import { fillField, readOwnText, setUpOwnText } from "./views/own_text.js";
import { drawPinnedToken } from "./views/pinned_token.js";
import { drawPrediction } from "./views/prediction.js";
import { explainPinnedCell } from "./views/score_attribution.js";
import { drawHighlights, textLength } from "./views/text.js";
import { drawTraining, setUpTraining } from "./views/training.js";

const MANY_HEADS = 14; // more heads than this take the full width of the page

const hasProbes = () => data.probes.length > 0;

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
  const loaded = hasProbes() ? await loadStored(wanted.probe, wanted.step) : {};
  if (thisLoad !== loads) return;
  selectWanted(loaded);
  if (hasProbes()) pinWanted();
  drawAll();
  if (hasProbes()) await fillField(currentProbe());
}

/** Show the controls of the selected input, and pin a token. */
function pinWanted() {
  updateControls();
  const { pin } = wanted;
  wanted.pin = null;
  if (pin !== null && pin < textLength()) {
    Object.assign(selection, { pinned: pin, isTokenChosen: true });
  } else if (selection.pinned === null && !selection.isTokenChosen) {
    selection.pinned = openingToken();
  }
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

// ---- set-up

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
    training: isRun,
  };
  const ids = Object.keys(sections).filter(id => sections[id]);
  const createButton = id => button({ onclick: () => $(id).scrollIntoView() }, id);
  $("contents").append(...ids.map(createButton));
}

function follow() {
  if (!isRun) return;
  const isPlaying = () => $("play").getAttribute("aria-label") === "pause";
  followRun($("alive"), data, () => isPlaying() || isModelBusy());
}

function setUpSections() {
  setTitle(data.title, "GlassGPT");
  drawHeader();
  $("findings").hidden = !isRun && !data.findings.length;
  drawFindings(data.findings, showHead);
  setUpTheme(() => {
    if (isRun) drawTraining();
    drawAll();
    drawPatching();
  });
  setUpControls();
  setUpHeads();
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
  setUpOwnText(data.losses ? 1 : 0); // a scored text follows a token that is not part of it
  if (runnableSteps.length) {
    setUpConsole();
    setUpContinuing();
    setUpInterventions();
  }
}

/** Set up the page, and show what its address names. */
async function openPage() {
  connectViews();
  if (runnableSteps.length) data.probes.push(ownText);
  [selection.layer, selection.head] = openingHead();
  setUpSections();
  const parameters = readAddress();
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
  const isChosen = ["probe", "text", "token"].some(name => parameters.has(name));
  if (data.probes[0]?.maps.length && !data.promptTokens && !isChosen) {
    wanted.probe = await openingProbe();
  }
  await showWanted();
  $("loading").remove();
  if (isDeep) revealSelectedHead();
  restoreScroll();
  measureSmallModel();
}

openPage();
