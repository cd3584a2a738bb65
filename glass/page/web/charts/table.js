/** A table that sorts by a column at a click: ascending, descending, original order. */

import { bdi, button, el } from "../base/dom.js";
import { addTooltip } from "../base/tooltip.js";

// Each is indexed by the current sign: 0, 1, or -1, which is the last.
const NEXT_SIGN = [1, -1, 0];
const SORT_ARROWS = ["", " ▲", " ▼"];
const ARIA_SORT = ["none", "ascending", "descending"];

/**
 * Fill a table's head and body.
 *
 * @template Row
 * @param {any} table - With a `thead` and `tbody`.
 * @param {Column<Row>[]} columns
 * @param {Row[]} rows
 * @param {(row: Row) => HTMLTableRowElement} createRow - Creates a row with its first cell.
 * @param {Sorting | null} [sorting] - Is updated; null if the table cannot be sorted.
 */
export function fillTable(table, columns, rows, createRow, sorting = null) {
  const headings = columns.map((column, k) => {
    const sign = sorting?.column === k ? sorting.sign : 0;
    const sortByColumn = () => {
      Object.assign(sorting, { column: k, sign: NEXT_SIGN.at(sign) });
      fillTable(table, columns, rows, createRow, sorting);
      table.tHead.querySelectorAll("button")[k].focus();
    };
    const name = bdi(column.name);
    const heading = sorting ? button({ onclick: sortByColumn }, name, SORT_ARROWS.at(sign)) : name;
    if (column.explanation) {
      const nodes = () => [el("div", {}, column.explanation)];
      addTooltip(heading, nodes, sorting ? sortByColumn : null);
    }
    const attributes = {
      scope: "col",
      className: column.isText ? "text" : "",
      "data-column": column.id,
      "aria-sort": ARIA_SORT.at(sign),
    };
    return el("th", attributes, heading);
  });
  table.querySelector("thead").replaceChildren(el("tr", {}, el("th"), ...headings));

  const bodyRows = sortRows(rows, columns, sorting).map(row => {
    const element = createRow(row);
    for (const { isText, cell } of columns) {
      element.append(el("td", { className: isText ? "text" : "" }, cell(row)));
    }
    return element;
  });
  table.querySelector("tbody").replaceChildren(...bodyRows);
}

function sortRows(rows, columns, sorting) {
  if (!sorting?.sign) return rows;
  const { sortValue } = columns[sorting.column];
  return [...rows].sort((a, b) => compare(sortValue(a), sortValue(b), sorting.sign));
}

/** Compare two numbers or texts; unknown ones come last. */
function compare(a, b, sign) {
  const isUnknown = value => value === null || value === undefined || value === "";
  if (isUnknown(a) || isUnknown(b)) return Number(isUnknown(a)) - Number(isUnknown(b));
  if (typeof a === "string") return sign * a.localeCompare(String(b), "en", { numeric: true });
  return sign * (a - Number(b));
}
