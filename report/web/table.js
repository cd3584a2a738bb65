// A table whose columns sort: up, down, as it was. Stands after draw.js.

import { bdi, el } from "./dom.js";

// columns: [{name, text, of: row → what sorts, write: row → what is shown}], what is unknown comes last; line(row): a
// row's element, to which its cells are added; sort: {column, sign}, what it is sorted by, or null where it never is.
export function fillTable(host, columns, rows, line, sort = null) {
  const heads = columns.map(({ name, text }, c) => {
    const sign = sort?.column === c ? sort.sign : 0;
    const button = el("button", { type: "button" }, bdi(name), ["", " ▲", " ▼"].at(sign));
    button.onclick = () => {
      Object.assign(sort, { column: c, sign: [1, -1, 0].at(sign) });
      fillTable(host, columns, rows, line, sort);
      host.querySelectorAll("thead button")[c].focus();
    };
    return el(
      "th",
      {
        scope: "col",
        className: text ? "text" : "",
        "aria-sort": ["none", "ascending", "descending"].at(sign),
      },
      sort ? button : bdi(name),
    );
  });
  const unknown = x => x === null || x === undefined || x === "";
  const compare = (x, y) =>
    unknown(x) || unknown(y)
      ? unknown(x) - unknown(y)
      : sort.sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  const of = sort?.sign ? columns[sort.column].of : null;
  const order = of ? [...rows].sort((a, b) => compare(of(a), of(b))) : rows;
  host.querySelector("thead").replaceChildren(el("tr", {}, el("th"), ...heads));
  host.querySelector("tbody").replaceChildren(
    ...order.map(row => {
      const made = line(row);
      made.append(
        ...columns.map(({ text, write }) =>
          el("td", { className: text ? "text" : "" }, write(row)),
        ),
      );
      return made;
    }),
  );
}
