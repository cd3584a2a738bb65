// Compressed bytes in the page, an element each.

export const blobs = document.querySelectorAll("script.blob");

export async function unpacked(number) {
  const text = atob(blobs[number].textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}
