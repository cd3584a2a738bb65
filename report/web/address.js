// What the address asks for, as far as it is well formed; null for the rest. head: [layer, head].
export function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const whole = name => (/^\d{1,12}$/.test(asked.get(name) ?? "") ? Number(asked.get(name)) : null);
  const head = /^L(\d{1,4})H(\d{1,4})$/.exec(asked.get("head") ?? "");
  return {
    head: head && [Number(head[1]), Number(head[2])],
    step: whole("step"),
    token: whole("token"),
    view: asked.get("view"),
    weights: asked.get("weights"),
    heads: asked.get("heads"),
    first: asked.get("first"),
    on: asked.get("on"),
    text: asked.get("text"),
    off: asked.get("off")?.split(",").filter(Boolean) ?? [],
    hidden: (asked.get("hidden") ?? "")
      .split(",")
      .filter(part => /^\d{1,6}$/.test(part))
      .map(Number),
  };
}

// Show these in the address, those that are null left out. Not at once: a browser takes a few changes a second.
let addressTimer = 0;
export function writeAddress(parts) {
  const known = Object.entries(parts).filter(([, value]) => value !== null && value !== undefined);
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    try {
      history.replaceState(history.state, "", `#${new URLSearchParams(known)}`);
    } catch {
      /* a page within another one has no address of its own */
    }
  }, 150);
}
