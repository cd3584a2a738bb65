/** The frames in which explore.py sends parts, answers and errors (glass/live/frames.py). */

const HEADER_BYTES = 8; // the lengths of the JSON and of the binary part, little-endian uint32

/** Arrays of the binary part by the name of their type. */
const ARRAYS = {
  float32: (buffer, offset, length) => new Float32Array(buffer.slice(offset, offset + 4 * length)),
  float16: (buffer, offset, length) =>
    new Float32Array(new Float16Array(buffer.slice(offset, offset + 2 * length))),
};

/**
 * Return a function that reads the next bytes of a stream, or null if it ends before.
 *
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {(length: number) => Promise<Uint8Array | null>}
 */
function createByteReader(stream) {
  const reader = stream.getReader();
  let rest = new Uint8Array(0);
  return async length => {
    const bytes = new Uint8Array(length);
    let filled = 0;
    while (filled < length) {
      if (!rest.length) {
        const { done, value } = await reader.read().catch(() => ({ done: true, value: null })); // it broke
        if (done) return null;
        rest = value;
      }
      const taken = rest.subarray(0, length - filled);
      bytes.set(taken, filled);
      filled += taken.length;
      rest = rest.subarray(taken.length);
    }
    return bytes;
  };
}

/**
 * Read the frames of a stream as they come in, until the stream ends.
 *
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<{part: any} | {answer: any} | {error: {name: string, message: string}}>}
 *   float16 numbers become a Float32Array.
 */
export async function* readFrames(stream) {
  const readBytes = createByteReader(stream);
  for (;;) {
    const header = await readBytes(HEADER_BYTES);
    if (!header) return;
    const lengths = new DataView(header.buffer);
    const text = await readBytes(lengths.getUint32(0, true));
    const binary = await readBytes(lengths.getUint32(4, true));
    if (!text || !binary) return;
    const insertArray = (_key, value) =>
      value?.array ? ARRAYS[value.array](binary.buffer, value.offset, value.length) : value;
    yield JSON.parse(new TextDecoder().decode(text), insertArray);
  }
}
