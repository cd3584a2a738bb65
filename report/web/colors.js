import { el } from "./dom.js";
import { formatSigned } from "./format.js";

// ---- colours: a path with even steps of lightness, from dark indigo over red to a pale yellow

const RAMP_STOPS = [
  [12, 12, 34],
  [41, 16, 65],
  [78, 15, 87],
  [120, 6, 96],
  [161, 2, 91],
  [196, 28, 77],
  [224, 64, 57],
  [241, 104, 40],
  [247, 145, 56],
  [247, 185, 104],
  [245, 218, 160],
  [252, 247, 212],
];
export const RAMP = Array.from({ length: 256 }, (_, i) => {
  const at = (i / 255) * (RAMP_STOPS.length - 1);
  const k = Math.min(RAMP_STOPS.length - 2, Math.floor(at));
  return RAMP_STOPS[k].map((c, n) => Math.round(c + (at - k) * (RAMP_STOPS[k + 1][n] - c)));
});

const prefersDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const isDark = () =>
  (document.documentElement.dataset.theme ?? (prefersDark() ? "dark" : "light")) === "dark";
// The place of a share among the 256 colours, by its square root, so that what is small stays visible; of a signed
// scale 128 is nothing, and what is not known.
export function colorIndex(share, signed = false) {
  const root = Math.sqrt(Math.abs(share) || 0);
  if (signed) return 128 + (Math.sign(share) || 0) * Math.min(127, Math.round(127 * root));
  return share > 0 ? Math.min(255, Math.round(255 * root)) : 0;
}

// A colour as [red, green, blue]; of a signed scale red is above nothing, blue below.
function colorAt(index, signed = false) {
  if (!signed) return RAMP[isDark() ? index : 255 - index];
  const [below, nothing, above] = isDark()
    ? [
        [70, 160, 255],
        [32, 32, 39],
        [255, 92, 120],
      ]
    : [
        [20, 100, 190],
        [250, 249, 247],
        [179, 18, 63],
      ];
  const t = (index - 128) / 127;
  const end = t < 0 ? below : above;
  return nothing.map((c, k) => Math.round(c + Math.min(1, Math.abs(t)) * (end[k] - c)));
}

export function palette(signed = false) {
  // as canvas pixels, in memory order
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const [r, g, b] = colorAt(i, signed);
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}

// The colours of a scale that ends at `most`, with figures.
export function drawColorBar(host, name, most, signed = false) {
  const ramp = el("canvas", { className: "ramp", width: 255, height: 1, "aria-hidden": "true" });
  const context = ramp.getContext("2d");
  for (let i = 1; i < 256; i++) {
    context.fillStyle = `rgb(${colorAt(i, signed)})`;
    context.fillRect(i - 1, 0, 1, 1);
  }
  const stops = signed ? [-1, -0.25, 0, 0.25, 1] : [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const text = m =>
    signed && m
      ? formatSigned(m * most)
      : most === 1
        ? String(m).replace("0.", ".")
        : String(Number((m * most).toPrecision(2)));
  const left = m => (signed ? 50 + 50 * Math.sign(m) * Math.sqrt(Math.abs(m)) : 100 * Math.sqrt(m));
  const tick = m =>
    el(
      "span",
      { style: `left: ${left(m)}%; translate: ${-50 - (signed ? 50 * Math.trunc(m) : 0)}%` },
      text(m),
    );
  host.replaceChildren(
    el("span", {}, name),
    ramp,
    el("div", { className: "ticks" }, ...stops.map(tick)),
  );
}

/**
 * Return a color of the style sheet as a canvas takes it.
 *
 * @param {string} color - CSS color, for example `var(--accent)`.
 * @returns {string}
 */
export function resolveColor(color) {
  const sample = document.body.appendChild(el("i", { style: `color: ${color}` }));
  const resolved = getComputedStyle(sample).color;
  sample.remove();
  return resolved;
}
