/** The controls beside the map: which input, which values, which step. */

import { $, el } from "./dom.js";
import { setUpStepSlider } from "./frame.js";
import { scoreNames } from "./head_metrics.js";
import { requestTokenEffects } from "./own_requests.js";
import {
  chooseProbe,
  chooseStep,
  currentProbe,
  data,
  emit,
  H,
  isOwnText,
  ownText,
  runnableSteps,
  selection,
  steps,
  validationName,
  wanted,
  wantedStops,
} from "./page_state.js";
import { scoreLabel } from "./terms.js";
import { fillText, textIsCurrent } from "./text_view.js";

/** Name a probe in the list of inputs. */
function nameProbe(probe) {
  if (probe === ownText) return ownText.name;
  if (probe.name === "repeated") return `repeated random tokens (period ${probe.period})`;
  if (data.losses) return "scored text";
  return data.kind === "prompt" ? "prompt" : validationName;
}

/** Connect every control to the selection. */
export function setUpControls() {
  $("step").max = Math.max(0, steps.length - 1);
  $("steps").hidden = steps.length < 2;
  setUpStepSlider({
    stops: wantedStops,
    shown: () => selection.step,
    wanted: () => wanted.step,
    choose: chooseStep,
  });
  markStepsWithWeights();
  $("probe").append(...data.probes.map((probe, k) => el("option", { value: k }, nameProbe(probe))));
  $("probe").parentElement.hidden = data.probes.length < 2;
  $("probe").onchange = () => {
    const k = Number($("probe").value);
    $("probe").value = selection.probe; // until the other one is loaded
    chooseProbe(k);
  };
  const drawWeights = () => {
    selection.weightByValues = $("weighted").checked;
    emit("draw");
  };
  $("raw").onchange = drawWeights;
  $("weighted").onchange = drawWeights;
  $("average").onchange = () => {
    selection.averageHeads = $("average").checked;
    emit("draw");
  };
  $("exclude-first").onchange = () => {
    selection.excludeFirst = $("exclude-first").checked;
    emit("wanted");
  };
  $("overview-score").append(
    ...scoreNames.map(name => el("option", { value: name }, scoreLabel(name))),
  );
  if (scoreNames.includes("induction")) $("overview-score").value = "induction";
  $("overview-score").onchange = () => emit("draw");
  $("attention-pattern").onchange = chooseMapKind;
  $("token-effect").onchange = chooseMapKind;
}

/** Mark the steps whose weights are in the page below the slider. */
function markStepsWithWeights() {
  const marks = runnableSteps.map(step =>
    el("i", { style: `--at: ${steps.indexOf(step) / (steps.length - 1)}`, "data-step": step }),
  );
  $("steps-with-weights").replaceChildren(...marks);
}

/** Show attention patterns or token effects, as the reader chose. */
function chooseMapKind() {
  selection.showTokenEffect = $("token-effect").checked;
  updateControls();
  if (selection.showTokenEffect && isOwnText() && ownText.predictions) requestTokenEffects();
  emit("draw");
}

/** Show the controls that apply to the selected probe and map. */
export function updateControls() {
  $("probe").value = selection.probe;
  $("map-kind").hidden = !isOwnText() && !currentProbe().tokenEffects.some(Boolean);
  if ($("map-kind").hidden) selection.showTokenEffect = false;
  const { showTokenEffect } = selection;
  if (showTokenEffect) Object.assign(selection, { weightByValues: false, averageHeads: false });
  checkSelected();
  $("weighting").hidden = showTokenEffect;
  $("average").parentElement.hidden = showTokenEffect || H < 2;
  $("exclude-first").parentElement.hidden = showTokenEffect;
  if (!textIsCurrent()) fillText();
}

/** Check the controls that the selection stands for. */
function checkSelected() {
  const { showTokenEffect, weightByValues, averageHeads, excludeFirst } = selection;
  $(showTokenEffect ? "token-effect" : "attention-pattern").checked = true;
  $(weightByValues ? "weighted" : "raw").checked = true;
  $("average").checked = averageHeads;
  $("exclude-first").checked = excludeFirst;
}
