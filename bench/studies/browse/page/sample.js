// One sample: cameras with boxes, the view from above, values, and where its bytes are.

import { $, address, ask, busy, bytes, count, draw, make, words } from "./dom.js";
import { names, state, toggle, write } from "./state.js";

let dataset = null;
let shown = null; // what /api/sample said
let asked = new AbortController();

export const start = (description) => { dataset = description; };

export async function show(row) {
  asked.abort();
  asked = new AbortController();
  const { signal } = asked;
  $("sample").setAttribute("aria-busy", "true");
  try {
    const progress = dataset.is_remote ? () => ask("/api/progress", { row }, signal) : null;
    const sample = await busy(`Loading sample ${row} from ${dataset.location} …`, ask("/api/sample", { row }, signal), progress);
    shown = { row, attributes: [], ...sample };
    drawSample(signal);
    const attributes = await ask("/api/attributes", { row }, signal).catch((error) => ({ "": error.message }));
    if (signal.aborted) return;
    shown.attributes = Object.entries(attributes);
    $("attributes")?.replaceWith(valueCard("attributes", "Attributes", shown.attributes));
  } catch (error) {
    if (error.name !== "AbortError") $("trouble").textContent = error.message;
  } finally {
    if (!signal.aborted) $("sample").removeAttribute("aria-busy");
  }
}

/** Draw the sample again, as the state says. */
export function drawSample(signal = asked.signal) {
  if (!shown) return;
  $("trouble").textContent = shown.error ?? "";
  $("key").textContent = shown.place.key;
  const has = (shown.cameras ?? []).length > 0;
  drawTools();
  $("cameras").className = [state.loaded && "is-pairs", state.camera && "is-one"].filter(Boolean).join(" ");
  $("cameras").replaceChildren(...(has ? dataset.places.map(pair) : []));
  const cards = shown.error ? [] : [above(signal), boxTable(), channelCard(), valueCard("attributes", "Attributes", shown.attributes),
    valueCard("meta", "Metadata", Object.entries(shown.meta))];
  $("more").replaceChildren(...[...cards, placeCard()].filter(Boolean));
  hideClasses();
  if (state.loaded && has) showLoaded(signal);
}

function drawTools() {
  const boxes = shown.boxes ?? [];
  const labels = new Map();
  for (const { label, name } of boxes) labels.set(label, { name, number: (labels.get(label)?.number ?? 0) + 1 });
  $("has-boxes").checked = state.boxes === "1";
  $("classes").replaceChildren(...[...labels].sort((a, b) => a[0] - b[0]).map(([label, { name, number }]) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = dataset.colours[label];
    const onchange = () => { toggle("hide", String(label)); hideClasses(); };
    return make("label", { class: "chip" },
      make("input", { type: "checkbox", checked: !names("hide").has(String(label)), onchange }), swatch, `${name} ${number}`);
  }));
  const drawn = (shown.channels ?? []).filter((channel) => channel.camera >= 0 || channel.ground);
  $("drawn").replaceChildren(...drawn.map(({ name }) => make("label", { class: "chip" },
    make("input", { type: "checkbox", checked: names("draw").has(name), onchange: () => { toggle("draw", name); drawSample(); } }), name)));
  $("loaded").value = state.loaded;
  $("seed").value = state.seed;
  $("epoch").value = state.epoch;
}

