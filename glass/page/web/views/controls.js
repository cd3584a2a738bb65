/** The controls beside the map: which input, which values, which step. */

import { $, el } from "../base/dom.js";
import { formatCount, headName } from "../base/format.js";
import { scoreLabel } from "../base/terms.js";
import { emit } from "../state/events.js";
import { EMERGENCE_MARK, emergencesOf, scoreNames } from "../state/head_metrics.js";
import { data, H, runnableSteps, steps, validationName } from "../state/page_data.js";
import {
  chooseProbe,
  chooseStep,
  currentProbe,
  currentStep,
  isOwnText,
  ownText,
  selection,
  wanted,
  wantedStops,
} from "../state/selection.js";
import { requestTokenEffects } from "./own_requests.js";
import { fillText, textIsCurrent } from "./text.js";

function nameProbe(probe) {
  if (probe === ownText) return ownText.name;
  if (probe.name === "repeated") return `repeated random tokens (period ${probe.period})`;
  if (data.losses) return "scored text";
  return data.kind === "prompt" ? "prompt" : validationName;
}

export function setUpControls() {
  $("step").max = Math.max(0, steps.length - 1);
  $("steps").hidden = steps.length < 2;
  $("repeats").hidden = !data.repeats?.length;
  $("repeats").textContent = data.repeats?.map(sentence => `Note: ${sentence}.`).join(" ");
  setUpSlider();
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
  $("overview-score").onchange = () => emit("draw");
  $("attention-pattern").onchange = chooseMapKind;
  $("token-effect").onchange = chooseMapKind;
}

// ---- the slider over the steps

const PLAY_INTERVAL = 700; // milliseconds between two steps while the slider plays

/** Directions of the keys that move the slider to the next place where it stops. */
const DIRECTIONS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };

let playing = null; // timer

function stopPlaying() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "▶";
  $("play").setAttribute("aria-label", "play");
}

function play() {
  if (nextStop(selection.step, 1) === undefined) chooseStep(wantedStops()[0]);
  playing = setInterval(() => {
    if (wanted.step !== selection.step) return; // it is being loaded
    const next = nextStop(selection.step, 1);
    if (next === undefined) stopPlaying();
    else chooseStep(next);
  }, PLAY_INTERVAL);
  $("play").textContent = "❚❚";
  $("play").setAttribute("aria-label", "pause");
}

/** Return the stop after an index, or before it; undefined at the end. */
const nextStop = (index, direction) =>
  direction > 0 ? wantedStops().find(k => k > index) : wantedStops().findLast(k => k < index);

/** The slider shows the step on display; a step that was chosen is shown when it has been loaded. */
function setUpSlider() {
  $("step").oninput = () => {
    const index = Number($("step").value);
    stopPlaying();
    $("step").value = selection.step;
    chooseStep(index);
  };
  $("step").onkeydown = event => {
    const direction = DIRECTIONS[event.key];
    if (!direction) return;
    event.preventDefault();
    stopPlaying();
    chooseStep(nextStop(wanted.step, direction) ?? wanted.step);
  };
  $("play").onclick = () => (playing === null ? play() : stopPlaying());
}

/** Show the step on display on the slider. */
export function showStep() {
  $("step").value = selection.step;
  $("step").setAttribute("aria-valuetext", `step ${formatCount(currentStep())}`);
  $("step-now").textContent = `step ${formatCount(currentStep())}`;
  drawTicks();
}

/**
 * Write the steps below the slider, as far as there is room, mark those whose weights are in the
 * page, and mark where the selected head emerged. A legend explains the marks that differ.
 */
function drawTicks() {
  const { layer, head } = selection;
  const labelWidth = 14 + 8 * formatCount(steps.at(-1) ?? 0).length;
  const stride = Math.ceil((steps.length * labelWidth) / $("ticks").clientWidth);
  const tick = (k, properties, ...children) =>
    el("i", { style: `--at: ${k / (steps.length - 1)}`, ...properties }, ...children);
  const ticks = steps.map((step, k) => {
    const className = runnableSteps.includes(step) ? "has-weights" : "maps-only";
    const text = (steps.length - 1 - k) % stride ? "" : formatCount(step);
    return tick(k, { className, "data-step": step }, text);
  });
  const marks = emergencesOf(layer, head).map(({ step }) => {
    const k = steps.findIndex(shown => shown >= step);
    return tick(k, { className: "emerged" }, EMERGENCE_MARK);
  });
  $("ticks").replaceChildren(...ticks, ...marks);
  const legend = [];
  if (runnableSteps.length && runnableSteps.length < steps.length) {
    legend.push(el("i", { className: "has-weights" }), "weights: reads your text");
    legend.push(el("i", { className: "maps-only" }), "maps only");
  }
  if (marks.length) {
    legend.push(el("i", {}, EMERGENCE_MARK), `${headName(layer, head)} emerged`);
  }
  $("step-legend").replaceChildren(...legend);
}

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

function checkSelected() {
  const { showTokenEffect, weightByValues, averageHeads, excludeFirst } = selection;
  $(showTokenEffect ? "token-effect" : "attention-pattern").checked = true;
  $(weightByValues ? "weighted" : "raw").checked = true;
  $("average").checked = averageHeads;
  $("exclude-first").checked = excludeFirst;
}
