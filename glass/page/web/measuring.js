/** The section that lets the reader measure the scores of all heads, on a page of explore.py. */

import { $ } from "./dom.js";
import { ask, cancel, describeFailure } from "./engine.js";
import { reloadPage } from "./follow_run.js";
import { scoreNames } from "./head_metrics.js";
import { data } from "./page_state.js";

let isMeasuring = false;

/** Measure the heads and reload the page, which then has their scores; if that runs, stop it. */
async function measureHeads() {
  if (isMeasuring) {
    cancel("measureHeads");
    return;
  }
  isMeasuring = true;
  $("measure-heads").textContent = "Stop";
  $("measure-status").textContent = "waiting for the model …";
  try {
    const onPart = line => {
      $("measure-status").textContent = line;
    };
    const answer = await ask({ request: "measureHeads" }, { onPart });
    if (answer !== undefined) reloadPage();
    $("measure-status").textContent = "";
  } catch (error) {
    $("measure-status").textContent = describeFailure(error);
  }
  isMeasuring = false;
  $("measure-heads").textContent = "Measure heads";
}

/** Show the section if the heads have no scores and the server can measure them. */
export function setUpMeasuring() {
  $("measuring").hidden = !data.server?.canMeasure || scoreNames.length > 0;
  $("measure-heads").onclick = measureHeads;
}
