// What the page shows, as the address has it behind "#": a link opens this very view again.

const DEFAULTS = {
  row: "", list: "samples", first: "0", filter: "", split: "", columns: "", boxes: "1", hide: "", draw: "",
  camera: "", loaded: "", seed: "0", epoch: "0", order: "", order_epoch: "0", step: "0", batch: "16",
  range: "50", alone: "",
};

export const state = { ...DEFAULTS };

export function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(DEFAULTS)) state[name] = given.get(name) ?? value;
}

export function write(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
}

/** Names in a list of the state, such as hidden classes. */
export const names = (name) => new Set(state[name].split("\n").filter(Boolean));

export function toggle(name, item) {
  const items = names(name);
  items.delete(item) || items.add(item);
  write({ [name]: [...items].join("\n") });
}
