// The overview of the cluster.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { bound, colour, count, decimal, link, memory, model, percent } from "./format.js";
import { heatMap } from "./heat.js";
import { decisionList } from "./page-decisions.js";
import { noWaste, unknownIdle, wasteTable } from "./page-waste.js";
import { sparkline } from "./spark.js";
import { bar } from "./tile.js";
import { t } from "./text.js";

function figure(title, value, note, { parts, whole, href, tone } = {}) {
  const content = [h("h2", {}, title), h("p", { class: `value ${tone ?? ""}` }, value), parts && bar(parts, whole), h("p", { class: "muted" }, note)];
  return h(href ? "a" : "section", { class: "card figure-card", href }, content);
}

/** The four questions: what waits or is broken, who holds without use, how full it is. */
function figures({ gpus, fragmentation, ...cluster }, waste) {
  const { left, useless } = fragmentation;
  const { notReadyNodes, cordonedNodes } = cluster;
  const trouble = gpus.unhealthy + gpus.overbooked + cluster.unreadableNodes + notReadyNodes;
  const withheld = gpus.unhealthy + gpus.cordoned + gpus.inMigMode;
  const withdrawn = notReadyNodes + cordonedNodes + withheld > 0;
  const used = waste.usedGpus;
  // Nothing is known of pods that no agent has measured, so figures without them are lower bounds.
  const isPartial = waste.unknownPods > 0;
  const measured = (note) => isPartial ? [note, h("br"), t("waste.unknown", { n: count(waste.unknownPods) })] : note;
  const idle = waste.idlePods;
  return h("div", { class: "figures" },
    figure(t("over.waiting"), count(cluster.waitingPods), t("over.waiting.note", { n: count(cluster.placedPods) }),
      { href: link("pods", { state: "waiting" }), tone: cluster.waitingPods > 0 ? "warn" : "" }),
    figure(t("over.trouble"), count(trouble),
      t("over.trouble.note", { unhealthy: count(gpus.unhealthy), overbooked: count(gpus.overbooked), unreadable: count(cluster.unreadableNodes), down: count(notReadyNodes) }),
      { href: link("nodes", { state: "trouble" }), tone: trouble > 0 ? "bad" : "good" }),
    figure(t("over.idle"), idle === undefined ? "–" : bound(count(idle), isPartial), idle === undefined ? unknownIdle(waste) : measured(t("over.idle.note", { gpus: decimal(waste.idleGpus) })),
      { href: link("waste", { state: "idle" }), tone: idle > 0 ? "warn" : isPartial || idle === undefined ? "" : "good" }),
    figure(t("over.taken"), percent(gpus.taken, gpus.total), t("over.taken.note", { part: decimal(gpus.taken), whole: decimal(gpus.total) }),
      { parts: [["accent", gpus.taken]], whole: gpus.total }),
    figure(t("over.used"), used === undefined ? "–" : bound(percent(used, gpus.total), isPartial), used === undefined ? t("over.used.unknown") : measured(t("over.used.note", { part: decimal(used), whole: decimal(gpus.taken) })),
      { parts: [["accent", used ?? 0]], whole: gpus.total, href: link("waste") }),
    figure(t("over.left"), decimal(left),
      [t("over.left.note", { useless: decimal(useless), left: decimal(left) }), withdrawn && t("over.left.without", { nodes: count(cordonedNodes + notReadyNodes), gpus: count(withheld) })].filter(Boolean).join("; "),
      { parts: [["accent", left - useless], ["lost", useless]], whole: left }));
}

