/** Numbers and texts as the pages write them. */

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

/**
 * @param {string} character - Control character below the space.
 * @returns {string} Its symbol in the block "Control Pictures".
 */
const controlPicture = character => String.fromCodePoint(0x2400 + character.codePointAt(0));

/**
 * @param {string} character
 * @returns {string}
 */
function visibleCharacter(character) {
  if (character in VISIBLE_MARKS) return VISIBLE_MARKS[character];
  if (character < " ") return controlPicture(character);
  return INVISIBLE.test(character) ? "�" : character;
}

/**
 * Make the white space, control characters and invisible marks of a token visible.
 *
 * @param {string} text
 * @returns {string}
 */
export function makeVisible(text) {
  return [...text].map(visibleCharacter).join("") || "∅";
}

/**
 * Make a token visible and shorten it; repeated white space is counted.
 *
 * @param {string} text
 * @param {number} [maxLength] - In characters.
 * @returns {string}
 */
export function shortenToken(text, maxLength = 14) {
  const counted = makeVisible(text).replace(
    /([·⏎⇥])\1{2,}/g,
    (run, character) => `${character}×${run.length}`,
  );
  const characters = [...counted];
  if (characters.length <= maxLength) return characters.join("");
  return `${characters.slice(0, maxLength - 1).join("")}…`;
}

/**
 * Keep a text as it is, except for control characters, which become visible.
 *
 * @param {string} text
 * @returns {string}
 */
export function printable(text) {
  return (
    text
      .replace(/[\u2028\u2029]/g, "\n")
      // biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is replaced
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, controlPicture)
  );
}

/**
 * Make the name of a run or setting visible. Unlike in a token, spaces stay spaces.
 *
 * @param {string} text
 * @returns {string}
 */
export const printableName = text => makeVisible(text).replaceAll("·", " ").replace("∅", "(none)");

/**
 * @param {string} name - An identifier.
 * @returns {string} The name with spaces: previous token.
 */
export const readableName = name => name.replaceAll("_", " ");

/**
 * @param {number} n
 * @returns {string} The number with separators of thousands: 12,000.
 */
export const formatCount = n => n.toLocaleString("en");

/**
 * @param {number} n
 * @param {string} name - In the singular.
 * @returns {string} The number with its noun: 3 layers.
 */
export const pluralize = (n, name) => `${formatCount(n)} ${name}${n === 1 ? "" : "s"}`;

/**
 * Write a number with about four significant digits.
 *
 * @param {number | null | undefined} x
 * @returns {string} A dash if the number is unknown.
 */
export function formatNumber(x) {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3) return x.toExponential(2);
  return size >= 1000 ? formatCount(Math.round(x)) : x.toPrecision(4);
}

/** Write a number with so many decimals. */
const formatDecimals = (x, decimals) =>
  x.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

/**
 * Write a value with its standard error, to the first digit of the error: 1.39 ± 0.06.
 *
 * @param {number | null | undefined} x
 * @param {number | null} [error]
 * @param {number} [errorDigits] - Significant digits of the error, to which the value is rounded.
 * @returns {string}
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

/**
 * Write a value with a bound of its error, to the second digit of the bound: 0.0831 ± 0.0013. The
 * bound is rounded up, after it grew by 5%, which covers the rounding of the value.
 *
 * @param {number} x
 * @param {number} bound - Positive.
 * @returns {string}
 */
export function formatWithBound(x, bound) {
  const decimals = Math.min(20, Math.max(0, 1 - Math.floor(Math.log10(1.05 * bound))));
  const roundedUp = Math.ceil(1.05 * bound * 10 ** decimals) / 10 ** decimals;
  return `${x.toFixed(decimals)} ± ${roundedUp.toFixed(decimals)}`;
}

/**
 * @param {number} seconds
 * @returns {string} 12.3 s, 4 min 5 s or 2 h 3 min.
 */
export function formatDuration(seconds) {
  if (seconds < 59.95) return `${seconds.toPrecision(3)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/**
 * Write a number with its sign and two decimals; a dash if it is not finite.
 *
 * @param {number} x
 * @returns {string}
 */
export function formatSigned(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x).toFixed(2);
  if (x === 0) return size;
  return x > 0 ? `+${size}` : `−${size}`;
}
