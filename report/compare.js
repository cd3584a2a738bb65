// The page of two runs, or of two prompts. Stands after sides.js, in one module.

const data = JSON.parse($("data").textContent), { runs } = data;
const runName = k => visible(runs[k].name).replaceAll("·", " ");
const colour = k => ["c1", "c2"][k];

function drawCurves() {
  $("curves").hidden = runs.some(run => run.prompt);
  if ($("curves").hidden) return;
  for (const [kind, name] of [["val", "Validation loss"], ["train", "Training loss"]]) {
    const series = runs.map(({ curves }, k) =>
      ({ name: runName(k), colour: colour(k), bold: true, xs: curves[kind].steps, ys: curves[kind].values }));
    chart($(`chart-${kind}`), { title: `${name}, nats per token`, height: 240, series });
  }
}

$("title").textContent = visible(data.title).replaceAll("·", " ");
document.title = `${$("title").textContent} · GlassGPT`;
$("summary").textContent = runs[0].prompt ? "one model, two prompts" : "two runs over one slider";
const drawSides = setUpSides(data.maps, k => ({ ...runs[k], name: runName(k), colour: colour(k) }), [0, 1]);
setUpTheme(() => { drawSides(); drawCurves(); });
drawSides();
drawCurves();
