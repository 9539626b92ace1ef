// The list of samples, the time line, keys, and the state of the page.

import { $, address, ask, busy, count, make, words } from "./dom.js";
import { drawSample, hideClasses, show, start } from "./sample.js";
import { read, state, write } from "./state.js";

const PAGE = 60;
let dataset = null;
let tiles = []; // of the list
let total = 0;
let clip = { rows: [], seconds: [] };
let listed = 0;

async function openSample(row) {
  write({ row: String(row) });
  markTiles();
  if (clip.rows.includes(row)) drawLine();
  await show(row);
  if (!clip.rows.includes(row)) {
    const found = await ask("/api/clip", { row }).catch(() => ({ rows: [row], seconds: [0] }));
    if (state.row !== String(row)) return;
    clip = found;
    drawLine();
  }
  const next = clip.rows[place() + 1];
  if (next !== undefined && state.row === String(row)) setTimeout(() => {
    if (state.row === String(row)) ask("/api/sample", { row: next }).catch(() => null); // the server keeps it
  }, 300);
}

const place = () => clip.rows.indexOf(Number(state.row));

function drawLine() {
  const at = place();
  const last = Math.max(clip.rows.length - 1, 0);
  $("frames").max = last;
  $("frames").value = at;
  const text = `frame ${at + 1} of ${clip.rows.length}${clip.is_cut ? " near it" : ""}, ${(clip.seconds[at] ?? 0).toFixed(2)} s into the clip`;
  $("frames").setAttribute("aria-valuetext", text);
  $("when").textContent = `${text} · row ${Number(state.row).toLocaleString("en")}`;
  $("earlier").disabled = at <= 0;
  $("later").disabled = at >= last;
}

function moveFrame(by) {
  const row = clip.rows[place() + by];
  if (row !== undefined) openSample(row);
}

async function moveInList(by) {
  const rows = tiles.map((tile) => tile.row);
  const next = rows[rows.indexOf(Number(state.row)) + by];
  if (next >= 0) openSample(next);
}

function markTiles() {
  for (const button of document.querySelectorAll(".tile")) {
    button.setAttribute("aria-current", String(button.dataset.row === state.row));
  }
}

async function askList() {
  const { list, filter, split, first, columns, step } = state;
  if (list === "order") {
    const name = state.order || dataset.orders[0];
    const query = { name, split: split || Object.keys(dataset.splits)[0], epoch: state.order_epoch, step, batch: state.batch };
    return ask("/api/order", query);
  }
  if (list === "run") return ask("/api/run", { step });
  const query = { filter, split, first, count: PAGE };
  if (list === "samples") query.columns = columns.split(",").map((name) => name.trim()).filter(Boolean).join("\n");
  return ask(list === "clips" ? "/api/clips" : "/api/rows", query);
}

async function loadList() {
  const turn = ++listed;
  if (state.alone) return; // the list is not seen
  try {
    const answer = await busy("Loading the list …", askList());
    if (turn !== listed) return;
    tiles = answer.rows;
    total = answer.total ?? answer.num_steps;
    $("fault").textContent = "";
    drawList(answer);
  } catch (error) {
    if (turn === listed) $("fault").textContent = error.message;
  }
}

function drawList({ text }) {
  const isSteps = state.list === "order" || state.list === "run";
  const first = Number(state.first);
  const step = Number(state.step);
  const noun = state.list === "clips" ? "clip" : "sample";
  const range = total ? `${(first + 1).toLocaleString("en")} to ${Math.min(first + PAGE, total).toLocaleString("en")} of ${count(total, noun)}` : `no ${noun} matches`;
  $("count").textContent = isSteps ? text : range;
  $("back").disabled = isSteps ? step <= 0 : first <= 0;
  $("forward").disabled = isSteps ? step + 1 >= total : first + PAGE >= total;
  const children = [];
  let clipBefore = null;
  for (const tile of tiles) {
    if (state.list === "samples" && tile.clip !== clipBefore) children.push(make("li", { class: "clip" }, tile.clip));
    clipBefore = tile.clip;
    children.push(make("li", {}, tileOf(tile)));
  }
  $("tiles").replaceChildren(...children);
  markTiles();
}

function tileOf(tile) {
  const isClip = state.list === "clips";
  const image = make("img", {
    src: address("/thumbnail", { row: tile.row, sensor: thumbnailCamera() }), alt: "", loading: "lazy", fetchpriority: "low",
    onerror: (event) => event.target.replaceWith(make("div", { class: "none" }, "no image")),
  });
  const lines = isClip ? [tile.clip, count(tile.num_frames, "frame")] : [tile.key];
  for (const [name, value] of Object.entries(tile.values)) lines.push(`${name}: ${words(value)}`);
  const isHere = tile.row >= 0;
  if (!isHere) lines.push("not in this dataset");
  return make("button", { class: "tile", "data-row": tile.row, disabled: !isHere, onclick: () => openSample(tile.row) },
    isHere && dataset.cameras.length ? image : make("div", { class: "none" }, "no image"),
    ...lines.map((line, n) => make("span", { class: n ? "quiet" : "" }, line)));
}

function thumbnailCamera() {
  const front = dataset.cameras.findIndex((name) => /front(?!.*(left|right))/.test(name));
  return Math.max(front, 0);
}

