const VISIBLE_MARKS = {
  " ": "·",
  "\n": "⏎",
  "\u2028": "⏎",
  "\u2029": "⏎",
  "\t": "⇥",
  "\r": "␍",
  "\u007f": "␡",
  "\u00a0": "⍽",
};

// A token with its white space, control characters and invisible marks made visible.
export function makeVisible(text) {
  const shown = c =>
    VISIBLE_MARKS[c] ??
    (c < " "
      ? String.fromCodePoint(0x2400 + c.codePointAt(0))
      : /[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/u.test(c)
        ? "�"
        : c);
  return [...text].map(shown).join("") || "∅";
}

export function shortenToken(text, most = 14) {
  const characters = [
    ...makeVisible(text).replace(/([·⏎⇥])\1{2,}/g, (run, c) => `${c}×${run.length}`),
  ];
  return characters.length > most
    ? `${characters.slice(0, most - 1).join("")}…`
    : characters.join("");
}

// Text as it is, with only what would not show made visible.
export function printable(text) {
  return text
    .replace(/[\u2028\u2029]/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, c => String.fromCodePoint(0x2400 + c.codePointAt(0)));
}

export const readableName = name => name.replaceAll("_", " ");
export const formatCount = n => n.toLocaleString("en");
export const pluralize = (n, name) => `${formatCount(n)} ${name}${n === 1 ? "" : "s"}`;
export const printableName = text => makeVisible(text).replaceAll("·", " ").replace("∅", "(none)"); // a name, not a token

export function formatNumber(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5
    ? formatCount(Math.round(x))
    : size < 1e-3
      ? x.toExponential(2)
      : size >= 1000
        ? formatCount(Math.round(x))
        : x.toPrecision(4);
}

// A value with its standard error, to the digit that the error leaves: 1.39 ± 0.06.
export function formatWithError(x, error) {
  if (x === null || x === undefined || !error) return formatNumber(x);
  const digits = Math.min(20, Math.max(0, -Math.floor(Math.log10(Number(error.toPrecision(1))))));
  return `${x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1")} ± ${error.toFixed(digits)}`;
}

export function roundUp(x) {
  const unit = 10 ** (Math.floor(Math.log10(x)) - 1);
  // the share above covers the rounding of the value beside it
  return Number((Math.ceil((x * 1.05) / unit) * unit).toPrecision(2));
}

export function formatDuration(seconds) {
  return seconds < 60
    ? `${seconds.toPrecision(3)} s`
    : seconds < 3600
      ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`
      : `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export const formatSigned = x =>
  Number.isFinite(x) ? `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x).toFixed(2)}` : "–";
