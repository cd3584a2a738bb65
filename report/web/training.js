// How the training of a run went: figures, curves, samples, where the time went. Stands after page.js.

import { chart, compact } from "./charts.js";
import { $, bdi, el } from "./dom.js";
import { formatCount, formatDuration, formatNumber, printable } from "./format.js";
import { columns, data, scoredSteps } from "./store.js";

export const curve = (key, name, colour, bold) => ({
  name,
  colour,
  bold,
  xs: data.curves[key].steps,
  ys: data.curves[key].values,
});

export function drawTraining() {
  const draw = (id, how) => chart($(id) ?? $("charts").appendChild(el("div", { id })), how);
  const small = (id, title, key, more = {}) =>
    draw(id, { title, series: [curve(key, title.toLowerCase(), "accent")], ...more });
  draw("chart-loss", {
    title: "Loss, nats per token",
    height: 170,
    series: [
      curve("train/loss", "training", "soft"),
      curve("val/loss", "validation", "accent", true),
    ],
  });
  const gain = columns["probe/copying_gain"] ?? [];
  const measured = gain.map((_, k) => k).filter(k => gain[k] !== null);
  draw("chart-gain", {
    title: "Repeat gain, nats",
    zero: 0.1,
    series: [
      {
        name: "repeat gain",
        colour: "accent",
        bold: true,
        xs: measured.map(k => scoredSteps[k]),
        ys: measured.map(k => gain[k]),
        errors: measured.map(k => columns["probe/copying_gain_se"]?.[k] ?? null),
      },
    ],
  });
  const muon = curve("train/muon_lr", "Muon", "accent", true);
  if (muon.xs.length)
    draw("chart-lr", { title: "Rate", series: [curve("train/lr", "AdamW", "soft"), muon] });
  else small("chart-lr", "Learning rate", "train/lr");
  small("chart-speed", "Tokens per second", "train/tokens_per_second", { zero: 1 });
  small("chart-bits", "Bits per byte", "val/bits_per_byte");
  small("chart-norm", "Gradient norm", "train/grad_norm");
}

export const secondsInAll = () => Object.values(data.seconds).reduce((sum, s) => sum + s, 0);

export function setUpTraining() {
  $("training").hidden = false;
  const losses = data.curves["val/loss"];
  const best = losses.values.reduce((b, v, k) => (v < losses.values[b] ? k : b), 0);
  const spent = Object.entries(data.seconds).filter(([, s]) => s);
  const total = secondsInAll();
  const figures = [
    losses.values.length && [
      formatNumber(losses.values[best]),
      `best validation loss, at step ${formatCount(losses.steps[best])}`,
    ],
    data.step !== null && [
      formatCount(data.step),
      data.maxSteps > data.step ? `steps of ${formatCount(data.maxSteps)} so far` : "steps",
    ],
    data.tokens && [compact(Number(data.tokens.toPrecision(3))), "tokens seen"],
    total && [formatDuration(total), "in all"],
  ].filter(Boolean);
  $("figures").append(
    ...figures.map(([value, name]) => el("div", {}, el("b", {}, value), el("span", {}, name))),
  );
  if (!figures.length)
    $("figures").append(el("p", { className: "quiet" }, "Nothing has been measured yet."));
  const most = Math.max(...Object.values(data.curves).map(c => c.of));
  $("points").hidden = most <= data.points;
  $("points").textContent =
    `Curves are drawn through ${formatCount(data.points)} of up to ${formatCount(most)} measured points, evenly chosen.`;
  const setting = ([key, value]) =>
    el("tr", {}, el("th", { scope: "row" }, bdi(key)), el("td", {}, bdi(printable(value))));
  $("config").hidden = !data.config.length;
  $("config")
    .querySelector("tbody")
    .append(...data.config.map(setting));
  $("time").hidden = !total;
  $("time").parentElement.hidden = !total && !data.samples.length;
  showTime(spent, total);
  if (data.samples.length) setUpSamples(data.samples);
}

function showTime(spent, total) {
  const names = {
    train: "training",
    evaluate: "evaluating",
    attention: "looking at attention",
    save: "saving",
  };
  spent.forEach(([kind, s], k) => {
    const colour = `var(--${["c4", "c1", "c2", "c5"][k]})`;
    const share = `${((100 * s) / total).toFixed(1)}%`;
    $("time-bar").append(
      el("span", {
        style: `flex: ${s / total} 0 0; background: ${colour}`,
        title: `${names[kind]} ${formatDuration(s)}`,
      }),
    );
    $("time-list").append(
      el(
        "li",
        { style: `--c: ${colour}` },
        names[kind],
        el("b", {}, formatDuration(s)),
        el("i", {}, share),
      ),
    );
  });
}

function setUpSamples(samples, longest = 4000) {
  const select = $("sample-step");
  const at = () => Number(select.value);
  const show = (k, whole) => {
    const text = printable(samples[k].text);
    const cut = !whole && text.length > longest;
    select.value = k;
    $("sample").textContent = cut ? `${text.slice(0, longest)}…` : text;
    $("sample-all").hidden = !cut;
    $("sample-all").textContent = `show all ${formatCount(text.length)} characters`;
    $("sample-before").disabled = k === 0;
    $("sample-after").disabled = k === samples.length - 1;
  };
  $("samples").hidden = false;
  $("samples-note").textContent = data.samplesLeftOut
    ? `${data.samplesLeftOut} more are in the run's samples.jsonl`
    : "";
  select.append(
    ...samples.map((s, k) => el("option", { value: k }, `after step ${formatCount(s.step)}`)),
  );
  select.onchange = () => show(at());
  $("sample-before").onclick = () => show(at() - 1);
  $("sample-after").onclick = () => show(at() + 1);
  $("sample-all").onclick = () => show(at(), true);
  show(samples.length - 1);
}