function turnPage(by) {
  if (state.list === "order" || state.list === "run") write({ step: String(Math.max(Number(state.step) + by, 0)) });
  else write({ first: String(Math.max(Number(state.first) + by * PAGE, 0)) });
  drawForms();
  loadList();
}

function drawForms() {
  const kinds = { samples: "Samples", clips: "Clips" };
  if (dataset.orders.length) kinds.order = "Order";
  if (dataset.num_steps_of_run !== null) kinds.run = "Run";
  $("kinds").replaceChildren(...Object.entries(kinds).map(([kind, text]) => make("button", {
    "aria-pressed": String(state.list === kind),
    onclick: () => { write({ list: kind, first: "0", step: "0" }); drawForms(); loadList(); },
  }, text)));
  const isOrder = state.list === "order";
  $("step").hidden = !isOrder && state.list !== "run";
  for (const label of document.querySelectorAll(".of-order, #order-label")) label.hidden = !isOrder;
  for (const [id, name] of Object.entries({ ...INPUTS, ...STEP_INPUTS })) $(id).value = state[name];
  if (isOrder && !state.order) $("order").value = dataset.orders[0];
  document.querySelector("main").classList.toggle("alone", state.alone === "1");
}

const INPUTS = { filter: "filter", split: "split", columns: "columns" };
const STEP_INPUTS = { order: "order", "order-epoch": "order_epoch", "order-step": "step", "order-batch": "batch" };

const values = (inputs) => Object.fromEntries(Object.entries(inputs).map(([id, name]) => [name, $(id).value]));

function listen() {
  const search = (event) => { event.preventDefault(); write({ ...values(INPUTS), first: "0" }); loadList(); };
  $("search").addEventListener("submit", search);
  $("split").addEventListener("change", search);
  $("step").addEventListener("submit", (event) => event.preventDefault());
  $("step").addEventListener("change", () => { write(values(STEP_INPUTS)); loadList(); });
  $("back").addEventListener("click", () => turnPage(-1));
  $("forward").addEventListener("click", () => turnPage(1));
  $("earlier").addEventListener("click", () => moveFrame(-1));
  $("later").addEventListener("click", () => moveFrame(1));
  $("frames").addEventListener("input", () => openSample(clip.rows[Number($("frames").value)]));
  $("has-boxes").addEventListener("change", () => { write({ boxes: $("has-boxes").checked ? "1" : "0" }); hideClasses(); });
  for (const id of ["loaded", "seed", "epoch"]) $(id).addEventListener("change", () => { write({ [id]: $(id).value }); drawSample(); });
  $("link").addEventListener("click", async () => {
    await navigator.clipboard?.writeText(location.href).catch(() => null);
    $("link").textContent = "Link copied";
    setTimeout(() => { $("link").textContent = "Copy link"; }, 1500);
  });
  $("skip").addEventListener("click", () => $("key").focus());
  $("help-button").addEventListener("click", () => $("help").showModal());
  addEventListener("hashchange", () => { read(); drawForms(); loadList(); openSample(Number(state.row) || 0); });
  addEventListener("keydown", pressKey);
}

const KEYS = {
  ArrowLeft: () => moveFrame(-1),
  ArrowRight: () => moveFrame(1),
  "[": () => moveInList(-1),
  "]": () => moveInList(1),
  b: () => $("has-boxes").click(),
  a: () => { write({ loaded: state.loaded ? "" : dataset.images[0] ?? "" }); drawSample(); },
  l: () => { write({ alone: state.alone ? "" : "1" }); drawForms(); loadList(); },
  "/": () => $("filter").focus(),
  "?": () => $("help").showModal(),
  Escape: () => { write({ camera: "" }); drawSample(); },
};

function pressKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || $("help").open) return;
  if (event.target.matches("input:not([type=checkbox]), select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const action = dataset.places[event.key - 1] !== undefined ? () => { write({ camera: String(dataset.places[event.key - 1]) }); drawSample(); } : KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

async function open() {
  read();
  dataset = await busy("Opening the dataset …", ask("/api/dataset"));
  document.title = `${dataset.name} – Fuelrail`;
  $("name").textContent = dataset.name;
  $("facts").textContent = `${count(dataset.num_samples, "sample")} of ${count(dataset.num_clips, "clip")} at ${dataset.location}`;
  const splits = Object.entries(dataset.splits).map(([name, number]) => make("option", { value: name }, `${name} (${number.toLocaleString("en")})`));
  $("split").replaceChildren(make("option", { value: "" }, "all"), ...splits);
  $("names").replaceChildren(...dataset.attributes.map((name) => make("option", { value: name })));
  $("order").replaceChildren(...dataset.orders.map((name) => make("option", { value: name }, name)));
  $("loaded").replaceChildren(make("option", { value: "" }, "off"), ...dataset.images.map((name) => make("option", { value: name }, name)));
  start(dataset);
  drawForms();
  listen();
  if (!dataset.num_samples) { $("trouble").textContent = "The dataset has no samples."; return; }
  const first = openSample(Math.min(Number(state.row) || 0, dataset.num_samples - 1));
  await Promise.race([first, new Promise((done) => setTimeout(done, 250))]); // the sample comes first
  loadList();
}

open().catch((error) => { $("trouble").textContent = error.message; });
