/** The section with the best setting of a sweep and the runs that failed. */

import { $, bdi, el } from "./dom.js";
import { pluralize, printable } from "./format.js";
import {
  chartedKeys,
  costFigures,
  data,
  figureTitle,
  formatFigure,
  hasSingleValue,
  keyName,
  lossFigure,
  lowestLossSetting,
  outcome,
  resultOf,
  runName,
  runs,
  runsOf,
  sweptKeys,
  valueName,
} from "./sweep_data.js";
import { explanationOf, term } from "./terms.js";

/** Show the setting with the lowest loss, its cost, and the command that trains it again. */
export function showBestSetting() {
  const hasResult = lowestLossSetting !== null;
  $("nothing").hidden = hasResult;
  $("best").hidden = !hasResult;
  if (!hasResult) {
    $("nothing").textContent = data.hasSeveralTexts
      ? "The texts of the runs differ, so their losses are not compared."
      : "No run has finished with a finite validation loss.";
    return;
  }
  const [firstRun] = runsOf[lowestLossSetting];
  const keys = chartedKeys.filter(k => hasSingleValue(lowestLossSetting, k));
  $("figures").append(
    ...keys.map(k => figureBox(sweptKeys[k].name, bdi(valueName(firstRun, k)), keyName(k))),
    resultBox("loss", lossFigure),
    ...costFigures.map(figure => resultBox(figure.name, figure)),
  );
  showCaveat();
  $("again").hidden = $("command").hidden = !data.command;
  $("best-command").textContent = data.command;
  $("copy").onclick = copyCommand;
}

function figureBox(id, value, ...label) {
  return el("div", { "data-figure": id }, el("b", {}, value), el("span", {}, ...label));
}

function resultBox(id, figure) {
  const { value, error, count } = resultOf(lowestLossSetting, figure);
  const isLoss = figure === lossFigure;
  const seeds = isLoss && count > 1 ? `; mean ± standard error of ${count} seeds` : "";
  const text = formatFigure(figure, value, isLoss ? error : null);
  return figureBox(id, text, term(figureTitle(figure), explanationOf(figure.title)), seeds);
}

/** Say why the setting with the lowest loss may not be the best one. */
function showCaveat() {
  $("caveat").hidden = !data.asGood && !data.oneSeed;
  if (!data.oneSeed) {
    $("caveat").replaceChildren(
      bdi(data.asGood ?? ""),
      " may be as good: by Welch's t-test the difference is not significant (p ≥ 0.05).",
    );
    return;
  }
  $("best-title").textContent = "Lowest loss";
  $("caveat").textContent = data.isComparison
    ? "Each run is compared by itself, so there is no error estimate: another seed may rank the runs differently."
    : "With one seed there is no error estimate, so no setting is declared best. Add seed=1,2,3 to measure how " +
      "much the loss differs between seeds.";
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
  const failures = runs.filter(run => run.status !== "finished" || run.reason);
  const countOf = status => runs.filter(run => run.status === status).length;
  const counts = ["failed", "unfinished"]
    .filter(countOf)
    .map(status => `${pluralize(countOf(status), "run")} ${status}`);
  $("failures").hidden = !failures.length;
  $("failures").querySelector("h3").textContent =
    counts.join(", ") || "Finished runs that could not be continued";
  const lines = failures.map(run => {
    const reason = run.reason ? [": ", bdi(printable(run.reason))] : [];
    const name = el("b", {}, bdi(runName(run)));
    return el("li", { "data-status": run.status }, name, ` ${outcome(run)}`, ...reason);
  });
  $("failures")
    .querySelector("ul")
    .append(...lines);
}
