// Formats numbers, amounts and times in the user's language.

import { language, recall, store, t } from "./text.js";

const number = (value, options) => new Intl.NumberFormat(language(), options).format(value);

export const count = (value) => number(value);
export const decimal = (value, digits = 1) => number(value, { maximumFractionDigits: digits });
export const percent = (part, whole) => number(whole > 0 ? part / whole : 0, { style: "percent", maximumFractionDigits: 1 });
export const points = (value) => number(value / 100, { style: "percent", maximumFractionDigits: 1 });

/** Marks a formatted sum as a lower bound if a part of it is unknown. */
export const bound = (text, isPartial) => (isPartial ? `≥ ${text}` : text);

/** Formats MiB, using GiB or TiB for large amounts. */
export function memory(mib) {
  if (mib >= 1024 * 1024) return `${number(mib / 1048576, { maximumFractionDigits: 1 })} TiB`;
  if (mib >= 1024) return `${number(mib / 1024, { maximumFractionDigits: 1 })} GiB`;
  return `${number(mib)} MiB`;
}

export const time = (millis) => new Intl.DateTimeFormat(language(), { timeStyle: "medium" }).format(millis);

/** Formats a time of the API server, with the date if it is not today. */
export function moment(text) {
  const then = new Date(text);
  const today = then.toDateString() === new Date().toDateString();
  return new Intl.DateTimeFormat(language(), today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" }).format(then);
}

/** Formats the time since `text` with its largest unit, such as 3 h. */
export function age(text) {
  const seconds = Math.max(0, (Date.now() - new Date(text)) / 1000);
  const [unit, size] = [["day", 86400], ["hour", 3600], ["minute", 60]].find(([, size]) => seconds >= size) ?? ["second", 1];
  return number(Math.floor(seconds / size), { style: "unit", unit, unitDisplay: "short" });
}

/** Describes the GPU request of a container. */
export function ask({ gpus, compute, memoryMiB, memoryPercent }) {
  const isWhole = memoryMiB === undefined && memoryPercent === undefined;
  if (isWhole) return t("ask.gpus", { n: count(gpus) });
  const parts = gpus === undefined ? [] : [t("ask.each", { n: count(gpus) })];
  if (compute !== undefined) parts.push(points(compute));
  if (memoryMiB !== undefined) parts.push(memory(memoryMiB));
  if (memoryPercent !== undefined) parts.push(t("ask.memory", { part: points(memoryPercent) }));
  return parts.join(" · ");
}

const COLOURS = 12;
const STORED = "tessera.colours";
const known = new Map(stored());

function stored() {
  try {
    return Object.entries(JSON.parse(recall(STORED) ?? "{}"));
  } catch {
    return [];
  }
}

/** Returns the colour class of a namespace. The colour is stable in this browser and unique
 *  while unused colours are left. */
export function colour(namespace) {
  const before = known.get(namespace);
  if (before !== undefined) return `n${before}`;
  let sum = 2166136261;
  for (const letter of namespace) sum = Math.imul(sum ^ letter.codePointAt(0), 16777619) >>> 0;
  let place = sum % COLOURS;
  const taken = new Set(known.values());
  while (taken.size < COLOURS && taken.has(place)) place = (place + 1) % COLOURS;
  known.set(namespace, place);
  if (known.size <= 200) store(STORED, JSON.stringify(Object.fromEntries(known)));
  return `n${place}`;
}

/** Removes the vendor prefix from a model name. */
export const model = (name) => name.replace(/^NVIDIA[ -]/, "");

/** Returns the address of a page. Each part may contain any character. */
export function link(...parts) {
  const last = parts.at(-1);
  const parameters = typeof last === "object" ? parts.pop() : {};
  const kept = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}
