/** The section about measuring the scores of all heads, on a page of explore.py. */

import { $ } from "../base/dom.js";
import { formatCount, formatDuration } from "../base/format.js";
import { ask, cancel, describeFailure, isModelBusy } from "../client/client.js";
import { data, hasSteps, steps } from "../state/page_data.js";
import { reloadWhenIdle } from "./follow_run.js";

/** Of a model, or of a series, whose steps are measured one after the other. */
const LABEL = hasSteps ? "Measure all steps" : "Measure heads";

let isMeasuring = false;

/**
 * Measure the heads, and reload the page as soon as nobody uses it: it then has their scores. A
 * measurement that is running is stopped instead; steps that were measured are kept.
 */
async function measure() {
  if (isMeasuring) {
    cancel("measureHeads");
    cancel("measureStep");
    return;
  }
  isMeasuring = true;
  $("measure-heads").textContent = "Stop";
  $("measure-status").textContent = "waiting for the model …";
  try {
    const left = hasSteps ? await measureSteps() : await measureHeads();
    const isDone = left === 0;
    const isChanged = isDone || left < data.server.unmeasured;
    const reload = "the page reloads with the scores after a few seconds without input.";
    $("measure-status").textContent = isChanged ? `${isDone ? "Done" : "Stopped"}: ${reload}` : "";
    $("measure-heads").hidden = isDone;
    if (isChanged) reloadWhenIdle(isModelBusy);
  } catch (error) {
    $("measure-status").textContent = describeFailure(error);
  }
  isMeasuring = false;
  $("measure-heads").textContent = LABEL;
}

/** Measure the heads with the reader's text; return 0, or 1 if the reader has stopped it. */
async function measureHeads() {
  const startTimes = [];
  const onPart = stage => {
    startTimes.push(performance.now());
    $("measure-status").textContent = describeStage(stage, startTimes);
  };
  const answer = await ask({ request: "measureHeads" }, { onPart });
  return answer === undefined ? 1 : 0;
}

/** Measure the steps of a series until none is left or the reader stops it; return how many are. */
async function measureSteps() {
  const startTime = performance.now();
  const first = data.server.unmeasured;
  let left = first;
  const onPart = ({ unmeasured, step, stage }) => {
    left = unmeasured ?? left;
    if (!stage) return;
    const seconds = (performance.now() - startTime) / 1000;
    const rest =
      left < first ? `about ${formatDuration((seconds / (first - left)) * left)} left` : "";
    $("measure-status").textContent =
      `step ${formatCount(step)}, ${steps.length - left + 1} of ${steps.length}: ${stage} … ${rest}`;
  };
  // A request ends without a measurement if another step takes its place in memory.
  let answer = null;
  while (left > 0 && answer !== undefined) {
    answer = await ask({ request: "measureStep" }, { onPart });
  }
  return left;
}

/** Name a stage, and say how much time is left: the second and last takes as long as the first. */
function describeStage(stage, startTimes) {
  if (startTimes.length < 2) return `step 1 of 2: ${stage} …`;
  const seconds = (startTimes[1] - startTimes[0]) / 1000;
  return `step 2 of 2: ${stage} … about ${formatDuration(seconds)} left`;
}

/** Measure the heads of a model that is so small that this takes about a minute. */
export function measureSmallModel() {
  if (!$("measuring").hidden && data.server.isSmall) measure();
}

/** Show the section if heads have no scores and the server can measure them. */
export function setUpMeasuring() {
  $("measuring").hidden = !data.server?.unmeasured;
  $("measure-heads").onclick = measure;
  if ($("measuring").hidden || !hasSteps) return;
  $("measure-heads").textContent = LABEL;
  $("measure-question").textContent =
    "At which steps did heads become induction heads, previous-token heads or attention sinks?";
  const measured = steps.length - data.server.unmeasured;
  if (measured) {
    $("measure-status").textContent = `${measured} of ${steps.length} steps are measured.`;
  }
}