function modelTable(models) {
  const most = Math.max(1, ...models.flatMap((view) => view.fullness));
  const cell = (view, nodes, grade) => {
    if (nodes === 0) return h("td", { class: "grade none" }, "·");
    const shade = String(0.12 + 0.6 * (nodes / most));
    const label = `${model(view.model)}, ${t(`fullness.${grade}`)}: ${t("nodes.count", { n: count(nodes) })}`;
    return h("td", { class: "grade", style: { "--shade": shade } },
      h("a", { href: link("nodes", { model: view.model, fullness: grade }), "aria-label": label }, count(nodes)));
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("over.models") },
    h("table", { class: "models" },
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, t("model")), h("th", { scope: "col", class: "number" }, t("unit.gpus")), h("th", { scope: "col", class: "number" }, t("idle")),
        h("th", { scope: "col" }, t("over.taken")),
        [0, 1, 2, 3, 4, 5].map((grade) => h("th", { scope: "col", class: "number" }, t(`fullness.${grade}`))))),
      h("tbody", {}, models.map((view) => h("tr", { "data-key": `${view.model} ${view.gpuMiB}` },
        h("th", { scope: "row" }, h("a", { href: link("nodes", { model: view.model }) }, model(view.model)), h("span", { class: "muted" }, ` ${memory(view.gpuMiB)}`)),
        h("td", { class: "number" }, count(view.gpus.total)),
        h("td", { class: "number" }, count(view.gpus.idle)),
        h("td", { class: "with-bar" }, bar([["accent", view.gpus.taken]], view.gpus.total), h("span", { class: "figure" }, percent(view.gpus.taken, view.gpus.total))),
        view.fullness.map((nodes, grade) => cell(view, nodes, grade)))))));
}

function namespaceList(namespaces) {
  const most = Math.max(1, ...namespaces.map((view) => view.computeHeld));
  return h("ul", { class: "plain namespaces" }, namespaces.slice(0, 12).map((view) => h("li", { "data-key": view.namespace },
    h("span", { class: "name" }, h("span", { class: `dot ${colour(view.namespace)}` }), h("a", { href: link("pods", { namespace: view.namespace }) }, view.namespace)),
    h("span", { class: "figure" }, `${decimal(view.computeHeld / 100)} ${t("unit.gpus")} · ${memory(view.memoryHeldMiB)}`),
    bar([[colour(view.namespace), view.computeHeld]], most))));
}

export default function overview({ signal }) {
  const map = heatMap(signal);
  return {
    async load() {
      const [cluster, groups, decisions, waste] = await Promise.all([
        get("cluster", signal), get("map", signal), get(query("decisions", { limit: 60 }), signal), get(query("waste", { limit: 5 }), signal)]);
      return { cluster, groups, decisions, waste };
    },
    every: 15000,
    draw({ cluster, groups, decisions, waste }) {
      requestAnimationFrame(() => map.update(groups));
      return [
        h("div", { class: "page-head" }, h("h1", {}, t("overview")),
          h("p", { class: "muted" }, t("over.nodes", { nodes: count(cluster.nodes), gpus: count(cluster.gpus.total), policy: cluster.policy }))),
        cluster.nodes === 0 && h("p", { class: "card" }, t("over.empty")),
        figures(cluster, waste),
        h("div", { class: "two" },
          h("section", { class: "card", "data-key": "history" }, h("h2", {}, t("spark")), h("p", { class: "muted" }, t("spark.note")), sparkline(waste.history, cluster.gpus.total),
            h("p", { class: "muted" }, t("over.memory.note", { part: memory(cluster.gpus.memoryHeldMiB), whole: memory(cluster.gpus.memoryMiB) }), " · ", t("over.compute.note", { part: decimal(cluster.gpus.computeHeld / 100), whole: decimal(cluster.gpus.total) }))),
          h("section", { class: "card", "data-key": "waste" }, h("h2", {}, t("over.waste")),
            waste.pods.length === 0 ? h("p", { class: "muted" }, noWaste(waste)) : wasteTable(waste.pods), h("p", {}, h("a", { href: link("waste") }, t("waste.all"))))),
        h("section", { class: "card" }, h("h2", {}, t("over.models")), h("p", { class: "muted" }, t("over.models.note")), modelTable(cluster.models)),
        h("section", { class: "card" }, h("h2", {}, t("over.map")), h("p", { class: "muted" }, t("over.map.note")), map.place()),
        h("div", { class: "two" },
          h("section", { class: "card" }, h("h2", {}, t("over.namespaces")), namespaceList(cluster.namespaces)),
          h("section", { class: "card" }, h("h2", {}, t("over.recent")), decisionList(decisions.filter((decision) => decision.outcome !== "fits").slice(0, 8)), h("p", {}, h("a", { href: link("decisions") }, t("over.all"))))),
      ];
    },
    cares: () => true,
    pace: (data) => (data?.cluster.nodes > 1000 ? 2000 : 400),
  };
}
