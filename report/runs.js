// The page of a folder's runs: a table that is sorted and filtered, the ticked runs' curves together.

const data = JSON.parse($("data").textContent), COLOURS = 6, DASHES = ["none", "7 3", "2 3", "9 3 2 3"];
const MEASURES = [["val/loss", "validation loss"], ["val/bits_per_byte", "bits per byte"]];
const COLUMNS = [ // heading, what is sorted by, what is shown, whether it is text
  ["run", run => run.name, run => run.page ? el("a", { href: run.page }, bdi(run.name)) : bdi(run.name), true],
  ["val/loss", run => run["val/loss"], run => figure(run["val/loss"])],
  ["experiment", run => run.experiment, run => run.experiment === "sweep" && run.sweep
    ? el("a", { href: run.sweep }, "sweep") : bdi(run.experiment || "–"), true],
  ["steps", run => run.step, run => run.status === "finished" ? count(run.step)
    : `${count(run.step)} of ${count(run.maxSteps)}`],
  ["state", run => run.status, run => run.status, true],
  ["bits/byte", run => run["val/bits_per_byte"], run => figure(run["val/bits_per_byte"])],
  ["parameters", run => run.parameters, run => run.parameters === null ? "–" : count(run.parameters)],
  ["time", run => run.train_seconds, run => run.train_seconds === null ? "–" : duration(run.train_seconds)],
  ["last written", run => run.written, run => new Date(run.written * 1000).toLocaleString()],
];

let measure = "val/loss", by = COLUMNS.length - 1, down = true; // newest first
const ticked = new Set(data.runs.filter(run => run.curves[measure].steps.length).slice(0, COLOURS));
const matches = run => {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${run.name} ${run.experiment} ${run.status}`.toLowerCase();
  return words.every(word => word.startsWith("-") && word.length > 1 ? !text.includes(word.slice(1)) : text.includes(word));
};
const colour = run => `c${[...ticked].indexOf(run) % COLOURS + 1}`;

function inOrder(runs) {
  const key = COLUMNS[by][1], known = run => key(run) !== null && key(run) !== undefined && key(run) !== "";
  const compare = (a, b) => typeof key(a) === "string"
    ? key(a).localeCompare(key(b), "en", { numeric: true }) : key(a) - key(b);
  return [...runs].sort((a, b) => known(b) - known(a) || (known(a) ? compare(a, b) * (down ? -1 : 1) : 0));
}

function drawTable() {
  document.querySelector("thead").replaceChildren(el("tr", {}, el("th", {}), ...COLUMNS.map(([name, , , text], k) => {
    const button = el("button", { type: "button", onclick: () => sortBy(k) }, `${name}${k === by ? down ? " ↓" : " ↑" : ""}`);
    return el("th", { scope: "col", className: text ? "text" : "",
      "aria-sort": k === by ? down ? "descending" : "ascending" : "none" }, button);
  })));
  document.querySelector("tbody").replaceChildren(...inOrder(data.runs.filter(matches)).map(row));
}

function row(run) {
  const box = el("input", { type: "checkbox", checked: ticked.has(run), "aria-label": `draw ${run.name}` });
  box.onchange = () => { if (box.checked) ticked.add(run); else ticked.delete(run); draw(); };
  const line = el("tr", { className: ticked.has(run) ? "drawn" : "" }, el("td", {}, box),
    ...COLUMNS.map(([, , shown, text]) => el("td", { className: text ? "text" : "" }, shown(run))));
  line.style.setProperty("--c", `var(--${colour(run)})`);
  return line;
}

function sortBy(k) {
  down = k === by ? !down : !COLUMNS[k][3] && !["val/loss", "bits/byte"].includes(COLUMNS[k][0]);
  by = k;
  drawTable();
}

function drawChart() {
  $("measure").replaceChildren(...MEASURES.map(([key, name]) => el("button", { type: "button",
    "aria-pressed": String(key === measure), onclick: () => { measure = key; draw(); } }, name)));
  const series = [...ticked].map((run, k) => ({ name: run.name,
    label: run.name.replace(/^\d{4}-(?=\d\d-\d\d_)/, ""), // without the year, for want of room
    group: k, colour: colour(run), dash: DASHES[Math.floor(k / COLOURS) % DASHES.length],
    xs: run.curves[measure].steps, ys: run.curves[measure].values }));
  // The first loss of a run, before training, would flatten the rest.
  const cap = Math.max(...series.map(({ ys }) => ys[1] ?? ys[0] ?? -Infinity));
  const title = MEASURES.find(([key]) => key === measure)[1];
  chart($("chart"), { title, series, cap, height: 320, xName: "step",
    tip: (s, k) => [bdi(s.name), el("div", {}, `step ${count(s.xs[k])}: ${figure(s.ys[k])}`)] });
}

function draw() {
  drawChart();
  drawTable();
}

document.title = `${data.title}: runs`;
$("title").textContent = data.title;
const done = data.runs.filter(run => run.status === "finished").length;
$("summary").textContent = `${count(data.runs.length)} run${data.runs.length === 1 ? "" : "s"}, ${count(done)} finished`;
$("filter").oninput = drawTable;
$("none").onclick = () => { ticked.clear(); draw(); };
setUpTheme(draw);
draw();
