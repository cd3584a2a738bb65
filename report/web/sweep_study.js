/** The sections of a study: its verdicts, the curves that its papers are known for, its tables. */

import { chartPanel } from "./chart_axes.js";
import { $, el } from "./dom.js";
import { drawLineChart } from "./line_chart.js";
import { describeValue, LINES_NOTE, settingLines } from "./sweep_curves.js";
import { allSettings, data } from "./sweep_data.js";
import { colorSwatch, highlightNear } from "./sweep_highlight.js";
import { settingName } from "./sweep_names.js";
import { fillTable } from "./table.js";

/**
 * @typedef {object} ResultTable
 * @property {string} title
 * @property {string[]} columns
 * @property {string[][]} rows
 * @property {number} text_columns - Number of columns that are aligned to the left.
 */

/** Show the verdicts and the tables of a study. */
export function showStudy() {
  const { study } = data;
  $("study").hidden = !study;
  if (!study) return;
  $("study-title").textContent = study.title;
  $("study-papers").textContent = study.papers;
  const items = study.claims.map(([claim, verdict, reason]) =>
    el("li", {}, claim, el("div", {}, el("b", {}, verdict), `: ${reason}`)),
  );
  $("verdicts").append(...items);
  for (const table of study.tables) {
    const element = el("table", {}, el("thead"), el("tbody"));
    fillResultTable(element, table);
    $("results").append(
      el("h3", {}, table.title),
      el("div", { className: "scroll", tabIndex: 0, role: "region" }, element),
    );
  }
  $("compared").after($("table")); // the costs and losses of the arms
}

/**
 * @param {HTMLElement} element
 * @param {ResultTable} table
 */
function fillResultTable(element, { columns, rows, text_columns }) {
  const tableColumns = columns.map((name, k) => ({
    id: name,
    name,
    isText: k < text_columns,
    cell: row => row[k],
  }));
  fillTable(element, tableColumns, rows, row => {
    const arm = allSettings.find(setting => row.includes(settingName(setting)));
    const cell = el("td", {}, arm === undefined ? "" : colorSwatch(arm));
    return el("tr", arm === undefined ? {} : { "data-group": arm }, cell);
  });
}

/** Draw the curves of a study's metrics. */
export function drawPhases() {
  const plot = data.study?.plot ?? [];
  $("phases").hidden = $("results").hidden = !plot.length;
  plot.forEach((_, k) => {
    chartPanel($("phases-charts"), `phase-${k}`);
  });
  plot.forEach(([metric, title], k) => {
    const eventDot = (run, { steps }) => [steps.indexOf(run.events[metric])].filter(i => i >= 0);
    drawLineChart($(`phase-${k}`), {
      title,
      series: settingLines(run => run.curves[metric], { dots: eventDot }),
      height: 260,
      describe: describeValue(""),
      onNear: highlightNear,
    });
  });
  $("phases-note").textContent =
    `${LINES_NOTE} A dot marks the step at which a run passed the threshold of the table below.`;
}