function pair(number) {
  const camera = shown.cameras[number];
  const late = Math.abs(camera.late_ms) < 1e7 ? `${camera.late_ms >= 0 ? "+" : ""}${camera.late_ms.toFixed(1)} ms` : "";
  const lens = camera.lens && camera.lens !== "none" ? `, ${camera.lens} lens: boxes as of a pinhole` : "";
  const enlarge = make("button", {
    title: "Enlarge, or show all", "aria-pressed": String(state.camera === String(number)),
    onclick: () => { write({ camera: state.camera === String(number) ? "" : String(number) }); drawSample(); },
  }, camera.name);
  const caption = make("figcaption", {}, enlarge, make("span", {}, `${camera.size.join("×")}, ${late}${lens}`));
  const chosen = state.camera === String(number) ? "pair chosen" : "pair";
  const wrapper = make("div", { class: chosen, "data-camera": camera.name });
  if (!camera.is_there) {
    wrapper.append(make("figure", {}, caption, make("div", { class: "picture" }, make("div", { class: "none" }, "no image in this sample"))));
    return wrapper;
  }
  const image = make("img", {
    src: address("/image", { row: shown.row, sensor: number }), alt: `Camera ${camera.name}, boxes in view: ${camera.boxes.length}`,
    width: camera.size[0], height: camera.size[1], fetchpriority: "high",
  });
  image.style.height = "auto";
  const boxes = camera.boxes.map((each) => ({ ...each, label: shown.boxes[each.box].label, name: shown.boxes[each.box].name }));
  wrapper.append(make("figure", {}, caption,
    make("div", { class: "picture" }, image, ...rasters(number), overlay(camera.size, boxes, shapes(number)))));
  return wrapper;
}

const isChosen = ({ name }) => names("draw").has(name);

const drawnOn = (camera) => shown.channels.filter((channel) => channel.camera === camera && isChosen(channel));

const rasters = (camera) => drawnOn(camera).filter((channel) => channel.width).map(({ name, width }) => {
  const image = make("img", { class: "raster", src: address("/raster", { row: shown.row, name }), alt: `Channel ${name}` });
  image.style.width = `${100 * width}%`;
  return image;
});

const shapes = (camera) => drawnOn(camera).flatMap(({ boxes = [], points = [] }) => [
  ...boxes.map(([u, v, right, bottom], n) => draw("rect", { x: u, y: v, width: Math.max(right - u, 0), height: Math.max(bottom - v, 0), stroke: colour(n) })),
  ...points.map(([u, v], n) => draw("circle", { cx: u, cy: v, r: 3, fill: colour(n) })),
]);

/** Channels on the ground from above: ahead is up, y is to the left. */
const grounds = () => shown.channels.filter((channel) => channel.ground && isChosen(channel)).map(({ name, ground }) => {
  const half = ground.length / 2; // the first cells' borders along x, y (and z), then the last ones'
  const [left, right] = [-ground[1], -ground[half + 1]].sort((a, b) => a - b);
  const [top, bottom] = [-ground[0], -ground[half]].sort((a, b) => a - b);
  return draw("image", {
    href: address("/raster", { row: shown.row, name }), x: left, y: top, width: right - left, height: bottom - top, preserveAspectRatio: "none",
  }, draw("title", {}, name));
});

const colour = (number) => dataset.colours[number % Math.max(dataset.classes.length, 1)] ?? "#ffffff";

const MOST_HULLS = 100;
let numHulls = 0;

