/** Compressed data, embedded in the page in base64. */

/** The embedded elements, in the order of their numbers in the page's data. */
export const blobs = document.querySelectorAll("script.blob");

/**
 * Decompress an embedded element.
 *
 * @param {number} number
 * @returns {Promise<Uint8Array>}
 */
export async function unpack(number) {
  const text = atob(blobs[number].textContent);
  const bytes = Uint8Array.from(text, character => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}
