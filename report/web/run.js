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
import { $, DEEP, el, entitle, explainWords, figure, setUpTheme, some } from "./draw.js";
import { headNames, measured, scoreNames, valueAt } from "./heads.js";
import { follow, scrollAsBefore } from "./live.js";
import { H, L, choose, data, groups, on, state } from "./store.js";
import { drawFindings } from "./terms.js";
import { drawTraining, secondsInAll, setUpTraining } from "./training.js";

// [layer, head] that tells most: the one that the page's first sentence names; else of induction, where there is any,
// or of the token before.
function firstHead() {
  const named = /L(\d+)H(\d+)/.exec(data.findings?.[0]?.[0]);
  if (named) return [Number(named[1]), Number(named[2])];
  const score = (name, head) => valueAt(`heads/${name}/${head}`, measured[name]?.at(-1)) ?? 0;
  const best = name =>
    headNames.reduce((best, head) => (score(name, head) > score(name, best) ? head : best), "L0H0");
  const inducing = best("induction"),
    clear = score("induction", inducing) >= 0.15 || !measured.previous_token;
  return (clear ? inducing : best("previous_token")).slice(1).split("H").map(Number);
}

async function start() {
  on("head", showHead);
  entitle(data.title, "GlassGPT");
  const shared = groups < H ? ` over ${some(groups, "key/value head")}` : "";
  const losses = data.kind === "run" ? data.curves["val/loss"].values : [];
  const facts = losses.length ? [`validation loss ${figure(losses.at(-1))}`] : [];
  facts.push(...(L ? [some(L, "layer"), some(H, "head") + shared] : []));
  const shown = data.kind === "run" ? " of text shown" : "";
  if (data.probes.length) facts.push(`${some(data.probes[0].T, "token")}${shown}`);
  if (data.steps.length > 1) facts.push(some(data.steps.length, "snapshot"));
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
  explainWords();
  if (data.kind === "run") {
    setUpTraining();
    drawTraining();
  }
  if (data.probes.length) {
    setUpMaps();
    $("looking")
      .querySelector(".stage")
      .classList.toggle("many", H > 14 && L <= DEEP);
    document.body.classList.toggle("deep", L > DEEP);
    if (L > DEEP) $("reading").append($("card-part")); // in the first window
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
  if (data.kind === "run") follow($("alive"), { ...data, seconds: secondsInAll() }, playing);
  await show();
  if (L > DEEP) revealHead();
  scrollAsBefore();
}

start();
