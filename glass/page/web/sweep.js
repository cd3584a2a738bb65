/** The page of a sweep: puts its sections together. */

import { $ } from "./dom.js";
import { pluralize } from "./format.js";
import { setTitle, setUpTheme } from "./frame.js";
import { showBestSetting, showFailures } from "./sweep_best.js";
import { drawLossCurves, drawScoreCurves } from "./sweep_curves.js";
import {
  allSettings,
  data,
  drawLegend,
  keyName,
  runs,
  settingNoun,
  setUpLegend,
  showPinned,
  sweptKeys,
} from "./sweep_data.js";
import { drawFigures } from "./sweep_figures.js";
import { showTables } from "./sweep_tables.js";

/** Draw everything that depends on colors or on the size of the window. */
function draw() {
  drawLegend();
  drawLossCurves();
  drawFigures();
  drawScoreCurves();
  showPinned();
}

setTitle(data.title, `GlassGPT ${data.isComparison ? "comparison" : "sweep"}`);
const grid = sweptKeys.map((key, k) => `${keyName(k)} (${key.values.length})`).join(" × ");
const facts = data.isComparison
  ? [pluralize(runs.length, "run"), pluralize(sweptKeys.length - 1, "differing setting")]
  : [grid, pluralize(allSettings.length, settingNoun), pluralize(runs.length, "run")];
$("summary").textContent = facts.filter(Boolean).join(" · ");
setUpLegend(draw);
showBestSetting();
showFailures();
showTables();
setUpTheme(draw);
draw();
$("loading").remove();
