// The page of one node: its GPUs with their pods, the current usage, and the links.

import { get, path } from "./api.js";
import { h } from "./dom.js";
import { decimal, link, memory, model, moment, percent, points } from "./format.js";
import { linkGraph, linkMatrix } from "./links.js";
import { fills, holderColour, holderName, nodeMarks, troubles } from "./tile.js";
import { reason, t } from "./text.js";

const EVERY = 3000;

/** The number of MIG instances that pods hold. */
const held = (instances) => instances.pods.reduce((sum, pod) => sum + pod.count, 0);

function facts(node) {
  const { host } = node;
  const all = [
    [t("model"), [...new Set(node.gpus.map((gpu) => model(gpu.model)))].join(", ")],
    [t("node.type"), node.instanceType],
    [t("node.dialects"), node.dialects.join(", ")],
    [t("node.cpu"), host && t("of", { part: decimal(host.cpuLeftMilli / 1000), whole: decimal(host.cpuMilli / 1000) })],
    [t("node.memory"), host && t("of", { part: memory(host.memoryLeftMiB), whole: memory(host.memoryMiB) })],
    [t("node.unit"), node.memoryUnit],
    [t("node.pool"), node.pool],
    [t("node.instances"), node.instances && Object.entries(node.instances).map(([resource, one]) => h("div", {}, `${t("of", { part: held(one), whole: one.offered })} ${resource} `,
      one.pods.map((pod) => [h("a", { href: link("pod", pod.namespace, pod.name) }, `${pod.namespace}/${pod.name}`), " "])))],
    [t("node.reserved"), node.reservations?.map((one) => h("div", {}, `${one.name}: ${t("gpus.count", { n: one.gpus.length })} · ${one.owner} · ${moment(one.until)}`))],
  ];
  return h("dl", { class: "facts" }, all.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Shows the measured usage of a GPU. A value that was not measured is shown as such, not as
 *  zero. */
function measured(gpu) {
  const parts = [gpu?.memoryUsedMiB !== undefined && memory(gpu.memoryUsedMiB), gpu?.busyPercent !== undefined && t("used.busy", { n: points(gpu.busyPercent) })];
  const known = parts.filter(Boolean);
  return h("p", { class: "muted" }, t("used"), ": ", known.length ? h("span", { class: "figure" }, known.join(" · ")) : t("used.none"));
}

/** Whether a GPU is idle, shared, held as a whole, or only kept for later pods. */
function stateOf(gpu) {
  if (gpu.pods.length > 0 && gpu.pods.every((pod) => !pod.namespace && pod.pod.endsWith("/reserved"))) return t("node.reserved");
  return gpu.whole ? t("whole") : gpu.pods.length ? t("shared") : t("idle");
}

function gpuCard(gpu, identity, used, chosen) {
  const bad = troubles(gpu);
  return h("section", { class: `card gpu ${chosen ? "chosen" : ""}`, id: `gpu-${gpu.index}`, "data-key": identity.uuid, "aria-label": t("gpu.n", { n: gpu.index }) },
    h("h3", {}, t("gpu.n", { n: gpu.index }), bad.length ? h("span", { class: `chip ${gpu.faulty || gpu.overbooked ? "bad" : "warn"}` }, bad.join(", ")) : h("span", { class: "chip" }, stateOf(gpu))),
    h("p", { class: "meter" }, h("span", {}, t("memory")), h("span", { class: "figure" }, t("of", { part: memory(gpu.memoryHeldMiB), whole: memory(gpu.memoryMiB) }))),
    fills(gpu)[0],
    h("p", { class: "meter" }, h("span", {}, t("compute")), h("span", { class: "figure" }, points(gpu.computeHeld))),
    fills(gpu)[1],
    gpu.pods.length === 0 ? h("p", { class: "muted" }, t("node.free")) : h("ul", { class: "plain holders" }, gpu.pods.map((pod) => h("li", { "data-key": `${pod.namespace}/${pod.pod}` },
      h("span", { class: "name" }, h("span", { class: `dot ${holderColour(pod)}` }), pod.namespace ? h("a", { href: link("pod", pod.namespace, pod.pod) }, holderName(pod)) : h("span", {}, holderName(pod))),
      h("span", { class: "figure muted" }, `${pod.compute ? points(pod.compute) : t("pod.guaranteed")} · ${memory(pod.memoryMiB)}`)))),
    measured(used),
    h("p", { class: "muted small" }, identity.uuid));
}

function links(node) {
  if (node.gpus.length < 2) return null;
  if (node.links.length === 0) return h("section", { class: "card" }, h("h2", {}, t("node.links")), h("p", { class: "muted" }, t("node.nolinks")));
  return h("div", { class: "two" },
    h("section", { class: "card" }, h("h2", {}, t("node.links")),
      node.nvswitchLinks !== undefined && h("p", { class: "muted" }, t("node.switch.note", { n: node.nvswitchLinks })),
      linkGraph(node)),
    h("section", { class: "card" }, h("h2", {}, t("node.matrix")), h("p", { class: "muted" }, t("node.matrix.note")), linkMatrix(node)));
}

export default function node({ parts: [name = ""], parameters, signal, redraw }) {
  let used;
  let asked = 0;
  return {
    async load() {
      const here = path("nodes", name);
      // The agent may be slow or unreachable, so the page does not wait for it.
      if (Date.now() - asked > EVERY) {
        asked = Date.now();
        get(`${here}/use`, signal).then((answer) => {
          used = answer;
          redraw();
        }, () => (used = undefined));
      }
      return get(here, signal);
    },
    every: EVERY,
    draw(found) {
      const usageOf = (uuid) => used?.use?.gpus.find((gpu) => gpu.uuid === uuid);
      return [
        h("div", { class: "page-head" }, h("h1", {}, found.name), nodeMarks(found), found.gpus.length > 0 && h("p", { class: "value" }, percent(found.gpuTotals.taken, found.gpuTotals.total))),
        found.problem && h("p", { class: "card bad" }, t("node.problem"), ": ", found.problem),
        !found.problem && found.gpus.length === 0 && h("p", { class: "card" }, t("node.nogpus")),
        found.gpus.length > 0 && h("section", { class: "card" }, facts(found), used?.notMeasured && h("p", { class: "muted" }, t("used.why", { why: reason(used.notMeasured) }))),
        found.gpus.length > 0 && h("h2", {}, t("node.gpus")),
        h("div", { class: "gpus" }, found.gpus.map((gpu) => {
          const identity = found.identities[gpu.index];
          return gpuCard(gpu, identity, usageOf(identity.uuid), parameters.gpu === String(gpu.index));
        })),
        links(found),
      ];
    },
    cares: (news) => news.nodes.includes(name),
  };
}
