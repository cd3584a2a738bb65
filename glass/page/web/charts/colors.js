/** Colors of the maps, in the light and the dark theme. */

import { el } from "../base/dom.js";
import { formatSigned } from "../base/format.js";

/** From dark indigo over red to a pale yellow, in even steps of lightness. */
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

/** 256 colors as [red, green, blue], from dark to light. */
export const RAMP = Array.from({ length: 256 }, (_, index) => {
  const position = (index / 255) * (RAMP_STOPS.length - 1);
  const k = Math.min(RAMP_STOPS.length - 2, Math.floor(position));
  return mix(RAMP_STOPS[k], RAMP_STOPS[k + 1], position - k);
});

/** Ends and middle of the colors for values with a sign. */
const SIGNED_DARK = { negative: [70, 160, 255], zero: [32, 32, 39], positive: [255, 92, 120] };
const SIGNED_LIGHT = { negative: [20, 100, 190], zero: [250, 249, 247], positive: [179, 18, 63] };

/** Shares of the largest value that are written at a color bar. */
const TICKS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
const SIGNED_TICKS = [-1, -0.25, 0, 0.25, 1];

/** Mix two colors; `share` is that of `to`. */
function mix(from, to, share) {
  return from.map((channel, k) => Math.round(channel + share * (to[k] - channel)));
}

/** Return whether the page shows its dark theme. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/**
 * Return the index, from 0 to 255, of the color of a value as a share of the largest one. Shares with
 * a sign are from -1 to 1; 128 then stands for 0, as NaN does. Lightness is linear in the share.
 */
export function linearColorIndex(share, signed = false) {
  const clamped = Math.max(signed ? -1 : 0, Math.min(1, share)) || 0;
  return signed ? 128 + Math.round(127 * clamped) : Math.round(255 * clamped);
}

/** Return a color's index as `linearColorIndex` does, of the square root: small values are visible. */
export const colorIndex = (share, signed = false) =>
  linearColorIndex(Math.sign(share) * Math.sqrt(Math.abs(share)), signed);

/** Return [red, green, blue] of a color; with a sign, red is above zero and blue below. */
function colorAt(index, signed) {
  if (!signed) return RAMP[isDark() ? index : 255 - index];
  const { negative, zero, positive } = isDark() ? SIGNED_DARK : SIGNED_LIGHT;
  const share = (index - 128) / 127;
  return mix(zero, share < 0 ? negative : positive, Math.min(1, Math.abs(share)));
}

/**
 * Return black or white, whichever is easier to read on a color. Their contrast to any color is at
 * least 4.5, as the Web Content Accessibility Guidelines 2 ask for.
 */
export function inkOn(index, signed = false) {
  const [red, green, blue] = colorAt(index, signed).map(channel => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return luminance > 0.179 ? "#000" : "#fff"; // where both have the same contrast
}

/** Return all colors as pixels of a canvas. */
export function palette(signed = false) {
  return Uint32Array.from({ length: 256 }, (_, index) => {
    const [red, green, blue] = colorAt(index, signed);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

/** Draw the colors with their values, of which `largest` is that of the last color. */
export function drawColorBar(host, name, largest, signed = false) {
  const ramp = el("canvas", { className: "ramp", width: 255, height: 1, "aria-hidden": "true" });
  const context = ramp.getContext("2d");
  for (let index = 1; index < 256; index++) {
    context.fillStyle = `rgb(${colorAt(index, signed)})`;
    context.fillRect(index - 1, 0, 1, 1);
  }
  const ticks = signed ? SIGNED_TICKS : TICKS;
  const createTick = signed ? createSignedTick : createPlainTick;
  const tickElements = ticks.map(share => createTick(share, largest));
  host.replaceChildren(
    el("span", {}, name),
    ramp,
    el("div", { className: "ticks" }, ...tickElements),
  );
}

function createPlainTick(share, largest) {
  const value = Number((share * largest).toPrecision(2));
  const text = largest === 1 ? String(share).replace("0.", ".") : String(value);
  return el("span", { style: `left: ${100 * Math.sqrt(share)}%; translate: -50%` }, text);
}

function createSignedTick(share, largest) {
  const left = 50 + 50 * Math.sign(share) * Math.sqrt(Math.abs(share));
  const shift = -50 - 50 * Math.trunc(share); // the first and the last one stay within the bar
  const text = share ? formatSigned(share * largest) : "0";
  return el("span", { style: `left: ${left}%; translate: ${shift}%` }, text);
}

/** Return a color of the style sheet, such as `var(--accent)`, as a canvas takes it. */
export function resolveColor(color) {
  const sample = document.body.appendChild(el("i", { style: `color: ${color}` }));
  const resolved = getComputedStyle(sample).color;
  sample.remove();
  return resolved;
}
