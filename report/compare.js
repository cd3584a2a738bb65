// The page of two runs. Stands after sides.js, in one module.

const data = JSON.parse($("data").textContent), { runs } = data;
const colour = k => ["c1", "c2"][k];

function drawCurves() {
  for (const [kind, name] of [["val", "Validation loss"], ["train", "Training loss"]]) {
    const series = runs.map(({ name, curves }, k) => ({ name: words(name), colour: colour(k), bold: true,
      xs: curves[`${kind}/loss`].steps, ys: curves[`${kind}/loss`].values }));
    chart($(`chart-${kind}`), { title: `${name}, nats per token`, height: 240, series });
  }
}

entitle(data.title, "GlassGPT, compared");
$("summary").textContent = "two runs over one slider";
const drawSides = setUpSides(data.maps, k => ({ ...runs[k], name: words(runs[k].name), colour: colour(k) }), [0, 1]);
setUpTheme(() => { drawSides(); drawCurves(); });
drawSides();
drawCurves();
