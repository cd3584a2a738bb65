// The page of a run, or of one prompt, put together. Stands last.

import {
  draw,
  kept,
  live,
  revealHead,
  setUpControls,
  setUpGrid,
  setUpMaps,
  setUpProbe,
  setUpTrying,
  show,
  showHead,
  takeAddress,
} from "./attention.js";
import { $, el } from "./dom.js";
import { drawFindings } from "./findings.js";
import { formatNumber, pluralize } from "./format.js";
import { setTitle, setUpTheme } from "./frame.js";
import { headNames, measuredIndices, metricAt, scoreNames } from "./head_metrics.js";
import { MIN_DEEP_LAYERS } from "./labels.js";
import { follow, scrollAsBefore } from "./live.js";
import { choose, data, groups, H, L, on, state } from "./store.js";
import { explainTerms } from "./tooltip.js";
import { drawTraining, setUpTraining, totalSeconds } from "./training.js";

// [layer, head] that tells most: the one that the page's first sentence names; else of induction, where there is any,
// or of the token before.
function firstHead() {
  const named = /L(\d+)H(\d+)/.exec(data.findings?.[0]?.heads[0]);
  if (named) return [Number(named[1]), Number(named[2])];
  const score = (name, head) =>
    metricAt(`heads/${name}/${head}`, measuredIndices[name]?.at(-1)) ?? 0;
  const best = name =>
    headNames.reduce((best, head) => (score(name, head) > score(name, best) ? head : best), "L0H0");
  const inducing = best("induction");
  const clear = score("induction", inducing) >= 0.15 || !measuredIndices.previous_token;
  return (clear ? inducing : best("previous_token")).slice(1).split("H").map(Number);
}

async function start() {
  on("head", showHead);
  setTitle(data.title, "GlassGPT");
  const shared = groups < H ? ` over ${pluralize(groups, "key/value head")}` : "";
  const losses = data.kind === "run" ? data.curves["val/loss"].values : [];
  const facts = losses.length ? [`validation loss ${formatNumber(losses.at(-1))}`] : [];
  facts.push(...(L ? [pluralize(L, "layer"), pluralize(H, "head") + shared] : []));
  const shown = data.kind === "run" ? " of text shown" : "";
  if (data.probes.length) facts.push(`${pluralize(data.probes[0].T, "token")}${shown}`);
  if (data.steps.length > 1) facts.push(pluralize(data.steps.length, "snapshot"));
  $("summary").textContent = facts.join(" · ");
  $("findings").hidden = data.kind !== "run" && !data.findings.length;
  drawFindings(data.findings ?? [], (layer, head) => {
    if (!data.probes.length) return;
    Object.assign(state, { needs: false, average: ($("average").checked = false) });
    $("looks").checked = true;
    setUpProbe();
    choose(layer, head);
    $("large").scrollIntoView({ block: "nearest" });
  });
  const text = data.probes.find(p => p.name === "text");
  if (kept.length) data.probes.push(live);
  $("nothing").hidden = data.probes.length > 0;
  if (data.of)
    $("nothing").textContent = "These tokens are too many for a page to hold their attention maps.";
  else if (data.unread) $("nothing").textContent = "The snapshots of this run cannot be read.";
  $("looking").hidden = !data.probes.length;
  [state.layer, state.head] = firstHead();
  setUpTheme(() => {
    if (data.kind === "run") drawTraining();
    draw();
  });
  setUpControls();
  explainTerms();
  if (data.kind === "run") {
    setUpTraining();
    drawTraining();
  }
  if (data.probes.length) {
    setUpMaps();
    $("looking")
      .querySelector(".stage")
      .classList.toggle("many", H > 14 && L <= MIN_DEEP_LAYERS);
    document.body.classList.toggle("deep", L > MIN_DEEP_LAYERS);
    if (L > MIN_DEEP_LAYERS) $("reading").append($("card-part")); // in the first window
  }
  const sections = { attention: true, heads: scoreNames.length, training: data.kind === "run" };
  $("contents").append(
    ...Object.keys(sections)
      .filter(id => sections[id])
      .map(id => el("button", { type: "button", onclick: () => $(id).scrollIntoView() }, id)),
  );
  setUpTrying((text?.tokens ?? []).join(""));
  takeAddress();
  if (data.probes.length) setUpGrid();
  onhashchange = () => {
    takeAddress();
    choose(state.layer, state.head);
    show();
  };
  const playing = () => $("play").textContent !== "▶" || live.going;
  if (data.kind === "run") follow($("alive"), { ...data, seconds: totalSeconds() }, playing);
  await show();
  if (L > MIN_DEEP_LAYERS) revealHead();
  scrollAsBefore();
}

start();
