/** The section about measuring the scores of all heads, on a page of explore.py. */

import { $ } from "../base/dom.js";
import { formatDuration } from "../base/format.js";
import { ask, cancel, describeFailure, isModelBusy } from "../client/client.js";
import { scoreNames } from "../state/head_metrics.js";
import { data } from "../state/page_data.js";
import { reloadWhenIdle } from "./follow_run.js";

let isMeasuring = false;

/**
 * Measure the heads, and reload the page as soon as nobody uses it: it then has their scores. A
 * measurement that is running is stopped instead.
 */
async function measureHeads() {
  if (isMeasuring) {
    cancel("measureHeads");
    return;
  }
  isMeasuring = true;
  $("measure-heads").textContent = "Stop";
  $("measure-status").textContent = "waiting for the model …";
  try {
    const startTimes = [];
    const onPart = stage => {
      startTimes.push(performance.now());
      $("measure-status").textContent = describeStage(stage, startTimes);
    };
    const answer = await ask({ request: "measureHeads" }, { onPart });
    $("measure-status").textContent = "";
    if (answer !== undefined) {
      $("measure-status").textContent =
        "Done: the page reloads with the scores after a few seconds without input.";
      $("measure-heads").hidden = true;
      reloadWhenIdle(0, isModelBusy);
    }
  } catch (error) {
    $("measure-status").textContent = describeFailure(error);
  }
  isMeasuring = false;
  $("measure-heads").textContent = "Measure heads";
}

/** Name a stage, and say how much time is left: the second and last takes as long as the first. */
function describeStage(stage, startTimes) {
  if (startTimes.length < 2) return `step 1 of 2: ${stage} …`;
  const seconds = (startTimes[1] - startTimes[0]) / 1000;
  return `step 2 of 2: ${stage} … about ${formatDuration(seconds)} left`;
}

/** Measure the heads of a model that is so small that this takes about a minute. */
export function measureSmallModel() {
  if (!$("measuring").hidden && data.server.isSmall) measureHeads();
}

/** Show the section if the heads have no scores and the server can measure them. */
export function setUpMeasuring() {
  $("measuring").hidden = !data.server?.canMeasure || scoreNames.length > 0;
  $("measure-heads").onclick = measureHeads;
}