/** Boxes, the farthest first, and shapes in pixels whose centres are whole numbers, as the calibration has them. */
function overlay([width, height], boxes, others = []) {
  const clips = [];
  let drawn = [];
  for (const [place, { box, label, name, lines, hull }] of boxes.entries()) {
    if (hull && drawn.length && boxes.length - place <= MOST_HULLS) { // what is drawn so far is behind this box
      const id = `hull-${++numHulls}`;
      clips.push(draw("clipPath", { id }, draw("path", { "clip-rule": "evenodd", d: `M-1e6-1e6H1e6V1e6H-1e6ZM${hull.join("L")}Z` })));
      drawn = [draw("g", { "clip-path": `url(#${id})`, "data-hides": label }, ...drawn)];
    }
    drawn.push(draw("g", { "data-box": box, "data-label": label }, draw("title", {}, name),
      draw("path", { stroke: dataset.colours[label], d: lines.map(([a, b, c, d]) => `M${a} ${b}L${c} ${d}`).join("") })));
  }
  return draw("svg", { viewBox: `-0.5 -0.5 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("defs", {}, ...clips), ...drawn, ...others);
}

export function hideClasses() {
  const hidden = names("hide");
  for (const group of document.querySelectorAll("svg g[data-label]")) {
    group.classList.toggle("is-off", state.boxes !== "1" || hidden.has(group.dataset.label));
  }
  for (const group of document.querySelectorAll("svg g[data-hides]")) group.classList.toggle("is-seen", hidden.has(group.dataset.hides));
}

const mark = (box, is) => {
  for (const each of document.querySelectorAll(`[data-box="${box}"]`)) each.classList.toggle("is-marked", is);
};

async function showLoaded(signal) {
  const query = { row: shown.row, name: state.loaded, seed: state.seed, epoch: state.epoch };
  try {
    const cameras = await busy("The loader augments it …", ask("/api/loaded", query, signal));
    const places = [...$("cameras").children];
    for (const { name, size, boxes, turned, image } of cameras) {
      const drawn = boxes.map((each) => ({ ...each, name: dataset.classes[each.label] ?? "other" }));
      const caption = make("figcaption", {}, `as loaded${turned}`, make("span", {}, size.join("×")));
      const picture = make("div", { class: "picture" }, make("img", { src: `data:image/jpeg;base64,${image}`, alt: `Camera ${name} as loaded` }), overlay(size, drawn));
      places.find((place) => place.dataset.camera === name)?.append(make("figure", { class: "as-loaded" }, caption, picture));
    }
    hideClasses();
  } catch (error) {
    if (error.name !== "AbortError") $("trouble").textContent = error.message;
  }
}

function above(signal) {
  const range = Number(state.range);
  if (!shown.boxes && !shown.num_points.some(Boolean) && !shown.channels.some((channel) => channel.ground)) return null;
  const canvas = make("canvas", { width: 900, height: 900, "aria-hidden": "true" });
  const rings = [10, 20, 40, 80].filter((radius) => radius < range).flatMap((radius) => [
    draw("circle", { class: "ring", r: radius }),
    draw("text", { x: 0.5, y: -radius - range / 100, "font-size": range / 22 }, `${radius} m`),
  ]);
  const boxes = (shown.boxes ?? []).map(({ label, name, outline }, number) => {
    const corners = outline.map(([x, y]) => [-y, -x]);
    const middle = [0, 1].map((axis) => corners.reduce((sum, corner) => sum + corner[axis], 0) / 4);
    const front = [0, 1].map((axis) => (corners[0][axis] + corners[1][axis]) / 2);
    const tip = [0, 1].map((axis) => front[axis] + 0.5 * (front[axis] - middle[axis]));
    return draw("g", { "data-box": number, "data-label": label }, draw("title", {}, name),
      draw("polygon", { points: corners.join(" "), stroke: dataset.colours[label] }),
      draw("path", { d: `M${middle}L${tip}`, stroke: dataset.colours[label] }));
  });
  const lines = draw("svg", { viewBox: `${-range} ${-range} ${2 * range} ${2 * range}`, role: "img", "aria-label": "Boxes from above; ahead is up" },
    ...grounds(), ...rings, draw("polygon", { points: "0,-2.5 1,1 -1,1", stroke: "#ffffff" }), ...boxes);
  shown.num_points.forEach(async (number, sensor) => {
    if (!number) return;
    const read = (response) => (response.ok ? response.arrayBuffer() : null);
    const points = await fetch(address("/points", { row: shown.row, sensor }), { signal }).then(read).catch(() => null);
    if (points) drawPoints(canvas, new Float32Array(points), range);
  });
  const choice = make("select", { onchange: (event) => { write({ range: event.target.value }); drawSample(); } },
    ...["25", "50", "100"].map((metres) => make("option", { value: metres, selected: metres === state.range }, `${metres} m`)));
  const points = dataset.lidars.map((name, n) => `${name} ${count(shown.num_points[n], "point")}`).join(", ");
  return make("div", { class: "card" },
    make("div", { class: "head" }, make("h3", {}, "From above"), make("label", {}, "Reach ", choice)),
    make("div", { id: "above" }, canvas, lines), make("p", {}, points));
}

function drawPoints(canvas, points, range) {
  const context = canvas.getContext("2d");
  const side = canvas.width;
  const picture = context.getImageData(0, 0, side, side);
  for (let at = 0; at < points.length; at += 3) {
    const across = Math.round(side / 2 - (points[at + 1] / range) * (side / 2));
    const down = Math.round(side / 2 - (points[at] / range) * (side / 2));
    if (across < 0 || down < 0 || across >= side || down >= side) continue;
    const light = 95 + 160 * Math.min(Math.max((points[at + 2] + 1) / 4, 0), 1); // from the ground to three metres
    picture.data.set([light, light, light, 255], 4 * (down * side + across));
  }
  context.putImageData(picture, 0, 0);
}

const table = (heads, rows, kind = "") => make("table", {},
  make("thead", {}, make("tr", {}, ...heads.map((head, n) => make("th", { scope: "col", class: n && kind }, head)))), make("tbody", {}, ...rows));

const card = (id, title, ...children) => make("section", { class: "card", id, tabindex: "0", "aria-label": title }, make("h3", {}, title), ...children);

function boxTable() {
  if (!shown.boxes) return null;
  const rows = shown.boxes.map((each, number) => {
    const [x, y, z, l, w, h, yaw] = each.box;
    const cells = [[x, y, z].map((side) => side?.toFixed(1)).join(" "), [l, w, h].map((side) => side?.toFixed(1)).join(" "),
      yaw?.toFixed(2), each.speed?.toFixed(1) ?? "–", each.points < 0 ? "–" : each.points];
    return make("tr", { "data-box": number, onmouseenter: () => mark(number, true), onmouseleave: () => mark(number, false) },
      make("th", { scope: "row", title: `track ${each.track}` }, each.name), ...cells.map((cell) => make("td", { class: "number" }, String(cell))));
  });
  return card("boxes", `Boxes (${rows.length})`, table(["class", "x y z [m]", "l w h [m]", "yaw", "m/s", "points"], rows, "number"));
}

/** A table of values with a column for the dataset and each layer. */
function valueCard(id, title, entries) {
  if (id !== "attributes" && !entries.length) return null;
  const columns = ["", ...dataset.layers];
  const rows = new Map();
  for (const [name, value] of entries) {
    const layer = dataset.layers.find((each) => name.startsWith(`${each}.`)) ?? "";
    const own = layer ? name.slice(layer.length + 1) : name;
    if (!rows.has(own)) rows.set(own, new Map());
    rows.get(own).set(layer, words(value));
  }
  const used = columns.filter((layer) => [...rows.values()].some((row) => row.has(layer)));
  return card(id, title, table(["name", ...used.map((layer) => layer || "dataset")], [...rows].map(([name, row]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...used.map((layer) => make("td", {}, row.get(layer) ?? ""))))));
}

const channelCard = () => valueCard("channels", "Channels", shown.channels.map(({ name, text }) => [name, text]));

function placeCard() {
  const { place, layers = {} } = shown;
  const state = shown.error ? make("td", { class: "bad" }, "not read: see above") : make("td", { class: "good" }, `xxh3 ${place.xxh3}, as the index has it`);
  const facts = [["shard", place.shard], ["offset", place.offset.toLocaleString("en")], ["length", bytes(place.length)]];
  const rows = facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
  rows.push(make("tr", {}, make("th", { scope: "row" }, "checksum"), state));
  for (const [name, each] of Object.entries(layers)) {
    rows.push(make("tr", {}, make("th", { scope: "row" }, `layer ${name}`), make("td", {}, `${each.shard}, offset ${each.offset.toLocaleString("en")}, ${bytes(each.length)}`)));
  }
  const members = place.members.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name),
    ...cells.map((cell) => make("td", { class: "number" }, cell.toLocaleString("en")))));
  return card("place", "Bytes", make("table", {}, make("tbody", {}, ...rows)), table(["member", "offset in it", "stored", "decoded", "codec"], members, "number"));
}
