// The page of a folder's runs: a table that is sorted and filtered, the ticked runs' curves together.

const data = JSON.parse($("data").textContent), COLOURS = 6, DASHES = ["none", "7 3", "2 3", "9 3 2 3"];
const MEASURES = [["val/loss", "validation loss"], ["val/bits_per_byte", "bits per byte"]];
const figureColumn = (name, key, write) => ({ name, of: run => run.figures[key],
  write: run => run.figures[key] === null ? "–" : write(run.figures[key]) });
const COLUMNS = [
  { name: "run", text: true, of: run => run.name,
    write: run => run.page ? el("a", { href: run.page }, bdi(run.name)) : bdi(run.name) },
  figureColumn("val/loss", "val/loss", figure),
  { name: "experiment", text: true, of: run => run.experiment, write: run => run.sweep
    ? el("a", { href: run.sweep }, "sweep") : bdi(run.experiment || "–") },
  { name: "steps", of: run => run.figures.step, write: run => run.status === "finished" ? count(run.figures.step)
    : `${count(run.figures.step ?? 0)} of ${count(run.maxSteps)}` },
  { name: "state", text: true, of: run => run.status, write: run => run.status },
  figureColumn("bits/byte", "val/bits_per_byte", figure),
  figureColumn("parameters", "parameters", count),
  figureColumn("time", "train_seconds", duration),
  { name: "last written", of: run => run.written, write: run => new Date(run.written * 1000).toLocaleString() },
];

let measure = "val/loss";
const sort = { column: null, sign: 0 }; // newest first
const ticked = new Set(data.runs.filter(run => run.curves[measure].steps.length).slice(0, COLOURS));
const colour = run => `c${[...ticked].indexOf(run) % COLOURS + 1}`;

function matches(run) {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${run.name} ${run.experiment} ${run.status}`.toLowerCase();
  return words.every(word => word.startsWith("-") && word.length > 1 ? !text.includes(word.slice(1)) : text.includes(word));
}

function line(run) {
  const box = el("input", { type: "checkbox", checked: ticked.has(run), "aria-label": `draw ${run.name}` });
  box.onchange = () => { if (box.checked) ticked.add(run); else ticked.delete(run); draw(); };
  return el("tr", { className: ticked.has(run) ? "drawn" : "", style: `--c: var(--${colour(run)})` }, el("td", {}, box));
}

const drawTable = () => fillTable($("runs"), COLUMNS, data.runs.filter(matches), line, sort);

function drawChart() {
  $("measure").replaceChildren(...MEASURES.map(([key, name]) => el("button", { type: "button",
    "aria-pressed": String(key === measure), onclick: () => { measure = key; draw(); } }, name)));
  // Losses of other vocabularies, or texts, are no losses of this axis.
  const first = [...ticked][0], drawn = [...ticked].filter(run => measure !== "val/loss" || run.vocabulary === first.vocabulary);
  $("left-out").textContent = drawn.length < ticked.size
    ? `${some(ticked.size - drawn.length, "ticked run")} of another tokenizer or text not drawn: bits per byte compares them.` : "";
  const series = drawn.map((run, k) => ({ name: run.name,
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

entitle(data.title, "GlassGPT runs");
const done = data.runs.filter(run => run.status === "finished").length;
$("summary").textContent = `${some(data.runs.length, "run")}, ${count(done)} finished`;
$("filter").oninput = drawTable;
$("none").onclick = () => { ticked.clear(); draw(); };
setUpTheme(draw);
draw();
