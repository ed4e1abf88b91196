// The tile of a GPU, filled by its pods, and the card of a node with its tiles.

import { h } from "./dom.js";
import { colour, count, link, memory, model, percent, points } from "./format.js";
import { reason, t } from "./text.js";

const width = (part, whole) => `${whole > 0 ? Math.min(100, (100 * part) / whole) : 0}%`;

/** Creates a bar of coloured parts, given as [[class, part], ...] of a whole. */
export function bar(parts, whole, attributes = {}) {
  return h("span", { ...attributes, class: `bar ${attributes.class ?? ""}` },
    parts.map(([name, part]) => h("span", { class: `part ${name}`, style: { "--part": width(part, whole) } })));
}

/** Returns the name of a holder of a GPU. Claims, reserved places and bookings in doubt have no namespace of their own:
 *  the end of the name says what they are. */
export function holderName({ namespace, pod }) {
  if (namespace) return `${namespace}/${pod}`;
  const end = pod.lastIndexOf("/");
  const [name, kind] = [pod.slice(0, end), pod.slice(end + 1)];
  if (kind === "claim") return t("holder.claim", { name });
  return kind === "reserved" ? t("holder.reserved", { name }) : t("holder.in-doubt", { name });
}

/** Returns the colour of a holder: that of its namespace. */
export const holderColour = ({ namespace, pod }) => colour(namespace || pod.split("/")[0]);

/** Creates both bars of a GPU: memory above, compute below. */
export function fills(gpu) {
  return [
    bar(gpu.pods.map((pod) => [holderColour(pod), pod.memoryMiB]), gpu.memoryMiB),
    bar(gpu.pods.map((pod) => [holderColour(pod), pod.compute]), 100),
  ];
}

/** Creates the marks of a node that gets no new pods. */
export function nodeMarks(node) {
  return [
    node.ready === false && h("span", { class: "chip bad" }, t("node.not-ready")),
    node.cordoned && h("span", { class: "chip warn" }, t("node.cordoned")),
  ];
}

/** Lists the problems of a GPU as texts. */
export function troubles(gpu) {
  return [!gpu.healthy && reason(gpu.problem), gpu.overbooked && t("tile.overbooked")].filter(Boolean);
}

function label(gpu) {
  const amounts = t("tile.label", {
    n: gpu.index,
    compute: points(gpu.computeHeld),
    memory: t("of", { part: memory(gpu.memoryHeldMiB), whole: memory(gpu.memoryMiB) }),
  });
  const pods = gpu.pods.map(holderName).join(", ");
  return [amounts, pods ? t("tile.pods", { pods }) : t("tile.idle"), ...troubles(gpu)].join("; ");
}

/** Creates the small tile of a GPU. */
export function tile(node, gpu) {
  const state = gpu.faulty ? "unhealthy" : !gpu.healthy ? "withheld" : gpu.overbooked ? "overbooked" : gpu.pods.length ? "held" : "idle";
  return h("a", { class: `tile ${state}`, href: link("node", node, { gpu: gpu.index }), "aria-label": label(gpu), title: label(gpu) },
    h("span", { class: "tile-head" },
      h("span", { class: "tile-index" }, gpu.index),
      h("span", { class: "tile-mark" }, gpu.faulty ? "✕" : !gpu.healthy ? "–" : gpu.overbooked ? "!" : gpu.pods.length ? count(gpu.pods.length) : "")),
    fills(gpu));
}

/** Creates the card of a node with its GPUs. */
export function nodeCard(node) {
  const models = [...new Set(node.gpus.map((gpu) => model(gpu.model)))].join(", ");
  const columns = Math.max(4, Math.ceil(node.gpus.length / 2));
  return h("article", { class: "card node", "data-key": node.name },
    h("h3", {},
      h("span", {}, h("a", { href: link("node", node.name) }, node.name), " ", nodeMarks(node)),
      h("span", { class: "figure" }, percent(node.gpuTotals.taken, node.gpuTotals.total))),
    h("p", { class: "muted" }, [models, node.instanceType].filter(Boolean).join(" · ")),
    node.problem ? h("p", { class: "bad" }, t("node.problem"), ": ", node.problem)
      : h("div", { class: "tiles", style: { "--columns": String(columns) } }, node.gpus.map((gpu) => tile(node.name, gpu))));
}
