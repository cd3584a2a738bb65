/** Numbers, texts and names as the pages write them. */

/** Marks in place of characters that would not be visible. */
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
const INVISIBLE = /[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/u;

/** Return the symbol of a control character in the block "Control Pictures". */
const controlPicture = character => String.fromCodePoint(0x2400 + character.codePointAt(0));

function visibleCharacter(character) {
  if (character in VISIBLE_MARKS) return VISIBLE_MARKS[character];
  if (character < " ") return controlPicture(character);
  return INVISIBLE.test(character) ? "�" : character;
}

/** Make the white space, control characters and invisible marks of a token visible. */
export function makeVisible(text) {
  return [...text].map(visibleCharacter).join("") || "∅";
}

/** Make a token visible and shorten it; repeated white space is counted. */
export function shortenToken(text, maxLength = 14) {
  const counted = makeVisible(text).replace(
    /([·⏎⇥])\1{2,}/g,
    (run, character) => `${character}×${run.length}`,
  );
  const characters = [...counted];
  if (characters.length <= maxLength) return characters.join("");
  return `${characters.slice(0, maxLength - 1).join("")}…`;
}

/** Keep a text as it is, except for control characters, which become visible. */
export function printable(text) {
  return (
    text
      .replace(/[\u2028\u2029]/g, "\n")
      // biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is replaced
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, controlPicture)
  );
}

/** Make the name of a run or setting visible. Unlike in a token, spaces stay spaces. */
export const printableName = text => makeVisible(text).replaceAll("·", " ").replace("∅", "(none)");

export const readableName = name => name.replaceAll("_", " ");

/** Write a number with separators of thousands: 12,000. */
export const formatCount = n => n.toLocaleString("en");

/** Write a number in a few characters: 0.001, 1,200, 20k, 1.5M, 2G. */
export function formatCompact(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 1e-3) return value.toExponential();
  if (size > 0 && size < 1) return String(Number(value.toPrecision(9)));
  if (size >= 1e9) return `${value / 1e9}G`;
  if (size >= 1e6) return `${value / 1e6}M`;
  if (size >= 1e4) return `${value / 1e3}k`;
  return value.toLocaleString("en", { maximumFractionDigits: 9 });
}

/** Write a number with its noun, given in the singular: 3 layers. */
export const pluralize = (n, noun) => `${formatCount(n)} ${noun}${n === 1 ? "" : "s"}`;

/** Say how many tokens of a text are read, and that they are not all. */
export const describeTokens = (count, countOfAll) =>
  pluralize(count, "token") +
  (count < countOfAll ? `, the last of ${formatCount(countOfAll)}` : "");

/** Write a number with about four significant digits; a dash if it is unknown. */
export function formatNumber(x) {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3) return x.toExponential(2);
  return size >= 1000 ? formatCount(Math.round(x)) : x.toPrecision(4);
}

/** Write a number with its sign and two decimals; a dash if it is not finite. */
export function formatSigned(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x).toFixed(2);
  if (x === 0) return size;
  return x > 0 ? `+${size}` : `−${size}`;
}

/** Write a number between -1 and 1 without the zero before its point: .53 or −.08. */
export function formatInCell(x, decimals = 2) {
  const size = Math.abs(x).toFixed(decimals).replace(/^0\./, ".");
  return x < 0 && Number(size) !== 0 ? `−${size}` : size;
}

export const formatProbability = x => (x >= 0.001 ? x.toFixed(3) : x.toExponential(1));

const formatDecimals = (x, decimals) =>
  x.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

/**
 * Write a value with its standard error, to the first digit of the error, or to `errorDigits`
 * significant ones: 1.39 ± 0.06.
 */
export function formatWithError(x, error, errorDigits = 1) {
  if (!Number.isFinite(x) || !Number.isFinite(error)) return formatNumber(x);
  if (Math.abs(error) <= 1e-12 * Math.abs(x)) return formatNumber(x); // of equal values
  const roundedError = Number(error.toPrecision(errorDigits));
  const lastPlace = Math.floor(Math.log10(roundedError)) - errorDigits + 1;
  const decimals = Math.min(20, Math.max(0, -lastPlace));
  const value = formatDecimals(x, decimals).replace(/^-(0\.?0*)$/, "$1");
  return `${value} ± ${formatDecimals(error, decimals)}`;
}

/** Write 12.3 s, 4 min 5 s or 2 h 3 min. */
export function formatDuration(seconds) {
  if (seconds < 59.95) return `${seconds.toPrecision(3)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Return L2H3 for head 3 of layer 2. */
export const headName = (layer, head) => `L${layer}H${head}`;

/**
 * Return [layer, head] of a name, or null if it is not that of a head.
 *
 * @param {string} name
 * @returns {[number, number] | null}
 */
export function parseHead(name) {
  const match = /^L(\d+)H(\d+)$/.exec(name);
  return match && [Number(match[1]), Number(match[2])];
}
