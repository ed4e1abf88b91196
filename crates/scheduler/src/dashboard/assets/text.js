// The texts of the pages, from one table per language.

import en from "./text-en.js";
import zh from "./text-zh.js";
import reasonsEn from "./reasons-en.js";
import reasonsZh from "./reasons-zh.js";

export const LANGUAGES = { en: "English", zh: "中文" };
const TABLES = { en: { ...en, ...reasonsEn }, zh: { ...zh, ...reasonsZh } };
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
export const REASONS = [
  // Parts of why a pod got its GPUs.
  [/^no container keeps a GPU$/, "placed.none"],
  [/^lowest idle indexes$/, "placed.lowest-idle"],
  [/^lowest indexes with enough left$/, "placed.lowest"],
  [/^lowest index with enough left$/, "placed.lowest-one"],
  [/^as far apart as the idle GPUs allow$/, "placed.apart"],
  [/^(\d+) points, the best group when all idle GPUs are divided into such groups$/, "placed.points"],
  [/^nearest group with enough idle GPUs: the whole node (.+)$/, "placed.nearest-node"],
  [/^nearest group with enough idle GPUs: (.+)$/, "placed.nearest"],
  [/^fullest branch with enough idle GPUs: the whole node (.+)$/, "placed.fullest-node"],
  [/^fullest branch with enough idle GPUs: (.+)$/, "placed.fullest"],
  [/^least lost for the pods expected, with (.+) of at most (.+)$/, "placed.least-lost-links"],
  [/^least lost for the pods expected$/, "placed.least-lost"],
  [/^(\S+) and (.+) stay free on it$/, "placed.stay-free"],
  [/^least memory left that suffices$/, "placed.least-memory"],
  [/^least memory left that suffices: (.+)$/, "placed.least-memory-of"],
  [/^least compute left that suffices: (\S+) and (.+)$/, "placed.least-compute"],
  [/^most left$/, "placed.most"],
  [/^most left: (\S+) and (.+)$/, "placed.most-of"],
  [/^best links among the GPUs with enough left$/, "placed.links"],
  [/^the GPU that later sets miss least$/, "placed.missed-least"],
  [/^(.+) as any (\d+) GPUs here$/, "placed.alike"],
  [/^(.+) of at most (\S+) for (\d+) GPUs$/, "placed.bandwidth"],
  [/^leaves no idle GPU$/, "placed.leaves-none"],
  [/^leaves GPU (\S+)$/, "placed.leaves-one"],
  [/^leaves (\S+) with (.+)$/, "placed.leaves"],
  [/^first idle set listed for this node$/, "placed.listed-here"],
  [/^first idle set listed for (.+)$/, "placed.listed"],
  [/^part of a larger idle set listed for this node$/, "placed.part-here"],
  [/^part of a larger idle set listed for (.+)$/, "placed.part"],
  [/^no listed set is idle: lowest idle indexes$/, "placed.unlisted"],
  [/^gang (.+) of (\d+) pods? is placed together on (\d+) nodes?$/, "placed.gang"],
  [/^they are the devices of claim (.+)$/, "placed.claim"],
  [/^kube-scheduler chose the node$/, "placed.kube-scheduler"],
  [/^it counts these resources itself$/, "placed.counted"],
  // Why nodes and GPUs are rejected.
  [/^not enough CPU$/, "reason.cpu"],
  [/^not enough memory$/, "reason.memory"],
  [/^no GPU$/, "reason.no-gpu"],
  [/^node serves whole GPUs only$/, "reason.whole-only"],
  [/^no GPU of an accepted model$/, "reason.model"],
  [/^fewer than (\d+) GPUs? that the annotations allow$/, "reason.allowed"],
  [/^no NUMA node with (\d+) GPUs? for the pod$/, "reason.numa"],
  [/^(?:no GPU|fewer than \d+ GPUs) with a free slot of nvidia\.com\/gpu$/, "reason.no-slot"],
  [/^fewer than (\d+) GPUs? with (\S+) and (.+) left$/, "reason.fewer-share"],
  [/^fewer than (\d+) GPUs? with (.+) left$/, "reason.fewer-memory-left"],
  [/^fewer than (\d+) GPUs? with (.+)$/, "reason.fewer-memory"],
  [/^no free set of (\d+) GPUs? in the static table$/, "reason.static"],
  [/^fewer than (\d+) GPUs?$/, "reason.fewer-gpus"],
  [/^fewer than (\d+) idle GPUs?$/, "reason.fewer-idle"],
  [/^no GPU has (.+)$/, "reason.too-large"],
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
  [/^ExceedsGPUQuota: ([\s\S]+)$/, "reason.quota-unreadable"],
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
  [/^port (\S+) of the host is in use$/, "reason.host-port"],
  [/^a pod there is excluded by the pod's anti-affinity \((.+)\)$/, "reason.excluded-pod"],
  [/^a pod there excludes the pod by its anti-affinity \((.+)\)$/, "reason.excluding-pod"],
  [/^cordoned$/, "reason.gpu-cordoned"],
  [/^excluded by an annotation$/, "reason.excluded"],
  [/^in use, and an annotation demands an idle GPU$/, "reason.in-use"],
  [/^unhealthy$/, "reason.unhealthy"],
  [/^in MIG mode$/, "reason.mig"],
  [/^awaiting a reset for retired memory$/, "reason.reset"],
  [/^another model$/, "reason.another-model"],
  [/^no slot of nvidia\.com\/gpu left, of (\d+)$/, "reason.slot-left"],
  [/^held whole$/, "reason.held-whole"],
  [/^shared: (\S+) and (.+) are held$/, "reason.shared"],
  [/^(\S+) of (\S+) compute left$/, "reason.compute-left"],
  [/^(.+) of (.+) left$/, "reason.memory-left"],
  // Constraints that only kube-scheduler checks.
  [/^required pod affinity$/, "unchecked.affinity"],
  [/^required pod anti-affinity$/, "unchecked.anti-affinity"],
  [/^required pod anti-affinity to pods without GPUs$/, "unchecked.anti-affinity-plain"],
  [/^topology spread constraints$/, "unchecked.spread"],
  [/^the nodes of its volumes$/, "unchecked.volumes"],
  [/^ports of the host that pods without GPUs use$/, "unchecked.ports"],
  [/^the devices of its claims$/, "unchecked.claims"],
  [/^other resources that pods hold$/, "unchecked.resources"],
  // Parts of what is said of gangs, reservations and guarantees.
  [/^gang (.+): (\d+) of (\d+) pods exist, (\d+) have nodes$/, "gang.progress"],
  [/^gang (.+) waits for its (\w+), which does not exist$/, "gang.no-group"],
  [/^its place is reserved on node (\S+)$/, "gang.reserved"],
  [/^all of them have nodes$/, "gang.settled"],
  [/^it waits until all of them exist$/, "gang.incomplete"],
  [/^no nodes have GPUs for all of them at the same time$/, "gang.no-room"],
  [/^GPUs for all of them are free and kept for the gang$/, "gang.kept"],
  [/^it waits for the end of (\d+) pods?, evicted to make room for it$/, "gang.evicting"],
  [/^GPUs of node (\S+) are reserved for this pod until (\S+) \((.+), made by (.+)\)$/, "reserved.pod"],
  [/^all of them are free$/, "reserved.free"],
  [/^not all of them are free yet$/, "reserved.held"],
  [/^namespace (\S+) gets back GPUs that it is guaranteed: (\d+) pods? still to end$/, "guarantee.returns"],
  [/^namespace (\S+) holds ([^;]+)$/, "guarantee.holds"],
  [/^it borrows, so the pod waits for free GPUs$/, "guarantee.borrows"],
  [/^pods of namespaces that borrow are evicted for it within the guarantee$/, "guarantee.evicts"],
  [/^evictions are off$/, "guarantee.off"],
  [/^its GPUs on node (\S+) became free by evictions of pods of lower priority$/, "reserved.priority"],
  [/^its GPUs on node (\S+) became free by evictions, within the guarantee of its namespace$/, "reserved.evicted"],
];

function translated(text) {
  for (const [pattern, key] of REASONS) {
    const found = pattern.exec(text);
    if (found) return t(key, found);
  }
  return undefined;
}

/** Translates a text of the scheduler, or each of its parts between semicolons. What no pattern matches stays as it is. */
export function reason(text) {
  return translated(text) ?? text.split("; ").map((part) => translated(part) ?? part).join(t("semicolon"));
}

/** Translates why a pod got its GPUs. With several containers, each has a part after its name. */
export function placementReason(text) {
  const parts = text.split(" / ");
  if (parts.length === 1) return reason(text);
  return parts.map((part) => part.replace(/^(\S+: )(.+)$/, (_, name, why) => name + reason(why))).join(" / ");
}
