// Elements and requests. Text of a dataset is set as text alone: no markup is ever made of it.

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const address = (path, query) => `${path}?${new URLSearchParams(query)}`;

/** Fetch JSON; raises an Error with the server's sentence. */
export async function ask(path, query = {}, signal) {
  const response = await fetch(address(path, query), { signal });
  const answer = await response.json().catch(() => ({ error: "the server's answer cannot be read" }));
  if (!response.ok) throw new Error(answer.error ?? response.statusText);
  return answer;
}

const waiting = new Set();

function showWaiting() {
  const last = [...waiting].at(-1);
  $("busy").hidden = !last;
  $("busy-text").textContent = last?.text ?? "";
  $("busy-share").hidden = !last?.all;
  $("busy-share").value = last?.all ? last.come / last.all : 0;
  $("busy-bytes").textContent = last?.all ? `${bytes(last.come)} of ${bytes(last.all)}` : "";
}

/** Say what is waited for, once it takes longer than a moment, until the promise ends; `progress` asks how many bytes have come. */
export async function busy(text, promise, progress) {
  const entry = { text, come: 0, all: 0 };
  let timer = null;
  const look = async () => {
    waiting.add(entry);
    showWaiting();
    if (!progress) return;
    Object.assign(entry, await progress().catch(() => null));
    if (!waiting.has(entry)) return;
    showWaiting();
    timer = setTimeout(look, 100);
  };
  timer = setTimeout(look, 200);
  try {
    return await promise;
  } finally {
    clearTimeout(timer);
    waiting.delete(entry);
    showWaiting();
  }
}

export const count = (number, noun) =>
  `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** A value as text: numbers in six digits, records as JSON. */
export function words(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function bytes(number) {
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (number < 1000 || unit === "GB") return `${unit === "bytes" ? number : number.toFixed(1)} ${unit}`;
    number /= 1000;
  }
}
