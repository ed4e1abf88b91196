// The texts of the pages, from one table per language.

import en from "./text-en.js";
import zh from "./text-zh.js";

export const LANGUAGES = { en: "English", zh: "中文" };
const TABLES = { en, zh };
const STORED = "tessera.language";

let current = chosen();

function chosen() {
  const stored = recall(STORED);
  if (stored in TABLES) return stored;
  return navigator.languages.map((tag) => tag.slice(0, 2)).find((tag) => tag in TABLES) ?? "en";
}

/** Reads a stored setting. Returns `null` if the browser forbids storage. */
export function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

export function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Without storage the choice is lost when the page is closed.
  }
}

export const language = () => current;

export function setLanguage(tag) {
  current = tag;
  store(STORED, tag);
}

/** Returns the text of a key, with its {placeholders} filled in. A placeholder such as
 *  {n|node|nodes} becomes the second word if the value is 1, and the third word otherwise. */
export function t(key, values = {}) {
  const text = TABLES[current][key] ?? key;
  return text.replace(/\{(\w+)(?:\|([^|}]*)\|([^}]*))?\}/g, (gap, name, one, several) => {
    if (!(name in values)) return gap;
    const value = String(values[name]);
    return one === undefined ? value : value === "1" ? one : several;
  });
}

// Patterns for the scheduler's reasons, which are in English as in events.
const REASONS = [
  [/^not enough CPU$/, "reason.cpu"],
  [/^not enough memory$/, "reason.memory"],
  [/^no GPU$/, "reason.no-gpu"],
  [/^node serves whole GPUs only$/, "reason.whole-only"],
  [/^no GPU of an accepted model$/, "reason.model"],
  [/^fewer than (\d+) GPUs? that the annotations allow$/, "reason.allowed"],
  [/^no NUMA node with (\d+) GPUs? for the pod$/, "reason.numa"],
  [/^fewer than (\d+) GPUs? with (\S+) and (.+) left$/, "reason.fewer-share"],
  [/^fewer than (\d+) GPUs? with (.+) left$/, "reason.fewer-memory-left"],
  [/^fewer than (\d+) GPUs? with (.+)$/, "reason.fewer-memory"],
  [/^no free set of (\d+) GPUs? in the static table$/, "reason.static"],
  [/^fewer than (\d+) GPUs?$/, "reason.fewer-gpus"],
  [/^fewer than (\d+) idle GPUs?$/, "reason.fewer-idle"],
  [/^no GPU has (.+)$/, "reason.too-large"],
  [/^(?:no GPU|fewer than \d+ GPUs) with a free slot of nvidia\.com\/gpu$/, "reason.no-slot"],
  [/^no GPU with (\S+) and (.+) left$/, "reason.no-share"],
  [/^no GPU with (.+) left$/, "reason.no-gpu-memory"],
  [/^a required GPU is not free$/, "reason.required"],
  [/^node is not known yet$/, "reason.unknown-node"],
  [/^node does not offer this kind of GPU resource$/, "reason.not-served"],
  [/^node offers none of this GPU resource at the moment$/, "reason.withdrawn"],
  [/^the agent of the node is being replaced, or was stopped$/, "reason.no-agent"],
  [/^node cannot be read: (.+)$/, "reason.bad-node"],
  [/^ExceedsGPUQuota: not a pool of this namespace$/, "reason.quota-pool"],
  [/^ExceedsGPUQuota: not a model of this namespace$/, "reason.quota-model"],
  [/^ExceedsGPUQuota: GPUs of this model$/, "reason.quota-gpus"],
  [/^ExceedsGPUQuota: GPU memory$/, "reason.quota-memory"],
  [/^ExceedsGPUQuota: GPU compute$/, "reason.quota-compute"],
  [/^the node does not say where its agent answers$/, "reason.agent-unknown"],
  [/^the agent at (\S+) did not answer in time$/, "reason.agent-late"],
  [/^the agent at (\S+) cannot be reached: (.+)$/, "reason.agent-unreachable"],
  [/^the agent at (\S+) answered (\d+)$/, "reason.agent-status"],
  [/^node is cordoned \(unschedulable\)$/, "reason.cordoned"],
  [/^node has the taint (.+), which the pod does not tolerate$/, "reason.taint"],
  [/^node lacks the label (.+) of the pod's nodeSelector$/, "reason.selector"],
  [/^node does not match the pod's node affinity$/, "reason.affinity"],
  [/^node has its largest number of pods, (\d+)$/, "reason.max-pods"],
  [/^node offers ([\d.]+(?: \w+)?) of (.+), and the pod requests ([\d.]+(?: \w+)?)$/, "reason.resource"],
  [/^node has (\d+) of (\d+) (\S+) left, and the pod requests (\d+)$/, "reason.instances"],
  [/^cordoned$/, "reason.gpu-cordoned"],
  [/^excluded by an annotation$/, "reason.excluded"],
  [/^in use, and an annotation demands an idle GPU$/, "reason.in-use"],
  [/^unhealthy$/, "reason.unhealthy"],
  [/^in MIG mode$/, "reason.mig"],
  [/^awaiting a reset for retired memory$/, "reason.reset"],
  [/^another model$/, "reason.another-model"],
  [/^held whole$/, "reason.held-whole"],
  [/^shared: (\S+) and (.+) are held$/, "reason.shared"],
  [/^(\S+) of (\S+) compute left$/, "reason.compute-left"],
  [/^(.+) of (.+) left$/, "reason.memory-left"],
];

/** Translates a reason of the scheduler. Returns the reason unchanged if no pattern matches. */
export function reason(text) {
  for (const [pattern, key] of REASONS) {
    const found = pattern.exec(text);
    if (found) return t(key, found);
  }
  return text;
}
