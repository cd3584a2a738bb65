/** The section with the best setting of a sweep and the runs that failed. */

import { $, bdi, el } from "./dom.js";
import { pluralize, printable } from "./format.js";
import {
  chartedKeys,
  data,
  hasSingleValue,
  lossUnit,
  lowestLossSetting,
  results,
  runs,
  runsOf,
  sweptKeys,
} from "./sweep_data.js";
import {
  COSTS,
  costOf,
  costTitle,
  formatCost,
  keyName,
  outcome,
  runName,
  valueName,
  withError,
} from "./sweep_names.js";
import { explanationOf, term } from "./terms.js";

/** Show the setting with the lowest loss, its cost, and the command that trains it again. */
export function showBestSetting() {
  $("best-title").hidden = Boolean(data.study);
  const hasResult = lowestLossSetting !== null;
  $("nothing").hidden = hasResult || data.study;
  $("best").hidden = !hasResult;
  if (!hasResult) {
    const hasFinished = runs.some(run => run.status === "finished");
    const kind = hasFinished && !data.isComparison ? "finished run" : "run";
    $("nothing").textContent = data.hasSeveralTexts
      ? "The texts of the runs differ, so their losses are not compared."
      : hasFinished || data.isComparison
        ? `No ${kind} has a finite validation loss.`
        : "No run has finished yet.";
    return;
  }
  $("figures").append(...valueFigures(), lossFigure(), ...costFigures());
  showCaveat();
  $("again").hidden = $("command").hidden = !data.command;
  $("best-command").textContent = data.command;
  $("copy").onclick = copyCommand;
}

/**
 * @param {string} id
 * @param {string | Node} value
 * @param {...(string | Node)} label
 */
function figureBox(id, value, ...label) {
  return el("div", { "data-figure": id }, el("b", {}, value), el("span", {}, ...label));
}

function valueFigures() {
  const [firstRun] = runsOf[lowestLossSetting];
  return chartedKeys.flatMap(k =>
    hasSingleValue(lowestLossSetting, k)
      ? [figureBox(sweptKeys[k].name, bdi(valueName(firstRun, k)), keyName(k))]
      : [],
  );
}

function lossFigure() {
  const { loss, lossError, runCount } = results[lowestLossSetting];
  const seeds = runCount > 1 ? `; mean ± standard error of ${runCount} seeds` : "";
  const label = [term("Validation loss"), ` (${lossUnit})${seeds}`];
  return figureBox("loss", withError(loss, lossError), ...label);
}

function costFigures() {
  return Object.keys(COSTS).flatMap(name => {
    const cost = costOf(lowestLossSetting, name);
    if (cost === null) return [];
    const label = term(costTitle(name), explanationOf(COSTS[name].name));
    return [figureBox(name, formatCost(name, cost), label)];
  });
}

/** Say why the setting with the lowest loss may not be the best one. */
function showCaveat() {
  $("caveat").hidden = !data.asGood && !data.oneSeed;
  if (data.oneSeed) {
    $("best-title").textContent = "Lowest loss";
    $("caveat").textContent = data.isComparison
      ? "Each run is compared by itself, so there is no error estimate: another seed may rank the runs differently."
      : "With one seed there is no error estimate, so no setting is declared best. Add seed=1,2,3 to measure how " +
        "much the loss differs between seeds.";
  } else {
    $("caveat").replaceChildren(
      bdi(data.asGood ?? ""),
      " may be as good: by Welch's t-test the difference is not significant (p ≥ 0.05).",
    );
  }
}

async function copyCommand() {
  try {
    await navigator.clipboard.writeText(data.command);
  } catch {
    // The browser does not allow pages from files to use the clipboard.
    getSelection().selectAllChildren($("best-command"));
    document.execCommand("copy");
  }
  $("copy").textContent = "copied";
  setTimeout(() => {
    $("copy").textContent = "copy";
  }, 1500);
}

/** List the runs that failed or did not finish, with the reasons. */
export function showFailures() {
  const countWith = status => runs.filter(run => run.status === status).length;
  const failures = runs.filter(run => run.status !== "finished" || run.reason);
  const counts = ["failed", "unfinished"]
    .filter(countWith)
    .map(status => `${pluralize(countWith(status), "run")} ${status}`);
  $("failures").hidden = !failures.length;
  $("failures").querySelector("h3").textContent =
    counts.join(", ") || "Finished runs that could not be continued";
  const lines = failures.map(run => {
    const reason = run.reason ? [": ", bdi(printable(run.reason))] : [];
    return el(
      "li",
      { "data-status": run.status },
      el("b", {}, bdi(runName(run))),
      ` ${outcome(run)}`,
      ...reason,
    );
  });
  $("failures")
    .querySelector("ul")
    .append(...lines);
}
