/** The sections of a study: its verdicts, the curves that its papers are known for, its tables. */

import { $, el } from "./dom.js";
import { drawLineCharts } from "./line_chart.js";
import { describeValue, LINES_NOTE, settingLines, withoutStepZero } from "./sweep_curves.js";
import { allSettings, colorSwatch, data, highlightNear, settingName } from "./sweep_data.js";
import { fillTable } from "./table.js";
import { explainMetric } from "./terms.js";

/** What the columns of the result tables mean. */
const COLUMNS = {
  "mean ± SE": "Mean over the seeds with its standard error.",
  "SE in a run":
    "Typical standard error of one seed's value, because it is measured on a sample of sequences.",
  median:
    "Median over the seeds; one without the event counts as later than the end of the run. A dash: later than that.",
  seeds: "Number of seeds in which the event has happened.",
};

/** Show the verdicts and the tables of a study. */
export function showStudy() {
  const { study } = data;
  $("study").hidden = $("phases").hidden = $("results").hidden = !study;
  if (!study) return;
  // The heads are scored on other texts than the task's, and the arms are not chosen by their cost.
  for (const id of ["tradeoffs", "formed", "heads"]) $(id).hidden = true;
  $("table-title").textContent = "Losses and costs";
  $("study-title").textContent = study.title;
  $("study-papers").textContent = study.papers;
  const items = study.claims.map(([claim, verdict, reason]) =>
    el("li", {}, claim, el("div", {}, el("b", {}, verdict), `: ${reason}`)),
  );
  $("verdicts").append(...items);
  for (const table of study.tables) {
    const element = el("table", {}, el("thead"), el("tbody"));
    fillResultTable(element, table);
    const attributes = {
      className: "scroll",
      tabIndex: 0,
      role: "region",
      "aria-label": table.title,
    };
    $("results").append(el("h3", {}, table.title), el("div", attributes, element));
  }
  $("compared").after($("table")); // the costs and losses of the arms
}

function fillResultTable(element, { columns, rows, text_columns }) {
  const tableColumns = columns.map((name, k) => ({
    id: name,
    name,
    explanation: COLUMNS[name],
    isText: k < text_columns,
    cell: row => row[k],
  }));
  const isMeasured = (_, k) => rows.some(row => row[k] !== "–");
  fillTable(element, tableColumns.filter(isMeasured), rows, row => {
    const arm = allSettings.find(setting => row.includes(settingName(setting)));
    const cell = el("td", {}, arm === undefined ? "" : colorSwatch(arm));
    return el("tr", arm === undefined ? {} : { "data-group": arm }, cell);
  });
}

/** Draw the curves of a study's metrics. */
export function drawPhases() {
  const { plot, hasLogSteps, events } = data.study;
  const charts = plot.map(([metric, title], k) => {
    const curveOf = run => (hasLogSteps ? withoutStepZero(run.curves[metric]) : run.curves[metric]);
    const eventDots = (run, { steps }) =>
      (run.events[metric] ?? []).map(step => steps.indexOf(step)).filter(i => i >= 0);
    return {
      id: `phase-${k}`,
      title,
      explanation: explainMetric(metric),
      series: settingLines(curveOf, { dots: eventDots }),
      height: 260,
      hasLogSteps,
      describe: describeValue(""),
      onNear: highlightNear,
    };
  });
  drawLineCharts($("phases-charts"), charts);
  $("phases-note").textContent =
    `${LINES_NOTE} A dot marks an event, the first evaluation of a run past a threshold that the next one ` +
    `confirms: ${events.join("; ")}.`;
}
