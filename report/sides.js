// Two runs' attention side by side, over one slider. Stands after maps.js and before sweep.js, which names the runs.

const sides = []; // {run, layer, head, and its elements} of the left and the right
const looking = { steps: [], step: 0, weighted: false, average: false };

// Put the maps of two runs beside each other. held: of each run what the page keeps of its maps, or null;
// about(k): how run k is called, its colour, its key/value heads, the head to begin with; first: the two to begin with.
function setUpSides(held, about, first) {
  held = held.map(of => of && { ...of, ...of.probes[0] }); // the text, which is all that is kept of a run here
  const mapped = held.map((_, k) => k).filter(k => held[k]);
  $("no-maps").hidden = mapped.length > 0;
  $("no-maps").textContent = "No attention has been captured yet, or its maps would make this page too large.";
  $("looking").hidden = !mapped.length;
  if (!mapped.length) return () => {};

  for (const run of first.filter(k => held[k])) {
    const name = `run ${sides.length + 1}`, select = el("select", { "aria-label": name });
    select.append(...mapped.map(k => el("option", { value: k }, about(k).name)));
    const side = {
      run, swatch: el("span", { className: "swatch", "aria-hidden": "true" }), title: el("h3"),
      note: el("p", { className: "quiet" }),
      grid: el("div", { className: "heads-grid", role: "radiogroup", "aria-label": `attention heads of ${name}` }),
      map: el("div", { className: "cells map" }), bar: el("div", { className: "bar" }),
      kept: el("p", { className: "quiet" }),
    };
    const figure = el("figure", {}, el("figcaption", {}, side.title, side.note), side.map, side.bar, side.kept);
    $("sides").append(el("div", { className: "side", role: "group", "aria-label": name },
      el("div", { className: "chooser" }, side.swatch, select), side.grid, figure));
    side.draw = cells(side.map, `attention map of ${name}; arrow keys read its cells`);
    select.value = run;
    select.onchange = () => { side.run = Number(select.value); chooseRun(side); chooseSteps(); draw(); };
    sides.push(side);
    chooseRun(side);
  }
  explainWords();
  stepSlider(() => looking.steps.length - 1, () => looking.step, k => { looking.step = k; draw(); });
  $("raw").onchange = $("weighted").onchange = () => { looking.weighted = $("weighted").checked; draw(); };
  $("average").onchange = () => { looking.average = $("average").checked; draw(); };
  $("maps-note").textContent = mapped.length < held.length
    ? `The maps of ${count(mapped.length)} of ${count(held.length)} runs are here: `
      + "the others have none, or would make this page too large." : "";
  chooseSteps();

  function chooseRun(side) {
    const { shape: [L, H] } = held[side.run], { groups, colour, head } = about(side.run);
    [side.layer, side.head] = head;
    side.swatch.style.setProperty("--c", `var(--${colour})`);
    side.drawGrid = headGrid(side.grid, [L, H], groups && H % groups === 0 ? groups : H, (layer, head) => {
      Object.assign(side, { layer, head });
      draw();
    }, head);
  }

  // The slider goes through the steps of both; it stays where it was, as far as that is possible.
  function chooseSteps() {
    const at = looking.steps[looking.step] ?? Infinity;
    looking.steps = [...new Set(sides.flatMap(side => held[side.run].steps))].sort((a, b) => a - b);
    looking.step = Math.max(0, looking.steps.findLastIndex(step => step <= at));
    $("step").max = looking.steps.length - 1;
    $("steps").hidden = looking.steps.length < 2;
  }

  const snapshot = side => Math.max(0, held[side.run].steps.findLastIndex(step => step <= looking.steps[looking.step]));
  const seen = side => ({ layer: side.layer, head: looking.average ? null : side.head, weighted: looking.weighted });
  let turn = 0;
  async function draw() {
    const mine = ++turn;
    showStep(looking.step, looking.steps[looking.step]);
    const found = await Promise.all(sides.map(side => {
      const of = held[side.run], k = snapshot(side);
      return load(`${side.run}/${k}`, [of.maps[k], of.shape, of]);
    }));
    if (mine !== turn) return;
    const alike = found.length === 2
      && found[0].tokens.join("\0") === found[1].tokens.join("\0");
    sides.forEach((side, k) => drawSide(side, found[k], alike ? sides[1 - k] : null, found[1 - k]));
  }

  function drawSide(side, view, other, theirs) {
    const of = held[side.run], step = of.steps[snapshot(side)], asked = looking.steps[looking.step], what = seen(side);
    const name = looking.average ? `Layer ${side.layer}, the average of its ${view.H} heads,`
      : `Head ${headName(side.layer, side.head)}`;
    side.title.textContent = `${name} after ${count(step)} steps`;
    side.note.textContent = step === asked ? "" : step < asked ? `its last snapshot before step ${count(asked)}`
      : "its first snapshot";
    side.drawGrid(view, what);
    const beside = (i, j) => el("div", {}, el("small", {},
      `the other map there: ${figure(reader(theirs, seen(other))(i, j))}`));
    side.draw(mapOf(view, what, {
      most: 760, tell: (i, j) => [...reading(view, what, i, j), ...other ? [beside(i, j)] : []],
      enter: (i, j) => other?.draw.mark(i, j), leave: () => other?.draw.mark(-1, -1),
    }));
    colourBar(side.bar, what.weighted ? "weight × ‖v W_O‖" : "weight", largest(view, what.weighted));
    side.kept.textContent = PRECISION + (of.steps.length < of.of
      ? ` ${of.steps.length} of the run's ${of.of} snapshots are in this page.` : "");
  }

  return draw;
}
