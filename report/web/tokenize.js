// Text to token ids and back, as data/tokenizer.py has it. Knows nothing of the page.

// The bytes of a text or of base64, each as a character: what Maps can be asked for.
const bytesOf = text =>
  Array.from(new TextEncoder().encode(text), byte => String.fromCharCode(byte)).join("");
const textOf = bytes =>
  new TextDecoder("utf-8", { ignoreBOM: true }).decode(
    Uint8Array.from(bytes, c => c.charCodeAt(0)),
  );

// What splits a text before pairs are joined: tiktoken's regular expression as JavaScript has it. Nothing that one of
// its possessive repetitions takes could be taken otherwise, so that greedy ones are the same.
function splitterOf(pattern) {
  const greedy = pattern.replace(/([+*?]|\{\d+(?:,\d*)?\})\+/g, "$1");
  return new RegExp(
    greedy.replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}"),
    "gu",
  );
}

const LONGEST = 512;
const LONG_RUN = new RegExp(
  "(?<!S)S{513,}|(?<!s)s{513,}"
    .replaceAll("S", "[^\\p{White_Space}\\x1c-\\x1f]")
    .replaceAll("s", "[\\p{White_Space}\\x1c-\\x1f]"),
  "gu",
);

// The text cut after each LONGEST characters of a longer run, of white space or without any.
function bounded(text) {
  const parts = [];
  let from = 0;
  for (const { 0: run, index } of text.matchAll(LONG_RUN)) {
    const characters = [...run];
    for (let at = LONGEST, place = index; at < characters.length; at += LONGEST) {
      place += characters.slice(at - LONGEST, at).join("").length;
      parts.push(text.slice(from, place));
      from = place;
    }
  }
  return [...parts, text.slice(from)];
}

// The ids of some bytes: of all pairs of neighbours the one whose token has the lowest id is joined first.
function joined(bytes, ids) {
  if (ids.has(bytes)) return [ids.get(bytes)];
  const parts = [...bytes];
  for (;;) {
    let best = Infinity;
    let at = -1;
    for (let i = 0; i + 1 < parts.length; i++) {
      const id = ids.get(parts[i] + parts[i + 1]) ?? Infinity;
      if (id < best) [best, at] = [id, i];
    }
    if (at < 0) return parts.map(part => ids.get(part));
    parts.splice(at, 2, parts[at] + parts[at + 1]);
  }
}

// What encodes and decodes, by what tokenizer.json has: {encode(text), decode(ids), word(id)}.
export function tokenizerOf(saved) {
  if (saved.kind === "char") {
    const alphabet = [...saved.alphabet];
    const ids = new Map(alphabet.map((c, id) => [c, id]));
    return {
      encode: text =>
        Array.from(text, c => {
          if (!ids.has(c))
            throw new Error(
              `the character ${JSON.stringify(c)} is not among those that this model knows`,
            );
          return ids.get(c);
        }),
      decode: some => some.map(id => alphabet[id] ?? "").join(""),
      word: id => alphabet[id] ?? "",
    };
  }
  const bytes = saved.tokens.map(token => (token === null ? "" : atob(token)));
  const splitter = splitterOf(saved.pattern);
  const ids = new Map(bytes.map((token, id) => [token, id]).filter(([token]) => token));
  const named = id => (id === saved.end_of_text ? "<|endoftext|>" : (bytes[id] ?? ""));
  return {
    encode: text =>
      bounded(text.toWellFormed()).flatMap(part =>
        Array.from(part.matchAll(splitter), ([piece]) => joined(bytesOf(piece), ids)).flat(),
      ),
    decode: some => textOf(some.map(named).join("")),
    word: id => textOf(named(id)),
  };
}
