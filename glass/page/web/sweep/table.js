/** The table of a sweep's page: all settings with their figures and the pages of their runs. */

import { $, bdi, el } from "../base/dom.js";
import { printableName } from "../base/format.js";
import { explanationOf } from "../base/terms.js";
import { fillTable } from "../charts/table.js";
import {
  allSettings,
  colorSwatch,
  data,
  highlight,
  measuredRuns,
  runsOf,
  sweptKeys,
  togglePinnedSettings,
} from "./data.js";

/** Fill the table. */
export function showTable() {
  $("table").hidden = !allSettings.length;
  const keys = sweptKeys.map(({ name, values, positions }) => ({
    id: name,
    name,
    isText: true,
    cell: setting => bdi(printableName(values[setting])),
    sortValue: setting => positions[setting],
  }));
  const figures = data.figures.map(({ name, title, unit, values, texts }) => ({
    id: name,
    name: unit ? `${title} (${unit})` : title,
    explanation: explanationOf(title),
    cell: setting => texts[setting],
    sortValue: setting => values[setting],
  }));
  const links = {
    id: "runs",
    name: "Runs",
    explanation: "The seeds of the runs, with links to their pages.",
    isText: true,
    cell: runLinks,
    sortValue: setting => measuredRuns(setting).length,
  };
  fillTable($("settings"), [...keys, links, ...figures], allSettings, row, {
    column: null,
    sign: 0,
  });
}

/** The runs of a setting by their seeds. */
function runLinks(setting) {
  const links = runsOf(setting).map(run => {
    const name = bdi(printableName(run.label));
    const properties = { title: `${run.name}: ${run.status}` };
    return run.page
      ? el("a", { ...properties, href: run.page }, name)
      : el("span", properties, name);
  });
  return el("span", {}, ...links.flatMap(link => [link, " "]));
}

function row(setting) {
  const element = el("tr", { "data-group": setting }, el("td", {}, colorSwatch(setting)));
  element.onpointerenter = () => highlight(setting);
  element.onpointerleave = () => highlight(null);
  element.onclick = () => togglePinnedSettings(setting);
  return element;
}
