/** The page of a sweep: its result, its failures, and the other sections. */

import { $, bdi, el } from "./base/dom.js";
import { pluralize, printable } from "./base/format.js";
import { setTitle, setUpTheme } from "./frame.js";
import { drawLossCurves, drawScoreCurves } from "./sweep/curves.js";
import { allSettings, data, runs, setUpLegend, showPinned } from "./sweep/data.js";
import { drawFigure, setUpFigure } from "./sweep/figure.js";
import { showTable } from "./sweep/table.js";

/** Show what the sweep has found, and the command that trains the best run again. */
function showResult() {
  const lines = data.conclusion.map(([name, text]) =>
    el("p", {}, name ? el("b", {}, `${name}: `) : "", bdi(printable(text))),
  );
  $("conclusion").append(...lines);
  $("again").hidden = !data.command;
  $("command").textContent = data.command;
  $("copy").onclick = copyCommand;
}

async function copyCommand() {
  try {
    await navigator.clipboard.writeText(data.command);
  } catch {
    // The browser does not allow pages from files to use the clipboard.
    getSelection().selectAllChildren($("command"));
    document.execCommand("copy");
  }
  $("copy").textContent = "copied";
}

/** List the runs that failed or did not finish, with the reasons. */
function showFailures() {
  const failures = runs.filter(run => run.status !== "finished" || run.reason);
  const lines = failures.map(run => {
    const reason = run.reason ? [": ", bdi(printable(run.reason))] : [];
    const ended = run.status === "finished" ? "refused" : run.status;
    const outcome = ` ${ended} after ${run.steps} steps`;
    const name = el("b", {}, bdi(printable(run.title)));
    return el("li", { "data-status": run.status }, name, outcome, ...reason);
  });
  $("failures").append(...lines);
  $("failures").hidden = !lines.length;
}

/** Draw everything whose size depends on the window. */
function draw() {
  drawLossCurves();
  drawFigure();
  drawScoreCurves();
  showPinned();
}

setTitle(data.title, `GlassGPT ${data.isComparison ? "comparison" : "sweep"}`);
const settings = data.isComparison ? [] : [pluralize(allSettings.length, "setting")];
$("summary").textContent = [...settings, pluralize(runs.length, "run")].join(" · ");
showResult();
showFailures();
showTable();
setUpLegend();
setUpFigure();
setUpTheme(draw);
draw();
$("loading").remove();
