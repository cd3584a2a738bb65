/** Text to token ids and back, as data/tokenizer.py does it. */

/** A byte string has one character per byte, so that it can be the key of a Map. */
const toByteString = text =>
  Array.from(new TextEncoder().encode(text), byte => String.fromCharCode(byte)).join("");
const fromByteString = bytes =>
  new TextDecoder("utf-8", { ignoreBOM: true }).decode(
    Uint8Array.from(bytes, character => character.charCodeAt(0)),
  );

/** Decode a byte string without parts of characters; the replacement character may be one of them. */
const decodeCharacters = bytes =>
  bytes
    .split(toByteString("\ufffd"))
    .map(part => fromByteString(part).replaceAll("\ufffd", ""))
    .join("\ufffd");

/**
 * Translate tiktoken's regular expression, which splits a text before pairs are merged.
 *
 * Its possessive repetitions may be greedy here: nothing that one of them takes could be taken
 * otherwise.
 */
function createSplitter(pattern) {
  const greedy = pattern.replace(/([+*?]|\{\d+(?:,\d*)?\})\+/g, "$1");
  const unicode = greedy
    .replaceAll("\\s", "\\p{White_Space}")
    .replaceAll("\\S", "\\P{White_Space}");
  return new RegExp(unicode, "gu");
}

const MAX_RUN_LENGTH = 512; // characters
const SPACE = "[\\p{White_Space}\\x1c-\\x1f]";
const NO_SPACE = "[^\\p{White_Space}\\x1c-\\x1f]";
const LONG_RUN = new RegExp(`(?<!${NO_SPACE})${NO_SPACE}{513,}|(?<!${SPACE})${SPACE}{513,}`, "gu");

/** Cut runs of white space, or of anything else, after each MAX_RUN_LENGTH characters. */
function cutLongRuns(text) {
  const parts = [];
  let start = 0;
  for (const { 0: run, index } of text.matchAll(LONG_RUN)) {
    const characters = [...run];
    let place = index;
    for (let at = MAX_RUN_LENGTH; at < characters.length; at += MAX_RUN_LENGTH) {
      place += characters.slice(at - MAX_RUN_LENGTH, at).join("").length;
      parts.push(text.slice(start, place));
      start = place;
    }
  }
  return [...parts, text.slice(start)];
}

/** Merge neighbors of a byte string, the pair with the lowest token id first; return the ids. */
function mergePairs(bytes, ids) {
  if (ids.has(bytes)) return [ids.get(bytes)];
  const parts = [...bytes];
  for (;;) {
    let lowest = Infinity;
    let place = -1;
    for (let i = 0; i + 1 < parts.length; i++) {
      const id = ids.get(parts[i] + parts[i + 1]) ?? Infinity;
      if (id >= lowest) continue;
      lowest = id;
      place = i;
    }
    if (place < 0) return parts.map(part => ids.get(part));
    parts.splice(place, 2, parts[place] + parts[place + 1]);
  }
}

function createCharTokenizer({ alphabet }) {
  const characters = [...alphabet];
  const ids = new Map(characters.map((character, id) => [character, id]));
  const tokenText = id => characters[id] ?? "";
  const encodeCharacter = character => {
    if (ids.has(character)) return ids.get(character);
    const message = `the character ${JSON.stringify(character)} is not in the model's vocabulary`;
    throw Object.assign(new Error(message), { name: "UnknownCharacterError" });
  };
  return {
    encode: text => Array.from(text, encodeCharacter),
    decode: some => some.map(tokenText).join(""),
    tokenText,
    size: characters.length,
    endOfText: null,
    startToken: ids.get("\n") ?? 0, // of a text without a prompt
  };
}

function createBytePairTokenizer({ tokens, pattern, end_of_text: endOfText }) {
  const byteStrings = tokens.map(token => (token === null ? "" : atob(token)));
  const splitter = createSplitter(pattern);
  const ids = new Map();
  byteStrings.forEach((bytes, id) => {
    if (bytes) ids.set(bytes, id);
  });
  const bytesOf = id => (id === endOfText ? "" : (byteStrings[id] ?? ""));
  const encodePart = part =>
    Array.from(part.matchAll(splitter), ([piece]) => mergePairs(toByteString(piece), ids)).flat();
  return {
    encode: text => cutLongRuns(text.toWellFormed()).flatMap(encodePart),
    decode: some => decodeCharacters(some.map(bytesOf).join("")),
    tokenText: id => (id === endOfText ? "<|endoftext|>" : fromByteString(bytesOf(id))),
    size: Math.max(tokens.length, endOfText + 1),
    endOfText,
    startToken: endOfText,
  };
}

const TOKENIZERS = { char: createCharTokenizer, bpe: createBytePairTokenizer };

export const createTokenizer = saved => TOKENIZERS[saved.kind](saved);
