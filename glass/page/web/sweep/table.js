/** The table of a sweep's page: all settings with their figures and the pages of their runs. */

import { $, bdi, button, el } from "../base/dom.js";
import { printableName } from "../base/format.js";
import { explanationOf } from "../base/terms.js";
import { addTooltip } from "../base/tooltip.js";
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

// A click on a heading sorts: ascending, descending, in the original order. Each list is indexed by
// the current sign: 0, 1, or -1, which is the last.
const NEXT_SIGN = [1, -1, 0];
const SORT_ARROWS = ["", " ▲", " ▼"];
const ARIA_SORT = ["none", "ascending", "descending"];

/** The column by which the table is sorted, and how. */
const sorting = { column: null, sign: 0 };

/** @type {Column[]} */
const columns = [
  ...sweptKeys.map(({ name, values, positions }) => ({
    id: name,
    name,
    isText: true,
    cell: setting => bdi(printableName(values[setting])),
    sortValue: setting => positions[setting],
  })),
  {
    id: "runs",
    name: "Runs",
    explanation: "The seeds of the runs, with links to their pages.",
    isText: true,
    cell: runLinks,
    sortValue: setting => measuredRuns(setting).length,
  },
  ...data.figures.map(({ name, title, unit, values, texts }) => ({
    id: name,
    name: unit ? `${title} (${unit})` : title,
    explanation: explanationOf(title),
    cell: setting => texts[setting],
    sortValue: setting => values[setting],
  })),
];

/** Fill the table. */
export function showTable() {
  $("table").hidden = !allSettings.length;
  const headings = columns.map(createHeading);
  $("settings").tHead.replaceChildren(el("tr", {}, el("th"), ...headings));
  $("settings").tBodies[0].replaceChildren(...sortedSettings().map(createRow));
}

/**
 * @param {Column} column
 * @param {number} k - Its index.
 */
function createHeading({ id, name, isText, explanation }, k) {
  const sign = sorting.column === k ? sorting.sign : 0;
  const sortByColumn = () => {
    Object.assign(sorting, { column: k, sign: NEXT_SIGN.at(sign) });
    showTable();
    $("settings").tHead.querySelectorAll("button")[k].focus();
  };
  const heading = button({ onclick: sortByColumn }, bdi(name), SORT_ARROWS.at(sign));
  if (explanation) addTooltip(heading, () => [el("div", {}, explanation)], sortByColumn);
  const attributes = {
    scope: "col",
    className: isText ? "text" : "",
    "data-column": id,
    "aria-sort": ARIA_SORT.at(sign),
  };
  return el("th", attributes, heading);
}

function createRow(setting) {
  const cells = columns.map(({ isText, cell }) =>
    el("td", { className: isText ? "text" : "" }, cell(setting)),
  );
  const swatch = el("td", {}, colorSwatch(setting));
  const row = el("tr", { "data-group": setting }, swatch, ...cells);
  row.onpointerenter = () => highlight(setting);
  row.onpointerleave = () => highlight(null);
  row.onclick = () => togglePinnedSettings(setting);
  return row;
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

/** The settings in the order of the column that sorts; those without a value come last. */
function sortedSettings() {
  if (!sorting.sign) return allSettings;
  const { sortValue } = columns[sorting.column];
  const known = allSettings.filter(setting => sortValue(setting) !== null);
  const unknown = allSettings.filter(setting => sortValue(setting) === null);
  known.sort((a, b) => sorting.sign * (sortValue(a) - sortValue(b)));
  return [...known, ...unknown];
}
