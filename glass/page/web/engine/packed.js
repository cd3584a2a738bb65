/** Compressed data, embedded in the page in base64. */

/** Return the base64 of an embedded element, by its number in the page's data. */
export const blobText = number => document.querySelectorAll("script.blob")[number].textContent;

export async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

export const unpack = number => inflate(blobText(number));
